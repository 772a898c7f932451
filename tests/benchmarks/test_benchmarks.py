"""The benchmark programs run, at their smallest sizes, and what they check can fail."""

from __future__ import annotations

import json
import re
import sys
import types

import pytest
import torch
from rich.console import Console
from torch import nn

import disk_store
import engine
import offload_gpu
import overhead
import segments
import soak
import streaming_disk
import streaming_gpu
from elbowroom.memory.offload.stacked_store import StackedStore
from elbowroom.testing import simulated_accelerator
from full_size import build, inputs, step
from gpu import Link, gradient_norms, strangers
from models import build_flux, build_sd3, flux_inputs, sd3_inputs
from peers import SaveAttention


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a program with arguments; return what it prints."""

    def run_program(program, *arguments):
        monkeypatch.setattr(sys, "argv", [program.__file__, *map(str, arguments)])
        program.main()
        return capsys.readouterr().out

    return run_program


ROWS_OF_ENGINE = (
    "untouched",
    *("torch checkpoint", "recompute blocks"),
    *("selective, kernel", "keep attention kernel"),
    *("selective, attention", "keep attention"),
    "everything on disk",
)


def test_engine(run, tmp_path):
    found = tmp_path / "figures.json"
    small = ("--rounds", 1, "--side", 8, "--width", 64, "--layers", 4)
    printed = run(engine, *small, "--json", found, "--rows", *ROWS_OF_ENGINE)
    document = json.loads(found.read_text())
    assert set(document) == {"flux", "sd3"}
    for figures in document.values():
        peaks = {name: each["peak"] for name, each in figures.items() if name == name.strip()}
        assert set(peaks) == set(ROWS_OF_ENGINE) and all(name in printed for name in peaks)
        assert peaks["recompute blocks"] < peaks["keep attention"] < peaks["untouched"]
        # What "means the same" takes the same.
        assert peaks["keep attention"] == pytest.approx(peaks["selective, attention"], rel=0.03)
        assert peaks["keep attention kernel"] == pytest.approx(peaks["selective, kernel"], rel=0.03)


def test_engine_names_the_row_that_it_does_not_know(run, capsys):
    with pytest.raises(SystemExit):
        run(engine, "--model", "sd3", "--side", 2, "--width", 64, "--layers", 1, "--rows", "untuched")
    assert "no row is named untuched" in capsys.readouterr().err


def test_engine_tells_what_is_worse():
    rows = [engine.Row("fast", None, ("peer",)), engine.Row("faster", None, ("peer",), faster=True)]
    figures = {
        "peer": engine.Figures([1.0, 2.0, 5.0], 1000),
        "fast": engine.Figures([1.01, 2.02, 4.0], 1020),
        "faster": engine.Figures([1.01, 2.02, 4.0], 990),
    }
    assert engine.broken(rows, figures) == ["faster is not faster than peer"]
    figures["fast"] = engine.Figures([1.03, 2.06, 4.0], 1031)
    assert engine.broken(rows[:1], figures) == ["fast takes more bytes than peer", "fast is not as fast as peer"]


@pytest.mark.parametrize(
    ("model", "batch"),
    [(lambda: build_flux(64, 1, 1), flux_inputs(16)), (lambda: build_sd3(64, 2, 8), sd3_inputs(8))],
    ids=["flux", "sd3"],
)
def test_selective_peer_saves_no_view_of_what_it_is_given(model, batch):
    """A view of the module's input would keep the input alive, which is not attention's."""
    wanted = SaveAttention(model(), batch).wanted
    assert wanted and all(wanted.values())
    assert not any(0 in numbers for numbers in wanted.values())  # the first operation of each attention is such a view


def test_overhead(run, monkeypatch):
    monkeypatch.setattr(overhead, "BLOCKS", 3)
    monkeypatch.setattr(overhead, "REPEATS", 1)
    printed = run(overhead, "--rounds", 1)
    ratios = re.findall(r"(ours[^│]*?) +│ +(\d+) +│ +(-?\d+) +│ +(-?\d+\.\d+)", printed)
    assert [name for name, *_ in ratios] == [
        *("ours", "ours, segments of 4"),
        *("ours", "ours, segments of 4", "ours, attention kept") * 2,
    ]


def test_disk_store(run, monkeypatch):
    monkeypatch.setattr(disk_store, "in_fresh_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(disk_store, "build_flux", lambda **_: build_flux(64, 1, 1))
    printed = run(disk_store, "--side", 8)
    assert "everything on disk" in printed and "%" in printed


def test_disk_store_takes_a_process_of_its_own():
    figures = disk_store.in_fresh_process(dict, [("offloaded", 1)])
    assert figures == {"offloaded": 1}


def test_segments(run, monkeypatch):
    monkeypatch.setattr(segments, "build_model", lambda: build_flux(64, 2, 2))
    assert "interval 2, stride 4" in run(segments, "--rounds", 1, "--tokens", 16)


# ---- offload_gpu -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_offload_gpu_refuses_without_a_gpu(run):
    with pytest.raises(SystemExit, match="torch finds none here"):
        run(offload_gpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["sd3-medium", "flux.1-dev"])
@pytest.mark.parametrize("train", ["lora", "full"])
def test_offload_gpu(run, model, train, tmp_path):
    found = tmp_path / "figures.json"
    run(offload_gpu, "--model", model, "--train", train, "--layers", 3, "--side", 16, "--rounds", 2, "--json", found)
    rows = json.loads(found.read_text())["rows"]
    assert rows["ours: everything, prefetched"]["offloaded"] > rows["ours: attention, prefetched"]["offloaded"] > 0


@pytest.mark.parametrize("name", ["sd3-medium", "flux.1-dev"])
@pytest.mark.parametrize("lora", [True, False])
def test_rows_of_offload_gpu_give_the_same_gradients(name, lora):
    """On the CPU, where the store is on the disk: what the rows do is the same, but not what it costs."""
    at = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    model = build(name, layers=2, lora=lora, heads=1, **at)
    batch = inputs(name, side=2, batch=1, **at)
    figures, offloaded = {}, {}
    for row in offload_gpu.rows(window=1 << 20):
        if row.name.startswith(("no", "ours")):
            with row.ready(model) as handle:
                step(model, batch)
                step(model, batch)  # prefetched from here on
                offloaded[row.name] = offload_gpu.offloaded_bytes(handle)
            figures[row.name] = offload_gpu.Figures(norms=gradient_norms(model))
            assert torch.equal(figures[row.name].norms, figures[offload_gpu.NO_OFFLOAD].norms), row.name
    assert figures[offload_gpu.NO_OFFLOAD].norms.count_nonzero() > 0.9 * len(figures[offload_gpu.NO_OFFLOAD].norms)
    assert offloaded["ours: everything, prefetched"] > offloaded["ours: attention, prefetched"] > 0
    assert offloaded["ours: blocks recomputed"] == 0
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_gradients_that_differ_are_told():
    norms = torch.tensor([3.0, 4.0])
    figures = {
        "first": norms,
        "failed": None,
        "same": norms * 1.001,
        "other": norms * 1.1,
        "nothing": norms * float("nan"),
    }
    assert strangers(figures) == ["other", "nothing"]


def test_offload_gpu_bound_and_exposed_time(capsys):
    link = Link(out=20e9, back=10e9)
    assert link.milliseconds(out=20e9, back=20e9) == 3000
    figures = {
        offload_gpu.NO_OFFLOAD: offload_gpu.Figures(100.0, 2 << 30, 0),
        "ours": offload_gpu.Figures(110.0, 1 << 30, 1 << 30),
        "peer": offload_gpu.Figures(note="left out"),
    }
    Console(width=130).print(offload_gpu.table_of("", figures, link))
    printed = capsys.readouterr().out
    assert re.search(r"ours +│ +110.0 │ +1.100 │ +1.00 │ +1.00 │ +161.1 │ +10.0 ", printed)
    assert "peer: left out" in printed


# ---- streaming_gpu ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_streaming_gpu_refuses_without_a_gpu(run, capsys):
    with pytest.raises(SystemExit, match=r"streaming_gpu.py measures a GPU, and torch finds none here"):
        run(streaming_gpu)
    with pytest.raises(SystemExit):
        run(streaming_gpu, "--rows", "theirs")
    assert "no row begins with theirs; there are: resident; ours: blocks;" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["sd3-medium", "flux.1-dev"])
@pytest.mark.parametrize("work", ["lora", "full", "sample"])
def test_streaming_gpu(run, model, work, tmp_path):
    found = tmp_path / "figures.json"
    run(streaming_gpu, "--model", model, "--work", work, "--layers", 3, "--side", 16, "--rounds", 2, "--json", found)
    rows = json.loads(found.read_text())["rows"]
    assert rows["ours: blocks"]["fetched"] > rows["ours: half of the blocks"]["fetched"] > 0
    assert rows["ours: blocks"]["peak"] < rows["resident"]["peak"]


@pytest.mark.parametrize("name", ["sd3-medium", "flux.1-dev"])
@pytest.mark.parametrize("work", ["lora", "full", "sample"])
def test_rows_of_streaming_gpu_compute_the_same(name, work):
    """On the simulated accelerator: what the rows do is the same, but not what it costs."""
    figures, copied, drawn = {}, {}, {}
    for row, ready in streaming_gpu.rows(window=1 << 18).items():
        if not row.startswith(("resident", "ours")):
            continue
        with simulated_accelerator() as accelerator:
            at = {"dtype": torch.bfloat16}
            model = build(name, layers=2, lora=work == "lora", heads=1, device=torch.device("cpu"), **at)
            batch = inputs(name, side=2, batch=1, device=accelerator.device, **at)
            with ready(model, accelerator.device, work) as handle:
                for _ in range(2):
                    streaming_gpu.run(work, model, batch)
                copied[row] = streaming_gpu.counted(handle)
                with torch.no_grad():
                    drawn[row] = model(**batch).sample.cpu()
                if work != "sample":
                    norms = gradient_norms(model).tolist()
                    figures[row] = streaming_gpu.Figures(1.0, 1, norms=norms)
                    assert sum(norm > 0 for norm in norms) > 0.9 * len(norms)
                    assert norms == figures["resident"].norms, row
            assert torch.equal(drawn[row], drawn["resident"])
            assert accelerator.violations == []
            del batch, handle
    assert streaming_gpu.problems_of(figures) == []
    assert not any(copied["resident"].values())
    assert copied["ours: blocks"]["weight_bytes_in"] > copied["ours: half of the blocks"]["weight_bytes_in"] > 0
    assert copied["ours: layers"]["weight_bytes_in"] > 0
    assert bool(copied["ours: blocks"]["gradient_bytes_out"]) == (work == "full")


def test_streaming_gpu_puts_layers_of_ramtorch_in_the_place_of_others(monkeypatch):
    class Linear(nn.Linear):
        def __init__(self, *sizes, device, skip_init, **options):
            assert skip_init
            super().__init__(*sizes, device="meta", **options)
            self.to_empty(device="cpu")

    monkeypatch.setitem(sys.modules, "ramtorch", types.ModuleType("ramtorch"))
    monkeypatch.setitem(sys.modules, "ramtorch.modules", types.ModuleType("ramtorch.modules"))
    monkeypatch.setitem(sys.modules, "ramtorch.modules.linear", types.SimpleNamespace(Linear=Linear))
    cpu = torch.device("cpu")
    model = build("flux.1-dev", layers=2, lora=True, heads=1, device=cpu, dtype=torch.bfloat16)
    batch = inputs("flux.1-dev", side=2, batch=1, device=cpu, dtype=torch.bfloat16)
    step(model, batch)
    expected = gradient_norms(model)
    with streaming_gpu.ramtorch_linears(model, cpu, "lora"):
        step(model, batch)
        assert torch.equal(expected, gradient_norms(model))
        kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        assert all((kind is Linear) == (".lora_" not in name) for name, kind in kinds.items())
        assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "lora" not in name)


def test_streaming_gpu_tells_what_is_wrong_with_ours_and_shows_what_is_wrong_with_others(capsys):
    figures = {
        "resident": streaming_gpu.Figures(100.0, 4 << 30, norms=[3.0, 4.0]),
        "ours: blocks": streaming_gpu.Figures(110.0, 1 << 30, 2 << 30, 1 << 30, 0.75, norms=[3.0, 4.0]),
        "ours: layers": streaming_gpu.Figures(note="ValueError: no"),
        "ours: half": streaming_gpu.Figures(120.0, 1 << 30, 1 << 30, 0, 0.5, norms=[3.0, 5.0]),
        "ours: more": streaming_gpu.Figures(note="out of GPU memory"),
        "theirs": streaming_gpu.Figures(note="RuntimeError: two devices"),
    }
    assert streaming_gpu.problems_of(figures) == [
        "ours: layers: ValueError: no",
        "ours: half: gradients are not those of the first row",
    ]
    Console(width=140).print(streaming_gpu.table_of("", figures, Link(out=10e9, back=20e9)))
    printed = capsys.readouterr().out
    assert re.search(r"blocks +│ +110.0 │ +1.100 │ +1.00 │ +2.00 │ +1.00 │ +214.7 │ +10.0 │ +75%", printed)
    assert "theirs: RuntimeError: two devices" in printed


# ---- streaming_disk --------------------------------------------------------------------------------------------------


def test_streaming_disk(run, tmp_path):
    small = ("--gigabytes", 0.05, "--heads", 2, "--tokens", 4, "--window", 1 << 20, "--folder", tmp_path)
    found = tmp_path / "figures.json"
    printed = run(streaming_disk, *small, "--json", found)
    assert "streamed from its files" in printed
    figures = json.loads(found.read_text())
    assert figures["checkpoint"] >= 0.05e9
    assert figures["weight_bytes_in"] > 2 * figures["weights_streamed"] > figures["checkpoint"]
    assert figures["peak"] > figures["imports"] > 0
    with pytest.raises(SystemExit, match=r"the peak is above 0.01 GB"):
        run(streaming_disk, *small, "--check", 0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


# ---- soak ------------------------------------------------------------------------------------------------------------


def test_soak(run):
    printed = run(soak, "--steps", 6, "--device", "both")
    assert "Nothing was left behind" in printed


def test_soak_finds_what_stays_in_the_store(run, monkeypatch):
    free, calls = StackedStore.free, []

    def forgetful(store, stored):
        calls.append(stored)
        if len(calls) % 50:
            free(store, stored)

    monkeypatch.setattr(StackedStore, "free", forgetful)
    with pytest.raises(SystemExit, match="bytes are still in the store"):
        run(soak, "--steps", 10, "--device", "cpu")


def test_soak_finds_objects_that_stay(run, monkeypatch):
    kept = []
    drop = StackedStore.free
    monkeypatch.setattr(StackedStore, "free", lambda store, stored: (kept.append(stored), drop(store, stored)))
    with pytest.raises(SystemExit, match=r"more objects than after the warm-up: .*\.Span'"):
        run(soak, "--steps", 10, "--device", "cpu")
