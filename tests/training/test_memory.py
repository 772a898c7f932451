"""Memory options in whole training runs: the same weights, and a summary that proves that the option took effect."""

from __future__ import annotations

import json
import re

import pytest

from elbowroom.memory.offload import autotune
from elbowroom.training.memory_use import what_needs_less
from tests.support.runs import command, flags, job, run, weights

FLUX_AND_SD3 = ("flux", "sd3")


def counted(pattern: str, printed: str) -> int:
    found = re.search(pattern, printed)
    assert found, f"{pattern!r} is not in the summary:\n{printed}"
    return int(found[1])


CHECKPOINTING = {"gradient_checkpointing": True}

OPTIONS = {
    "recompute feed-forward": (CHECKPOINTING | {"gradient_checkpointing_backend": "torch-ffn"}, "krk"),
    "offload boundaries": (CHECKPOINTING | {"gradient_checkpointing_backend": "unsloth"}, "<r>"),
    "recompute feed-forward, offload boundaries": (
        CHECKPOINTING | {"gradient_checkpointing_backend": "unsloth-ffn"}, "<krk>",
    ),
    "keep attention": (CHECKPOINTING | {"gradient_checkpointing_keep_attention": True}, "[krr]"),
    "keep the attention kernel": (CHECKPOINTING | {"gradient_checkpointing_keep_attention": "kernel"}, "[Krr]"),
    "offload attention": ({"gradient_checkpointing_offload_attention": True}, "okk"),
    "offload attention, recompute the rest": (
        CHECKPOINTING | {"gradient_checkpointing_offload_attention": True}, "[orr]",
    ),
    "offload everything": ({"activation_offload": "all"}, "o"),
    "offload two parts": ({"activation_offload": "attention,feed_forward"}, "ook"),
}  # fmt: skip


@pytest.mark.parametrize("family", FLUX_AND_SD3)
def test_every_way_ends_in_the_same_weights_and_says_what_it_did(family, basics):
    plain, _, _ = run(**basics(family, "plain"))
    expected = weights(plain.run.path)
    for name, (options, cell) in OPTIONS.items():
        saved, _, printed = run(**basics(family, name.replace(" ", "-")), **options)
        assert weights(saved.run.path) == expected, name
        assert cell in saved.plan.strip(), name
        assert saved.plan.strip() in printed, name
        if "offload" in name:
            assert counted(r"offloaded: (\d+) storages", printed) > 0, name
        if "recompute" in name:
            assert counted(r"backward: (\d+) replays", printed) > 0, name
        if "keep" in name:
            assert counted(r"(\d+) calls of scopes not run again", printed) > 0, name


def test_the_disk_store_is_in_the_run_folder_and_leaves_nothing_there(basics):
    options = basics("flux", "run")
    assert job(**options, activation_offload="all").plan.offload.path == str(options["output_dir"] / "run")
    finished, _, printed = run(**options, activation_offload="all")
    assert "reserved" in printed
    assert not list(finished.run.path.rglob("elbowroom-*"))


def test_another_folder_can_be_named(basics, tmp_path):
    elsewhere = tmp_path / "fast disk"
    run(**basics("flux", "run"), activation_offload="all", activation_store_path=elsewhere)
    assert elsewhere.is_dir()
    assert not list(elsewhere.iterdir())  # the files have no name


def test_a_limit_is_honoured_and_reported(basics):
    plain, _, _ = run(**basics("flux", "plain"))
    limited, _, printed = run(
        **basics("flux", "limited"), activation_offload="all", activation_store_limit="64KiB",
        activation_window="16KiB",
    )  # fmt: skip
    assert weights(limited.run.path) == weights(plain.run.path)
    assert re.search(r"no room: .* stayed", printed)
    found = re.search(r"store at most ([\d.]+) KiB", printed)
    assert found and 0 < float(found[1]) <= 64
    assert f"store: cpu: files in {limited.run.path.absolute()}, at most 64.0 KiB; window 16.0 KiB each way" in printed


@pytest.mark.parametrize("option", ["activation_store_path", "weight_store_path"])
def test_a_folder_that_can_not_be_is_told_in_the_dry_run(option, basics, tmp_path):
    (tmp_path / "file").write_text("")
    feature = {"activation_offload": "all"} if option.startswith("activation") else {"weight_streaming": "100%"}
    process = command(
        "train", *flags(**basics("flux", "run"), **feature, **{option: tmp_path / "file" / "below"}), "--dry-run"
    )
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"error: {option} (command line): {tmp_path / 'file'} is not a folder" in printed
    assert not (tmp_path / "runs").exists()


