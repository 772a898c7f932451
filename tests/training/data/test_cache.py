from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from elbowroom.training.data import TensorCache, scan

from .pictures import picture, save


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "cache")


def stored_file(cache: TensorCache) -> Path:
    (path,) = cache.folder.rglob("*.safetensors")
    return path


def test_tensors_come_back_exactly(cache: TensorCache):
    tensors = {
        "latents": torch.randn(16, 4, 4).bfloat16(),
        "mask": torch.tensor([True, False]),
        "ids": torch.arange(5),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "turned": torch.randn(3, 5).T,
    }
    key = cache.key(caption="a cat")
    assert cache.get(key) is None
    cache.put(key, tensors, "a.png")
    loaded = TensorCache(cache.folder).get(key)
    assert loaded is not None and loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)
    assert stored_file(cache).relative_to(cache.folder).as_posix() == f"{key[:2]}/{key}.safetensors"


def test_views_of_one_batch_can_be_kept(cache: TensorCache):
    batch = torch.randn(2, 3, requires_grad=True)
    key = cache.key(a=1)
    cache.put(key, {"first": batch[0], "again": batch[0], "all": batch}, "a.png")
    loaded = cache.get(key)
    assert loaded is not None and torch.equal(loaded["again"], batch[0])


def test_keys_of_different_samples_and_settings_never_collide(tmp_path: Path):
    """E06: a.png and a.jpg, dots in names, the same name in two folders, names that end in a number."""
    names = ["a.png", "a.jpg", "aaa.bbb.jpg", "aaa.ccc.jpg", "one/same.png", "two/same.png", "x_0001.png", "x_0002.png"]
    for name in names:
        save(tmp_path / name, picture(seed=1))  # Even the pictures are the same.
    samples = scan(tmp_path, caption_missing="empty").samples
    settings = [{"width": width, "height": height, "model": model} for width in (64, 96) for height in (64, 96)
                for model in ("flux", "sd3")]  # fmt: skip
    keys = {
        TensorCache.key(relative=sample.relative, digest=sample.digest, **setting)
        for sample, setting in itertools.product(samples, settings)
    }
    assert len(keys) == len(names) * len(settings)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "1"}, {"a": 1}),
        ({"a": "x", "b": "y"}, {"a": "y", "b": "x"}),
        ({"a": "xy", "b": ""}, {"a": "x", "b": "y"}),
        ({"a": '","b":"'}, {"a": "", "b": ""}),
        ({"a": None}, {}),
        ({"a": "é"}, {"a": "e\u0301"}),
        ({"a": [1, [2]]}, {"a": [[1], 2]}),
    ],
)
def test_similar_parts_have_different_keys(one: dict, other: dict):
    """E06: parts must not run into each other."""
    assert TensorCache.key(**one) != TensorCache.key(**other)


def test_key_is_stable_and_does_not_depend_on_the_order():
    assert TensorCache.key(a=1, b="ü") == TensorCache.key(b="ü", a=1)
    assert TensorCache.key(a=1) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    with pytest.raises(TypeError):
        TensorCache.key(path=Path("a"))
    with pytest.raises(ValueError):
        TensorCache.key(scale=float("nan"))


def test_every_edit_changes_the_key_and_nothing_else_does(tmp_path: Path):
    """E10: edited pixels, caption or settings make that entry anew; the rest is used again."""

    def keys() -> list[str]:
        samples = scan(tmp_path / "data", caption_missing="empty", index=tmp_path / "index.json").samples
        return [TensorCache.key(relative=each.relative, digest=each.digest, caption=each.caption) for each in samples]

    for number in range(3):
        save(tmp_path / "data" / f"{number}.bmp", picture(seed=number), f"caption {number}")
    before = keys()
    assert keys() == before
    save(tmp_path / "data" / "1.bmp", picture(seed=9))
    edited = keys()
    assert [old == new for old, new in zip(before, edited, strict=True)] == [True, False, True]
    (tmp_path / "data" / "2.txt").write_text("another caption")
    assert [old == new for old, new in zip(edited, keys(), strict=True)] == [True, True, False]


@pytest.mark.parametrize("part", [0.0, 0.02, 0.4, 0.99])
def test_truncated_files_count_as_absent_and_are_rebuilt(cache: TensorCache, part: float):
    """E10: a truncated cache file."""
    key, tensors = cache.key(a=1), {"latents": torch.randn(16, 8, 8)}
    cache.put(key, tensors, "a.png")
    path = stored_file(cache)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    assert cache.get(key) is None
    cache.put(key, tensors, "a.png")
    loaded = cache.get(key)
    assert loaded is not None and torch.equal(loaded["latents"], tensors["latents"])


def test_damage_inside_a_file_counts_as_absent(cache: TensorCache):
    """E10: a file of the right length with a wrong byte, and one of another program."""
    key = cache.key(a=1)
    cache.put(key, {"latents": torch.randn(16, 8, 8)}, "a.png")
    content = bytearray(stored_file(cache).read_bytes())
    content[-100] ^= 1
    stored_file(cache).write_bytes(content)
    assert cache.get(key) is None
    stored_file(cache).write_bytes(os.urandom(1000))
    assert cache.get(key) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_are_refused_with_the_file(cache: TensorCache, bad: float, dtype: torch.dtype):
    """E10: NaN latents are refused with the name of the file they came from."""
    latents = torch.zeros(4, 4, dtype=dtype)
    latents[1, 2] = bad
    with pytest.raises(ValueError, match=r"sub/photo\.png: 1 of 16 values of 'latents' are not finite"):
        cache.put(cache.key(a=1), {"latents": latents}, "sub/photo.png")
    assert cache.get(cache.key(a=1)) is None
    assert list(cache.folder.rglob("*.safetensors")) == []


WRITE_FOR_EVER = """
import itertools, sys, torch
from pathlib import Path
from elbowroom.training.data import TensorCache
cache = TensorCache(Path(sys.argv[1]))
for number in itertools.count():
    cache.put(cache.key(number=number % 3), {"latents": torch.full((200_000,), float(number))}, "a.png")
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_files_only(cache: TensorCache):
    """E10: killed in the middle of caching."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(cache.folder)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(5):
        writer.stdout.readline()
    time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    for number in range(3):
        loaded = cache.get(cache.key(number=number))
        assert loaded is not None
        assert loaded["latents"].unique().numel() == 1
