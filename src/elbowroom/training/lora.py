"""LoRA: put an adapter on a denoiser, and save it as a file that Diffusers or ComfyUI loads.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685) adds `alpha / rank * up @ down` to a frozen weight. PEFT calls
`down` `lora_A` (rank × in) and `up` `lora_B` (out × rank, zero at first).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from elbowroom.memory.blocks import unwrap
from elbowroom.training.files import written_aside
from elbowroom.training.names import plain_name

LoraFormat = Literal["diffusers", "comfyui"]

FILE_NAMES: Mapping[LoraFormat, str] = {
    "diffusers": "pytorch_lora_weights.safetensors",  # the name that load_lora_weights(folder) looks for
    "comfyui": "comfyui_lora_weights.safetensors",
}
_ADAPTER = "default"
_ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WRAPPER_PARTS = re.compile(
    r"base_model|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|(^|\.)module\.|\.default(\.|$)"
)


class LoraFileError(RuntimeError):
    """A saved LoRA file does not hold what was trained, or other programs could not use it."""


def add_lora(denoiser: Any, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Freeze a Diffusers model and put a trainable LoRA adapter, called "default", on it, in place.

    The adapter is in float32 whatever the precision of the model, and does nothing yet: its up-matrices are zero. Its
    down-matrices are drawn from `seed` alone, equal on every device and for every precision of the model.

    Args:
        denoiser: a model with Diffusers' `add_adapter`, without an adapter so far.
        rank: inner width of the adapter.
        alpha: the adapter's output is scaled by `alpha / rank`.
        targets: names of linear or convolution layers, each as a module's last name or names: `"to_q"`, `"ff.net.2"`.
        seed: for the down-matrices; the global random state is left as it was.

    Raises:
        TypeError: the model has no `add_adapter`.
        ValueError: rank or alpha is not positive, the model has an adapter already, or a target names no layer.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, but is {rank}")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha must be above 0, but is {alpha}")
    if not hasattr(denoiser, "add_adapter"):
        raise TypeError(f"{type(denoiser).__name__} has no add_adapter, so it can't take a LoRA; train it in full")
    if getattr(denoiser, "peft_config", None):
        raise ValueError(f"{type(denoiser).__name__} has an adapter already ({', '.join(denoiser.peft_config)})")
    _check_targets(denoiser, targets)
    denoiser.requires_grad_(False)
    scale: Any = alpha  # PEFT's annotation says int, but it only divides: a fraction is as good
    with torch.random.fork_rng(devices=(), device_type="cpu"):  # PEFT fills the matrices itself, on the CPU, before us
        denoiser.add_adapter(LoraConfig(r=rank, lora_alpha=scale, target_modules=list(targets)), adapter_name=_ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in denoiser.named_parameters():
        if parameter.requires_grad:
            values = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)  # as PEFT does
            parameter.data = values.to(parameter.device)


def lora_state(denoiser: nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors on the CPU, named as in `transformer_blocks.0.attn.to_q.lora_A.weight`.

    Raises:
        LoraFileError: the model's state dict lacks adapter weights that are its parameters. A wrapper around a module
            that answers `state_dict` by itself can do that.
    """
    state = {
        plain_name(name): tensor.detach().cpu().contiguous()
        for name, tensor in get_peft_model_state_dict(unwrap(denoiser), adapter_name=_ADAPTER).items()
    }
    parameters = {plain_name(name) for name, _ in denoiser.named_parameters() if ".lora_" in name}
    if parameters != set(state):
        raise LoraFileError(
            "the model's state dict and its parameters disagree about the adapter. Only in the parameters: "
            f"{_listed(parameters - set(state))}. Only in the state dict: {_listed(set(state) - parameters)}"
        )
    return state


def save_lora(
    denoiser: nn.Module,
    folder: Path,
    *,
    pipeline_class: Any,
    component: str = "transformer",
    format: LoraFormat = "diffusers",
) -> Path:
    """Write the adapter into `folder`, checked and whole or not at all; return the file's path.

    - "diffusers": the pipeline class itself writes the file, with rank and alpha in its metadata, so that
      `pipeline.load_lora_weights(folder)` restores both. Other programs read the names but not that metadata, and
      take alpha to be the rank.
    - "comfyui": the names that ComfyUI reads, with alpha as a tensor for each layer; see `to_comfyui`.

    Args:
        denoiser: a model that `add_lora` was called on; it may be wrapped (DDP, `torch.compile`).
        pipeline_class: the Diffusers pipeline of the model, such as `FluxPipeline`.
        component: the denoiser's name in the pipeline.

    Raises:
        LoraFileError: what was written is not what was trained (`verify_lora`); no file is left behind.
    """
    model: Any = unwrap(denoiser)
    config = model.peft_config[_ADAPTER]
    state = lora_state(denoiser)
    path = folder / FILE_NAMES[format]
    with written_aside(path) as aside:
        if format == "comfyui":
            expected = to_comfyui(state, alpha=config.lora_alpha, component=component)
            save_file(expected, aside, metadata={"format": "pt"})
        else:
            expected = {f"{component}.{name}": tensor for name, tensor in state.items()}
            layers = {f"{component}_lora_layers": state, f"{component}_lora_adapter_metadata": _metadata(config)}
            pipeline_class.save_lora_weights(aside.parent, weight_name=aside.name, **layers)
            _sort_metadata(aside)
        verify_lora(aside, expected, name=path)
    return path


