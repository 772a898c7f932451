"""Tensors that are computed once and kept on disk: latents and text embeddings."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..files import written_aside


class TensorCache:
    """A folder of safetensors files, named after everything that their content depends on.

    Nothing in it is ever changed or outdated: other inputs have another key. So several processes may share it, and
    it may be deleted at any time.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    @staticmethod
    def key(**parts: Any) -> str:
        """The SHA-256 of named JSON values: 64 hexadecimal digits.

        Name everything that the tensors depend on: the sample's relative path and digest (or the caption), the bucket,
        the model, the precision.

        Raises:
            TypeError, ValueError: a part cannot be written as JSON exactly (such as a Path, or a float that is
                infinite).
        """
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """The tensors of a key, on the CPU; None if they were never put, or if their file is damaged."""
        try:
            with safe_open(self._path(key), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                checksum = (file.metadata() or {}).get("checksum")
        except (OSError, SafetensorError):
            return None
        return tensors if checksum == _checksum(tensors) else None

    def put(self, key: str, tensors: dict[str, torch.Tensor], source: str) -> None:
        """Keep tensors under a key, whole or not at all.

        Args:
            source: the name of the file (or the caption) that they were made from, for messages.

        Raises:
            ValueError: a tensor holds a NaN or an infinity; nothing is kept then.
        """
        # Copies, because safetensors refuses tensors that share memory, such as two views of one batch.
        stored = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        for name, tensor in stored.items():
            # Wider, because isfinite does not know every small data type.
            bad = int((~torch.isfinite(tensor.double() if tensor.is_floating_point() else tensor)).sum())
            if bad:
                raise ValueError(
                    f"{source}: {bad} of {tensor.numel()} values of {name!r} are not finite, so it is not cached. "
                    "Look at the file; if it is fine, encode with a wider data type (float32)"
                )
        with written_aside(self._path(key)) as aside:
            save_file(stored, aside, metadata={"source": source, "checksum": _checksum(stored)})

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    """Notices damage inside a file, which safetensors does not."""
    checksum = 0
    for _, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"
