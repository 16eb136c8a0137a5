"""Weights from files into a sharded model: each rank reads only the bytes of the parts that it keeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwright.checkpoints.build import rebuild_buffers, state_shapes, tied_names
from shardwright.checkpoints.headers import Headers
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.readahead import ReadAhead, cores, readers_for
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.device import Device, peak_host_bytes
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.packed import SCALES, VALUES, held_as, packed_names
from shardwright.runtime.experts.packed_load import stack_fills
from shardwright.runtime.load.decode import base_fills
from shardwright.runtime.load.fills import Fill
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.ownership import Owned, owned_parameters
from shardwright.schemas.errors import CheckFailed, CheckpointError
from shardwright.schemas.run import LoadFacts

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
    readers: int | None = None,
) -> LoadFacts:
    """Fill a materialised model.

    Threads read ahead in the order of the files; this one brings what was read to the device and puts it in its place
    there. Host memory is that of the threads' buffers, and of one adapter.

    Args:
        model: parameters and buffers uninitialised on ``device``.
        folder: the checkpoint.
        headers: its headers.
        names: which file tensors fill which parameters.
        device: of this rank.
        lora_seed: ``recipe.seeds.lora``.
        progress: called after each buffer of file bytes, and at the end.
        readers: threads; this rank's share of the machine's cores unless told, eight at most.

    Raises:
        CheckpointError: ``missing-tensor``, ``unexpected-tensor`` and as the reader.
        CheckFailed: ``nan-weights`` naming the tensor.
    """
    _complete(names, folder)
    began = time.monotonic()
    if readers is None:
        readers = readers_for(cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ShardReader(folder, headers) as reader, torch.no_grad():
        parameters, buffers = owned_parameters(model), _persistent_buffers(model)
        held = {name: owned for name, owned in parameters.items() if all(start < stop for start, stop in owned.box)}
        base = [
            *_base_loads(model, held, reader, names),
            *(_buffer_load(name, model.get_buffer(name), reader, names) for name in buffers),
        ]
        adapters = [owned for owned in held.values() if owned.adapter]
        of = len(base) + len(adapters)

        def tell(done: int) -> None:
            if progress is not None:
                progress(reader.bytes_read, done, of, time.monotonic() - began)

        staging = _read_all(base, reader, device.torch_device, readers, tell)
        for owned in adapters:
            _start_adapter(owned, lora_seed)
        tell(of)
        total = reader.bytes_read
    rebuild_buffers(model, device.torch_device)
    device.synchronize()
    return LoadFacts(
        bytes_read=total,
        seconds=time.monotonic() - began,
        tensors=of,
        peak_host_bytes=peak_host_bytes(),
        readers=readers,
        staging_bytes=staging,
    )


@dataclass
class _Load:
    """One parameter or buffer that the files fill, and how many of its fills are still to be put in place."""

    name: str
    fills: list[Fill]
    left: int = 0


def _base_loads(model: nn.Module, held: dict[str, Owned], reader: ShardReader, names: NameMap) -> Iterator[_Load]:
    """What the files fill of this rank's parameters; the two halves of a packed stack are one."""
    packed = _packed_stacks(model)
    for name, owned in held.items():
        stack = name.removesuffix(VALUES)
        if owned.adapter or name.removesuffix(SCALES) in packed:
            continue
        if stack in packed:
            module, scales = packed[stack], held[f"{stack}{SCALES}"]
            values = held_as(owned.local(), scales.local(), module.packing)  # type: ignore[arg-type]
            fills = list(stack_fills(values, owned.numbers, owned.box[1], stack, reader, names, module.layout))
            yield _Load(stack, fills)
            continue
        fills, start = [], 0
        for box in owned.parts():
            into = owned.local()[start : start + box[0][1] - box[0][0]] if box else owned.local()
            fills += base_fills(reader, names, name, box, into)
            start += len(into) if box else 0
        yield _Load(name, fills)


def _buffer_load(name: str, buffer: Tensor, reader: ShardReader, names: NameMap) -> _Load:
    whole = tuple((0, size) for size in buffer.shape)
    return _Load(name, list(base_fills(reader, names, name, whole, buffer)))


def _read_all(
    loads: list[_Load], reader: ShardReader, device: torch.device, readers: int, tell: Callable[[int], None]
) -> int:
    """Read every fill and put it in its place; bytes of the buffers that this took."""
    work = [(load, fill) for load in loads for fill in load.fills]
    for load in loads:
        load.left = len(load.fills)
    done = 0
    apart = device.type != "cpu"
    with ReadAhead(reader, [fill.parts for _, fill in work], readers=readers, pinned=apart) as ahead:
        for filled in ahead:
            data = filled.data.to(device, non_blocking=True) if apart else filled.data
            copied = _mark(device) if apart else None
            flags: list[tuple[str, Fill, Tensor]] = []
            for number, read in filled.batch.by_want(data):
                load, fill = work[number]
                flags.append((load.name, fill, fill.place(read)))
                load.left -= 1
                done += not load.left
            ahead.give_back(filled, partial(_settle, copied, flags, reader))
            tell(done)
        return ahead.staging_bytes


def _mark(device: torch.device) -> torch.Event:
    """A place in the device's queue, behind what was queued so far."""
    event = torch.Event(device)
    event.record()
    return event


def _settle(copied: torch.Event | None, flags: list[tuple[str, Fill, Tensor]], reader: ShardReader) -> None:
    """Wait for a buffer's copy, and look at the flags of what came with it.

    Raises:
        CheckFailed: ``nan-weights``.
    """
    if copied is not None:
        copied.synchronize()
    if flags and not bool(torch.stack([flag for _, _, flag in flags]).all()):
        name, fill = next((name, fill) for name, fill, flag in flags if not bool(flag))
        raise _not_finite(name, fill, reader)


def _not_finite(name: str, fill: Fill, reader: ShardReader) -> CheckFailed:
    """NaN or infinity in what was read, naming parameter, file tensors and the first place."""
    what = f"a scale of {name} is not a finite number"
    if fill.into is not None:
        finite = torch.isfinite(fill.into)
        place = (~finite).nonzero()[0].tolist()
        first = float(fill.into[tuple(place)])
        what = f"{int((~finite).sum())} values of {name} are not finite, first {first} at {place} of the part read"
    return CheckFailed(
        "nan-weights",
        what,
        where=", ".join(f"{reader.place(part)[0]}: {part.tensor}" for part in fill.parts[:4]),
        next_action="fetch this shard again; if its hash is right, the checkpoint itself is damaged",
    )


def _start_adapter(owned: Owned, lora_seed: int) -> None:
    """First values of an adapter."""
    start = 0
    for box in owned.parts():
        part = initial_box(lora_seed, owned.name, owned.shape, box)
        owned.local()[start : start + len(part)].copy_(part)
        start += len(part)


def _packed_stacks(model: nn.Module) -> dict[str, LoraExperts]:
    """Full name of each stack that stays packed → its module."""
    return {
        f"{name}.{stack}": module
        for name, module in model.named_modules()
        if isinstance(module, LoraExperts)
        for stack in packed_names(module)
    }


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
