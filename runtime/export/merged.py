"""The base with the adapter added into its weights: a checkpoint of the same files, names, dtypes and packing.

Files are streamed: one weight (of a plain stack, one expert) is in memory at a time. Tensors that no adapter touches
are copied byte for byte. A changed weight is rounded to the base's own number format; of the change, the part that
survives the rounding is measured: ``<Q(W + D) - Q(W), D> / <D, D>``, 1 when nothing is lost.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from shardwright.checkpoints.headers import Headers, TensorHeader
from shardwright.checkpoints.names import NameMap
from shardwright.runtime import record, state
from shardwright.runtime.export.packed import PackedWeight, open_packed
from shardwright.runtime.export.peft import require_trained
from shardwright.runtime.export.retained import LOW, Retained
from shardwright.runtime.export.router_biases import merged_biases
from shardwright.runtime.export.split import Part, name_map, parts, require_adapters
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import CheckpointError, RunError
from shardwright.schemas.run import ExportFacts

FOLDER = "merged"
CHUNK_BYTES = 1 << 24
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
WEIGHTS = ".safetensors"


def export_merged(run_dir: Path, checkpoint: Path) -> tuple[ExportFacts, tuple[str, ...]]:
    """Write ``merged/``, whole or not at all, and note it in run.json.

    Returns:
        What was written, and warnings: weights of whose change less than :data:`LOW` survived the packing.

    Raises:
        RunError: as the PEFT export; ``disk-full``, ``router-biases``.
        CheckpointError: ``packed-weights`` for a packing that cannot be written.
    """
    plan = require_trained(run_dir)
    save = state.final(run_dir, plan)
    adapters = state.read_adapters(save)
    require_adapters(plan.decision.lora_targets, adapters)
    names, headers = name_map(checkpoint)
    _require_room(run_dir, headers)
    work, target = run_dir / f".{FOLDER}.tmp", run_dir / FOLDER
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    biases = merged_biases(names, headers, state.read_biases(save))
    retained = merge(checkpoint, work, names, headers, parts(plan.decision.lora_targets, names), adapters, biases)
    if target.exists():
        shutil.rmtree(target)
    os.replace(work, target)
    index = target / "model.safetensors.index.json"
    facts = ExportFacts(
        path=str(target),
        format="merged",
        tensors=len(headers.tensors),
        bytes=headers.stored_bytes,
        sha256=sha256_file(index if index.is_file() else target / next(iter(headers.files))),
        retained_delta=retained.smallest,
    )
    record.add_export(run_dir, facts)
    return facts, retained.warnings()


def merge(
    checkpoint: Path,
    out: Path,
    names: NameMap,
    headers: Headers,
    every: list[Part],
    adapters: dict[str, Tensor],
    replaced: dict[str, bytes] | None = None,
) -> Retained:
    """Copy a checkpoint folder, adding every part's change on the way; ``replaced`` file tensors get new bytes."""
    by_tensor: dict[str, list[Part]] = defaultdict(list)
    for part in every:
        by_tensor[part.tensor].append(part)
    retained = Retained()
    changed: dict[str, bytes] = {}
    plain: dict[str, list[Part]] = {}
    for name, mine in by_tensor.items():
        if names.logical(name).format == "plain":
            plain[name] = mine
    packed = {
        stored: name
        for name in by_tensor
        if name not in plain
        for stored in (names.logical(name).values, *names.logical(name).companions)
    }
    for entry in sorted(checkpoint.iterdir()):
        if entry.is_file() and entry.suffix != WEIGHTS:
            shutil.copyfile(entry, out / entry.name)
    for file in headers.files:
        inside = sorted((one for one in headers.tensors.values() if one.file == file), key=lambda one: one.start)
        with open(checkpoint / file, "rb") as source, open(out / file, "wb") as sink:
            _copy(source, sink, 0, inside[0].start if inside else headers.files[file])
            for header in inside:
                if replaced and header.name in replaced:
                    sink.write(replaced[header.name])
                elif header.name in plain:
                    for piece in _merged(source, header, plain[header.name], adapters, retained):
                        sink.write(piece)
                elif header.name in packed:
                    if header.name not in changed:
                        changed |= _repacked(
                            checkpoint, names, headers, packed[header.name], by_tensor, adapters, retained
                        )
                    sink.write(changed.pop(header.name))
                else:
                    _copy(source, sink, header.start, header.end)
            sink.flush()
            os.fsync(sink.fileno())
    return retained


def _merged(
    source: BinaryIO, header: TensorHeader, mine: list[Part], adapters: dict[str, Tensor], retained: Retained
) -> Iterator[bytes]:
    """The bytes of a changed plain tensor, a slice of its first dim at a time where it is a stack."""
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise CheckpointError(
            "packed-weights",
            f"{header.dtype} values are adapted, and cannot be rounded to without their scales",
            where=header.name,
            next_action="export the adapter as peft or per_expert instead",
        )
    slices = header.shape[0] if len(header.shape) == 3 else 1
    shape = header.shape[1:] if len(header.shape) == 3 else header.shape
    size = (header.end - header.start) // slices
    for place in range(slices):
        source.seek(header.start + place * size)
        stored = torch.frombuffer(bytearray(source.read(size)), dtype=dtype).reshape(shape)
        change = torch.zeros(shape, dtype=torch.float32)
        for part in mine:
            *lead, rows, columns = part.box
            if not lead or lead[0][0] == place:
                change[slice(*rows), slice(*columns)] += part.delta(adapters)
        rounded = (stored.float() + change).to(dtype)
        retained.add(header.name, stored.float(), rounded.float(), change)
        yield rounded.contiguous().view(torch.uint8).numpy().tobytes()


def _repacked(
    checkpoint: Path,
    names: NameMap,
    headers: Headers,
    name: str,
    by_tensor: dict[str, list[Part]],
    adapters: dict[str, Tensor],
    retained: Retained,
) -> dict[str, bytes]:
    """New bytes of all file tensors of one packed weight."""
    weight: PackedWeight = open_packed(checkpoint, headers, names.logical(name))
    before = weight.values()
    change = torch.zeros_like(before)
    for part in by_tensor[name]:
        change[tuple(slice(*extent) for extent in part.box)] += part.delta(adapters).reshape(
            [stop - start for start, stop in part.box]
        )
    after, data = weight.with_values(before + change)
    retained.add(name, before, after, change)
    return data


def _copy(source: BinaryIO, sink: BinaryIO, start: int, end: int) -> None:
    source.seek(start)
    left = end - start
    while left:
        data = source.read(min(CHUNK_BYTES, left))
        if not data:
            raise CheckpointError(
                "truncated-shard",
                f"ends {left} bytes early",
                where=source.name,
                next_action="fetch the file again",
            )
        sink.write(data)
        left -= len(data)


def _require_room(run_dir: Path, headers: Headers) -> None:
    needed, free = sum(headers.files.values()), shutil.disk_usage(run_dir).free
    if needed > free:
        raise RunError(
            "disk-full",
            f"the merged checkpoint needs {needed:,} bytes, {free:,} are free",
            where=str(run_dir),
            next_action="free some space there, or serve the adapter instead",
        )


__all__ = ["FOLDER", "LOW", "export_merged", "merge"]
