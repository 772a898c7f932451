"""The state of training in files, from which it goes on bit for bit: weights, optimizer, random numbers, counters.

Only what training changes is written (of a LoRA run, the adapter alone). Tensors are in safetensors files, all other
values in JSON; nothing is pickled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from elbowroom.training.checkpoints import CheckpointError, CheckpointMismatchError
from elbowroom.training.names import trainable_parameters

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
VALUES = "state.json"
_FORMAT = 1


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the trainable parameters to a safetensors file, by their plain names and in their own dtypes."""
    _save_tensors(trainable_parameters(model), path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load what `save_weights` wrote into the trainable parameters of `model`.

    Raises:
        CheckpointMismatchError: names, shapes or dtypes differ; the model is unchanged then.
    """
    current = trainable_parameters(model)
    _copy_tensors(_load_matching(path, current), current)


def read_counters(folder: Path) -> dict[str, Any]:
    """Return the counters that `save_training_state` wrote into `folder`, without loading any tensor.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return _load_values(folder / VALUES)["counters"]


def training_state_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Mapping[str, torch.Tensor]] | None = None
) -> int:
    """Return the size in bytes of the tensors that `save_training_state` would write now.

    Optimizers make their state in the first step; before it, only the weights (and `tensors`) are counted.
    """
    everything = [*trainable_parameters(model).values(), *_optimizer_state(model, optimizer)[0].values()]
    everything += [tensor for group in (tensors or {}).values() for tensor in group.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in everything)


def save_training_state(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: LambdaLR,
    generators: Mapping[str, torch.Generator],
    counters: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Write into `folder` all that `load_training_state` needs to go on bit for bit.

    Args:
        folder: an existing, empty folder, as `CheckpointFolder.save` hands it out.
        model: its trainable parameters are saved; it may be wrapped (DDP, `torch.compile`).
        optimizer: over parameters of `model`.
        lr_scheduler: the schedule; of its state, the step is what counts.
        generators: the run's own random generators, by name.
        counters: steps, epochs, position in the data …: JSON values, by name.
        tensors: more tensors by group and name, such as `{"ema": {"weight": …}}`, each group in a file of its own.

    Raises:
        TypeError: a value can be saved neither as a tensor nor as JSON; it is named.
    """
    optimizer_tensors, optimizer_values = _optimizer_state(model, optimizer)
    random_tensors, random_values = _random_state(generators)
    save_weights(model, folder / WEIGHTS)
    _save_tensors(optimizer_tensors, folder / OPTIMIZER)
    _save_tensors(random_tensors, folder / RANDOM)
    for name, group in (tensors or {}).items():
        _save_tensors(group, folder / f"{name}.safetensors")
    values = {
        "format": _FORMAT,
        "counters": dict(counters),
        "optimizer": optimizer_values,
        "lr_scheduler": lr_scheduler.state_dict(),
        "random": random_values,
    }
    # Python writes the shortest text that reads back as the same float, so JSON loses no bit.
    text = json.dumps(values, indent=2, default=_refuse_value)
    (folder / VALUES).write_text(text + "\n", encoding="utf-8")


def load_training_state(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: LambdaLR,
    generators: Mapping[str, torch.Generator],
    tensors: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> dict[str, Any]:
    """Restore what `save_training_state` wrote, in place, and return its counters.

    The arguments are those of `save_training_state`, made anew. All of it is read and compared before anything is
    changed. Settings are not state: where the optimizer's options (learning rate, betas …) or the schedule were made
    with other values than the saved ones, the present values hold, and the learning rate is the one that the present
    schedule has at the saved step. The random state of the accelerator is restored where the checkpoint has one for
    the same kind of device; on another kind, its random numbers can't be the same.

    Raises:
        CheckpointMismatchError: names, shapes or dtypes of the saved and the present state differ. They are listed.
        CheckpointError: a file is missing or damaged.
    """
    values = _load_values(folder / VALUES)
    weights = trainable_parameters(model)
    new_weights = _load_matching(folder / WEIGHTS, weights)
    new_groups = {
        name: _load_matching(folder / f"{name}.safetensors", group) for name, group in (tensors or {}).items()
    }
    new_optimizer = _matching_optimizer_state(folder / OPTIMIZER, values["optimizer"], model, optimizer)
    new_random = _load_matching(folder / RANDOM, _random_state(generators)[0], optional=("accelerator",))

    _copy_tensors(new_weights, weights)
    for name, group in (tensors or {}).items():
        _copy_tensors(new_groups[name], group)
    _set_optimizer_state(optimizer, new_optimizer)
    _set_schedule(lr_scheduler, values["lr_scheduler"])
    _set_random_state(new_random, values["random"], generators)
    return values["counters"]


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state into tensors (`parameter.key`) and JSON values. Parameters go by name: by index, the
    state of an adapter with other targets would fit by chance."""
    names = _optimizer_names(model, optimizer)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{names[parameter]}.{key}"] = value
            else:
                values.setdefault(names[parameter], {})[key] = value
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"groups": groups, "values": values}


def _optimizer_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in trainable_parameters(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is no trainable "
                    f"parameter of {type(model).__name__}"
                )
    return names