def to_comfyui(state: Mapping[str, torch.Tensor], *, alpha: float, component: str) -> dict[str, torch.Tensor]:
    """Rename an adapter's tensors to what ComfyUI reads for Flux and Stable Diffusion 3.

    `blocks.0.to_q.lora_A.weight` becomes `lora_transformer_blocks_0_to_q.lora_down.weight`, and for each layer there
    is an `.alpha` (a float32 scalar). Source: `model_lora_keys_unet` in ComfyUI's comfy/lora.py, which maps
    `lora_transformer_` and the Diffusers name of a layer, its dots as underscores.

    Args:
        state: as from `lora_state`.
    """
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise LoraFileError(f"{name!r} is no weight of a plain LoRA, so there is no ComfyUI name for it")
        layer = f"lora_{component}_{match[1].replace('.', '_')}"
        renamed[f"{layer}.lora_{'down' if match[2] == 'A' else 'up'}.weight"] = tensor
        renamed[f"{layer}.alpha"] = torch.tensor(float(alpha))
    if sum(not name.endswith(".alpha") for name in renamed) != len(state):
        raise LoraFileError("two layers of this model have the same name for ComfyUI; use the diffusers format")
    return renamed


def verify_lora(path: Path, expected: Mapping[str, torch.Tensor], *, name: Path | None = None) -> None:
    """Open a saved LoRA file again and check that it holds what was trained.

    Args:
        expected: the tensors, by the names that the file must use.
        name: what messages call the file, where it is still to be renamed.

    Raises:
        LoraFileError: the file is unreadable; a tensor is missing, surplus, different or not finite; a name has parts
            of a wrapper; or all up-matrices are zero, which an adapter that was trained can't be.
    """
    name = name or path
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise LoraFileError(f"the LoRA file {name} can't be read again: {error}") from error
    missing, unexpected = set(expected) - set(found), set(found) - set(expected)
    ups = [tensor for name, tensor in found.items() if name.endswith((".lora_B.weight", ".lora_up.weight"))]
    problems = {
        "names of wrappers": {each for each in found if _WRAPPER_PARTS.search(each)},
        "missing": missing,
        "unexpected": unexpected,
        "not finite": {name for name, tensor in found.items() if not tensor.isfinite().all()},
        "different from the model": {
            name
            for name, tensor in expected.items()
            if name in found and not (found[name].dtype == tensor.dtype and _same_bits(found[name], tensor))
        },
    }
    reasons = [f"{problem}: {_listed(names)}" for problem, names in problems.items() if names]
    if not any(up.any() for up in ups):
        reasons.append(f"all of its {len(ups)} up-matrices are zero, so it would change nothing: it was not trained")
    if reasons:
        raise LoraFileError(f"the LoRA file {name} was not kept, since it is wrong. {'; '.join(reasons)}")


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.cpu().nan_to_num(), right.detach().cpu().nan_to_num())  # not finite is a finding of its own


def _sort_metadata(path: Path) -> None:
    """Give the metadata of a safetensors file a fixed order: its writer has a random one, and equal runs equal bytes.

    Source: the format, at https://github.com/huggingface/safetensors: a header of JSON, padded with spaces, after its
    length in eight bytes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def _metadata(config: LoraConfig) -> dict[str, Any]:
    """The adapter's configuration for Diffusers' file header: rank, alpha, targets and what else is not a default.

    Only those, since an older or newer PEFT refuses a configuration with options that it does not know. The targets
    are sorted: the order of a set differs between processes, and the same training should give the same file.
    """
    values, defaults = config.to_dict(), LoraConfig().to_dict()
    chosen = {key: value for key, value in values.items() if value != defaults[key]}
    chosen |= {"r": config.r, "lora_alpha": config.lora_alpha}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in chosen.items()}


def _check_targets(denoiser: nn.Module, targets: Sequence[str]) -> None:
    if isinstance(targets, str) or not targets:
        raise ValueError(f'targets must be a list of layer names, such as ["to_q", "to_k"], but is {targets!r}')
    layers = {name for name, module in denoiser.named_modules() if isinstance(module, _ADAPTABLE)}
    short = {re.sub(r"^.*?\.\d+\.", "", name) for name in layers}  # without the block: "attn.to_out.0"
    short |= {last for name in layers if not (last := name.rpartition(".")[2]).isdigit()}
    for target in targets:
        # What PEFT does with a list of targets.
        matched = [name for name, _ in denoiser.named_modules() if name == target or name.endswith(f".{target}")]
        if not matched:
            near = difflib.get_close_matches(target, sorted(short), n=3, cutoff=0.5) or sorted(short)
            raise ValueError(
                f"the LoRA target {target!r} names no layer of {type(denoiser).__name__}; near or possible names: "
                f"{_listed(near)}"
            )
        for name in matched:
            if name not in layers:
                inside = sorted({layer.removeprefix(f"{name}.") for layer in layers if layer.startswith(f"{name}.")})
                raise ValueError(
                    f"the LoRA target {target!r} names {name}, which is no linear or convolution layer; layers inside "
                    f"it: {_listed(inside)}"
                )


def _listed(names: Sequence[str] | set[str], limit: int = 8) -> str:
    shown = list(names) if isinstance(names, Sequence) else sorted(names)
    return ", ".join(shown[:limit] + (["…"] if len(shown) > limit else [])) or "none"
