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
from shardwright.runtime.experts.packed import load_stack
from shardwright.runtime.load.decode import read_base
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.ownership import owned_parameters
from shardwright.schemas.errors import CheckFailed, CheckpointError
from shardwright.schemas.run import LoadFacts

Progress = Callable[[int, int, float], None]
"""(bytes read, tensors done, seconds)."""


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
        for name, owned in owned_parameters(model).items():
            if any(start >= stop for start, stop in owned.box):
                continue
            if owned.adapter:
                parts = [initial_box(lora_seed, name, owned.shape, box) for box in owned.parts()]
            else:
                parts = [read_base(reader, names, name, owned.shape, box) for box in owned.parts()]
                for part in parts:
                    check_finite(name, part, names)
            start = 0
            for part in parts:
                owned.local()[start : start + len(part)].copy_(part)
                start += len(part)
            tensors += 1
            if progress is not None:
                progress(reader.bytes_read, tensors, time.monotonic() - began)
        for name, module in model.named_modules():
            if isinstance(module, LoraExperts) and module.packing is not None:
                for stack in (module.layout.up, module.layout.down):
                    load_stack(module, stack, f"{name}.{stack}", reader, names, module.layout)
                    tensors += 1
        for name in _persistent_buffers(model):
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


def _persistent_buffers(model: nn.Module) -> list[str]:
    """Buffers that the files hold; those of packed stacks are filled with their experts."""
    own = {name for name, _ in model.named_parameters()}
    for prefix, module in model.named_modules():
        if isinstance(module, LoraExperts):
            own.update(f"{prefix}.{name}" for name, _ in module.named_buffers(recurse=False))
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
    """Refuse NaN and infinity in what was read.

    Raises:
        CheckFailed: ``nan-weights``, naming parameter, file tensors and the first place.
    """
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        return
    finite = torch.isfinite(value)
    if bool(finite.all()):
        return
    place = (~finite).nonzero()[0].tolist()
    raise CheckFailed(
        "nan-weights",
        f"{int((~finite).sum())} values of {name} are not finite, first {float(value[tuple(place)])} at {place} of the "
        f"part read",
        where=", ".join(names.hub_names(name)[:4]),
        next_action="fetch this shard again; if its hash is right, the checkpoint itself is damaged",
    )
