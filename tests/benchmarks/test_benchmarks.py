"""The benchmark programs run, at their smallest sizes, and what they check can fail."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

import disk_store
import engine
import offload_gpu
import overhead
import segments
import soak
from elbowroom.memory.offload.stacked_store import StackedStore
from full_size import build, inputs, step
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
            figures[row.name] = offload_gpu.Figures(norms=offload_gpu.gradient_norms(model))
            assert torch.equal(figures[row.name].norms, figures[offload_gpu.NO_OFFLOAD].norms), row.name
    assert figures[offload_gpu.NO_OFFLOAD].norms.count_nonzero() > 0.9 * len(figures[offload_gpu.NO_OFFLOAD].norms)
    assert offloaded["ours: everything, prefetched"] > offloaded["ours: attention, prefetched"] > 0
    assert offloaded["ours: blocks recomputed"] == 0
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_offload_gpu_tells_gradients_that_differ():
    norms = torch.tensor([3.0, 4.0])
    figures = {
        "first": offload_gpu.Figures(norms=norms),
        "failed": offload_gpu.Figures(note="out of GPU memory"),
        "same": offload_gpu.Figures(norms=norms * 1.001),
        "other": offload_gpu.Figures(norms=norms * 1.1),
        "nothing": offload_gpu.Figures(norms=norms * float("nan")),
    }
    assert offload_gpu.strangers(figures) == ["other", "nothing"]


def test_offload_gpu_bound_and_exposed_time(capsys):
    link = offload_gpu.Link(out=20e9, back=10e9)
    assert link.bound(20e9) == 3000
    figures = {
        offload_gpu.NO_OFFLOAD: offload_gpu.Figures(100.0, 2 << 30, 0),
        "ours": offload_gpu.Figures(110.0, 1 << 30, 1 << 30),
        "peer": offload_gpu.Figures(note="left out"),
    }
    offload_gpu.Console(width=130).print(offload_gpu.table_of("", figures, link))
    printed = capsys.readouterr().out
    assert re.search(r"ours +│ +110.0 │ +1.100 │ +1.00 │ +1.00 │ +161.1 │ +10.0 ", printed)
    assert "peer: left out" in printed


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