def _matching_optimizer_state(
    path: Path, values: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Read an optimizer's saved state as the dict that `Optimizer.load_state_dict` takes.

    Raises:
        CheckpointMismatchError: the parameter groups hold other parameters now.
    """
    names = _optimizer_names(model, optimizer)
    saved_groups = values["groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        raise CheckpointMismatchError(
            f"{path} has {len(saved_groups)} parameter groups, and the optimizer {len(optimizer.param_groups)}. "
            "Resume with the options that the run was started with."
        )
    position: dict[str, int] = {}  # torch numbers the parameters through all groups
    groups = []
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        current = [names[parameter] for parameter in group["params"]]
        _compare_names(path, saved["parameters"], current)
        indices = []
        for name in current:
            indices.append(position.setdefault(name, len(position)))
        # What both have was set by the user, now perhaps otherwise; what only the saved one has, the optimizer made.
        groups.append(saved["options"] | group | {"params": indices})
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in _load_tensors(path).items():
        parameter_name, _, key = name.rpartition(".")
        if parameter_name not in position:
            raise CheckpointMismatchError(f"{path}: the state {name!r} belongs to no parameter of the optimizer")
        state.setdefault(position[parameter_name], {})[key] = tensor
    for parameter_name, scalars in values["values"].items():
        state.setdefault(position[parameter_name], {}).update(scalars)
    return {"state": state, "param_groups": groups}


def _set_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    optimizer.load_state_dict(saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                # torch has cast it to the parameter's dtype (float32 moments of bfloat16 weights would lose bits) and,
                # on the CPU, has kept the tensor that is mapped from the file, which may be deleted soon.
                device = optimizer.state[parameters[index]][key].device
                optimizer.state[parameters[index]][key] = value.to(device, copy=True)


def _set_schedule(lr_scheduler: LambdaLR, saved: Mapping[str, Any]) -> None:
    """Put a schedule at the saved step. The rates follow from the step alone: unchanged settings give the same bits."""
    step = saved["last_epoch"]
    rates = [base * share(step) for base, share in zip(lr_scheduler.base_lrs, lr_scheduler.lr_lambdas, strict=True)]
    place = {"last_epoch": step, "_step_count": saved["_step_count"], "_last_lr": rates}
    lr_scheduler.load_state_dict(lr_scheduler.state_dict() | place)
    for group, rate in zip(lr_scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# ---- random state ----------------------------------------------------------------------------------------------------


def _random_state(generators: Mapping[str, torch.Generator]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of every source of random numbers as tensors and JSON values."""
    python_version, python_numbers, python_gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python_numbers, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
    }
    tensors |= {f"generator.{name}": generator.get_state() for name, generator in generators.items()}
    values: dict[str, Any] = {
        "python": {"version": python_version, "gauss": python_gauss},
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "position": numpy_state["state"]["pos"],
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        },
    }
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        # One process drives one device: the state of the current one is enough.
        tensors["accelerator"] = torch.get_device_module(accelerator).get_rng_state()
        values["accelerator"] = accelerator.type
    return tensors, values


def _set_random_state(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], generators: Mapping[str, torch.Generator]
) -> None:
    torch.set_rng_state(tensors["torch"])
    python = values["python"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    numpy = values["numpy"]
    np.random.set_state(
        {
            "bit_generator": numpy["bit_generator"],
            "state": {"key": tensors["numpy"].numpy().astype(np.uint32), "pos": numpy["position"]},
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        }
    )
    for name, generator in generators.items():
        generator.set_state(tensors[f"generator.{name}"])
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type == values.get("accelerator"):
        torch.get_device_module(accelerator).set_rng_state(tensors["accelerator"])


# ---- files of tensors and values -------------------------------------------------------------------------------------


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    for name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise TypeError(f"{name!r} is a {type(tensor).__name__}, which safetensors can't hold")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read ({error}); resume from another checkpoint") from error


def _load_values(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read ({error}); resume from another checkpoint") from error
    if values["format"] != _FORMAT:
        raise CheckpointError(
            f"{path}: its format is {values['format']}, but this version of elbowroom reads format {_FORMAT}; "
            "resume with the version that wrote it"
        )
    return values


def _load_matching(
    path: Path, current: Mapping[str, torch.Tensor], *, optional: Iterable[str] = ()
) -> dict[str, torch.Tensor]:
    """Read a file of tensors and compare names, shapes and dtypes with those of `current`."""
    saved = _load_tensors(path)
    _compare_names(path, set(saved) - set(optional), set(current) - set(optional))
    different = [
        f"{name} is {_described(saved[name])} there and {_described(tensor)} here"
        for name, tensor in current.items()
        if name not in optional and _described(saved[name]) != _described(tensor)
    ]
    if different:
        raise CheckpointMismatchError(
            f"{path} does not fit: {_listed(different)}. Resume with the options that the run was started with "
            "(rank, targets, precision, model)."
        )
    return saved


def _copy_tensors(saved: Mapping[str, torch.Tensor], current: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(saved[name])


def _compare_names(path: Path, saved: Iterable[str], current: Iterable[str]) -> None:
    missing = sorted(set(current) - set(saved))
    unexpected = sorted(set(saved) - set(current))
    if missing or unexpected:
        raise CheckpointMismatchError(
            f"{path} does not fit. Missing there: {_listed(missing)}. Unexpected there: {_listed(unexpected)}. "
            "Resume with the options that the run was started with (rank, targets, training type, model)."
        )


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _listed(names: list[str], limit: int = 6) -> str:
    more = [f"and {len(names) - limit} more"] if len(names) > limit else []
    return ", ".join(names[:limit] + more) or "nothing"


def _refuse_value(value: object) -> Any:
    raise TypeError(f"the value {value!r} ({type(value).__name__}) can't be saved as JSON in a checkpoint")