def test_warnings_are_lines_of_ours(basics):
    process = command(
        "train", *flags(**basics("flux", "run"), activation_offload="all", activation_store_limit="64KiB")
    )
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "\nwarning: saved tensors that the store has no room for stay on cpu: it is full" in printed
    assert "UserWarning" not in printed and printed.count("warning: saved tensors") == 1


def test_what_to_do_when_memory_runs_out(basics):
    def advice(**options: object) -> str:
        return what_needs_less(job(**basics("flux", "run") | options).resolved.options)

    assert advice().startswith("gradient_checkpointing, activation_offload=all, weight_streaming=100%, ramtorch_text")
    assert "a smaller batch or a lower resolution" in advice()
    everything = {
        "gradient_checkpointing": True, "activation_offload": "all", "weight_streaming": "100%", "batch": 1,
        "ramtorch_text_encoder": True, "ramtorch_vae": True, "precision": "bf16",
    }  # fmt: skip
    assert advice(**everything) == "base_model_precision=int8-torchao or a lower resolution"
    assert advice(**everything, base_model_precision="int8-torchao") == "a lower resolution"


@pytest.mark.parametrize("store", ["pinned", "pageable"])
def test_host_memory_is_no_store_for_a_model_that_is_in_host_memory(basics, store):
    with pytest.raises(ValueError, match="activation_store: .* the model is on the CPU.* use 'disk'"):
        job(**basics("flux", "run"), activation_offload="all", activation_store=store)
    assert not (basics("flux", "run")["output_dir"] / "run").exists()


def test_prefetching_is_decided_once_a_shape_and_remembered(basics, monkeypatch):
    options = basics("flux", "tuned") | {"activation_offload": "all", "steps": 8, "checkpoint_steps": 8}
    plain, _, _ = run(**basics("flux", "plain") | {"steps": 12, "checkpoint_steps": 8})
    tuned, _, printed = run(**options)
    decisions = json.loads(tuned.run.prefetch.read_text())
    # Three squares and a wide picture, batch 2: two squares, one square, one wide.
    shapes = {key.split(" ", 1)[1].partition(", cpu, ")[0] for key in decisions}
    assert shapes == {"2 x 32x32", "1 x 32x32", f"1 x {tuned.buckets[3].width}x{tuned.buckets[3].height}"}
    for decision in decisions.values():
        assert decision["on_demand"]["seconds"] > 0
        assert decision["prefetched"]["seconds"] > 0
    assert printed.count("reload of offloaded tensors, ") == len(decisions)
    assert printed.count(" s prefetched, ") == len(decisions)

    monkeypatch.setattr(autotune, "_decide", lambda *_: pytest.fail("what was decided is decided again"))
    more, _, printed = run(**options | {"steps": 12})
    assert "reload of offloaded tensors, " not in printed
    assert weights(more.run.path) == weights(plain.run.path)

    monkeypatch.undo()
    _, _, printed = run(**options | {"steps": 18, "activation_window": "1MiB"})
    assert printed.count(" s prefetched, ") == len(decisions)  # with another window, other times


def test_nothing_is_timed_where_nothing_goes_to_the_store(basics):
    _, _, printed = run(
        **basics("flux", "full") | {"steps": 8}, activation_offload="all", activation_store_limit="1"
    )  # fmt: skip
    assert "reload of offloaded tensors, " not in printed


def test_prefetching_can_be_settled_by_hand(basics):
    for wanted in (True, False):
        settled, _, printed = run(
            **basics("flux", f"prefetch-{wanted}") | {"steps": 6}, activation_offload="all",
            gradient_checkpointing_offload_prefetch=wanted,
        )  # fmt: skip
        assert not settled.run.prefetch.exists()
        assert "reload of offloaded tensors, " not in printed
        # An epoch has three shapes, and the order of each is known from its second step on.
        assert (counted(r"(\d+) ahead of use", printed) > 0) is wanted


def test_mistakes_are_refused_before_the_run(basics, tmp_path):
    options = basics("flux", "run")
    process = command("train", *flags(**options, activation_offload="feet"))
    printed, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "feet" in printed and "feed_forward" in printed and "Traceback" not in printed
    assert not (options["output_dir"] / "run").exists()
