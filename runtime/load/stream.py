"""Weights from files into a sharded model: each rank reads only the bytes of the parts that it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from shardwright.checkpoints.build import rebuild_buffers, state_shapes, tied_names
from shardwright.checkpoints.headers import Headers
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.device import Device, peak_host_bytes
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.packed import SCALES, VALUES, held_as, packed_names
from shardwright.runtime.experts.packed_load import load_stack
from shardwright.runtime.load.decode import read_base
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.ownership import Owned, owned_parameters
from shardwright.schemas.errors import CheckFailed, CheckpointError
from shardwright.schemas.run import LoadFacts

CHECKED_AT_ONCE = 64 << 20
"""Values whose flags are in memory at once while they are looked at."""
Progress = Callable[[int, int, int, float], None]
"""(bytes read, tensors done, of how many, seconds)."""


def materialize(model: nn.Module, device: Device) -> None:
    """Give every parameter and buffer uninitialised storage on the device; tied weights stay one."""
    tied = tied_names(model)
    model.to_empty(device=device.torch_device)
    for alias, name in tied.items():
        owner, _, leaf = name.rpartition(".")
        other, _, other_leaf = alias.rpartition(".")
        model.get_submodule(other)._parameters[other_leaf] = model.get_submodule(owner)._parameters[leaf]


def load_weights(
    model: nn.Module,
    folder: Path,
    headers: Headers,
    names: NameMap,
    device: Device,
    *,
    lora_seed: int,
    progress: Progress | None = None,
) -> LoadFacts:
    """Fill a materialised model.

    Args:
        model: parameters and buffers uninitialised on ``device``.
        folder: the checkpoint.
        headers: its headers.
        names: which file tensors fill which parameters.
        device: of this rank.
        lora_seed: ``recipe.seeds.lora``.
        progress: called after each tensor.

    Raises:
        CheckpointError: ``missing-tensor``, ``unexpected-tensor`` and as the reader.
        CheckFailed: ``nan-weights`` naming the tensor.
    """
    _complete(names, folder)
    began = time.monotonic()
    tensors = 0
    with ShardReader(folder, headers) as reader, torch.no_grad():
        parameters = owned_parameters(model)
        packed, buffers = _packed_stacks(model), _persistent_buffers(model)
        held = {
            name: owned
            for name, owned in parameters.items()
            if all(start < stop for start, stop in owned.box) and name.removesuffix(SCALES) not in packed
        }
        for name, owned in held.items():
            if (stack := name.removesuffix(VALUES)) in packed:
                _load_packed(stack, packed[stack], parameters, reader, names)
            else:
                _fill(owned, reader, names, lora_seed)
            tensors += 1
            if progress is not None:
                progress(reader.bytes_read, tensors, len(held) + len(buffers), time.monotonic() - began)
        for name in buffers:
            value = read_base(reader, names, name, tuple(model.get_buffer(name).shape))
            check_finite(name, value, names)
            model.get_buffer(name).copy_(value)
            tensors += 1
        total = reader.bytes_read
    rebuild_buffers(model, device.torch_device)
    device.synchronize()
    return LoadFacts(
        bytes_read=total, seconds=time.monotonic() - began, tensors=tensors, peak_host_bytes=peak_host_bytes()
    )


def _fill(owned: Owned, reader: ShardReader, names: NameMap, lora_seed: int) -> None:
    """One parameter of this rank; what was read is forgotten before more is."""
    start = 0
    for box in owned.parts():
        if owned.adapter:
            part = initial_box(lora_seed, owned.name, owned.shape, box)
        else:
            part = read_base(reader, names, owned.name, owned.shape, box)
        filled = owned.local()[start : start + len(part)]
        filled.copy_(part)
        if not owned.adapter:
            check_finite(owned.name, filled, names)
        start += len(part)
        del part


def _packed_stacks(model: nn.Module) -> dict[str, LoraExperts]:
    """Full name of each stack that stays packed → its module."""
    return {
        f"{name}.{stack}": module
        for name, module in model.named_modules()
        if isinstance(module, LoraExperts)
        for stack in packed_names(module)
    }


def _load_packed(
    name: str, module: LoraExperts, parameters: dict[str, Owned], reader: ShardReader, names: NameMap
) -> None:
    values, scales = (parameters[f"{name}{part}"] for part in (VALUES, SCALES))
    held = held_as(values.local(), scales.local(), module.packing)  # type: ignore[arg-type]
    load_stack(held, values.numbers, values.box[1], name, reader, names, module.layout)


def _persistent_buffers(model: nn.Module) -> list[str]:
    """Buffers that the files hold."""
    own = {name for name, _ in model.named_parameters()}
    return [name for name in state_shapes(model) if name not in own]


def _complete(names: NameMap, folder: Path) -> None:
    if missing := names.missing():
        raise CheckpointError(
            "missing-tensor",
            f"{len(missing)} parameters have no tensor in the files, first {missing[0]}",
            where=str(folder),
            next_action="fetch the whole checkpoint; check that config.json belongs to it",
        )
    if unused := names.unused():
        raise CheckpointError(
            "unexpected-tensor",
            f"{len(unused)} file tensors fill nothing in the model, first {unused[0]}",
            where=str(folder),
            next_action="check that config.json belongs to these files and that transformers knows this revision",
        )


def check_finite(name: str, value: torch.Tensor, names: NameMap) -> None:
    """Refuse NaN and infinity in what was read, where it now is: a device looks faster than a host's one thread.

    Raises:
        CheckFailed: ``nan-weights``, naming parameter, file tensors and the first place.
    """
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        return
    if all(bool(torch.isfinite(some).all()) for some in value.reshape(-1).split(CHECKED_AT_ONCE)):
        return
    finite = torch.isfinite(value)
    place = (~finite).nonzero()[0].tolist()
    raise CheckFailed(
        "nan-weights",
        f"{int((~finite).sum())} values of {name} are not finite, first {float(value[tuple(place)])} at {place} of the "
        f"part read",
        where=", ".join(names.hub_names(name)[:4]),
        next_action="fetch this shard again; if its hash is right, the checkpoint itself is damaged",
    )
