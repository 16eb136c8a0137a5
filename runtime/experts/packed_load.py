"""Packed expert stacks from files to the device, some experts at a time.

The files' bytes are read into host memory for no more than ``HOST_BYTES`` of experts at once, go to the device as they
are, and take the order of the packed operator there: a host with one thread for each rank would need minutes for it.
Legend: L local experts, n rows of a rank, K in features, o out and i in features of a whole matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwright.checkpoints.conversion import Box, Piece, intersect
from shardwright.checkpoints.layouts import ExpertLayout
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.reader import ShardReader
from shardwright.kernels.packed_experts.storage import PackedStack, fp8_stack, mxfp4_stack
from shardwright.runtime.experts.int4 import Int4Stack, load_int4
from shardwright.runtime.experts.packed import BLOCK, Stack
from shardwright.runtime.experts.placement import Slots, runs_of
from shardwright.runtime.load.decode import GROUP, fp8_codes, mxfp4_codes
from shardwright.schemas.errors import CheckFailed, CheckpointError

HOST_BYTES = 128 << 20
"""Most bytes of experts in host memory at once; one expert at least. On the device their order takes some four times
as much for a moment."""


def load_stack(
    held: Stack,
    experts: Slots,
    rows: tuple[int, int],
    name: str,
    reader: ShardReader,
    names: NameMap,
    layout: ExpertLayout,
) -> None:
    """Fill this rank's part of a packed stack, bit for bit; only its bytes are read.

    Args:
        held: values and scales as this rank keeps them, [L, n, K].
        experts: number of each of the L experts.
        rows: first and last of the n rows in the whole matrix [o, i].
        name: full name of the stack.

    Raises:
        CheckpointError: ``packed-layout`` where a file tensor does not hold whole blocks in rows of out × in.
        CheckFailed: ``nan-weights``.
    """
    in_out = layout.order == "in_out"
    if isinstance(held, Int4Stack):
        load_int4(held, experts, rows, name, reader, names, in_out)
        _require_finite(name, bool(torch.isfinite(held.scales).all()), names)
        return
    mxfp4 = held.kind == "mxfp4"
    for some in few_at_once(held):
        values, scales = _read(held, experts[some], rows, name, reader, names, in_out)
        _require_finite(name, not bool((scales == 255).any() if mxfp4 else (~torch.isfinite(scales)).any()), names)
        values, scales = values.to(held.values.device), scales.to(held.values.device)
        ordered = mxfp4_stack(values, scales) if mxfp4 else fp8_stack(values.view(torch.float8_e4m3fn), scales)
        held.values[some].copy_(ordered.values)
        held.scales[some].copy_(ordered.scales)


def few_at_once(held: PackedStack) -> Iterator[slice]:
    """Places of experts whose bytes together are within ``HOST_BYTES``, in order."""
    L, n, K = held.shape
    each = max(1, n * K // (2 if held.kind == "mxfp4" else 1))
    step = max(1, HOST_BYTES // each)
    for first in range(0, L, step):
        yield slice(first, min(first + step, L))


def _read(
    held: PackedStack,
    experts: Slots,
    rows: tuple[int, int],
    name: str,
    reader: ShardReader,
    names: NameMap,
    in_out: bool,
) -> tuple[Tensor, Tensor]:
    """Bytes and scales of these experts as the files have them, rows out before in, on the host."""
    L, (_, n, K) = len(experts), held.shape
    mxfp4 = held.kind == "mxfp4"
    matrix = ((0, K), rows) if in_out else (rows, (0, K))
    values = torch.empty((L, n, K // 2) if mxfp4 else (L, n, K), dtype=torch.uint8)
    scales = torch.empty(
        (L, n, K // GROUP) if mxfp4 else (L, n // BLOCK, K // BLOCK), dtype=torch.uint8 if mxfp4 else torch.float32
    )
    row, column = (2, 1) if in_out else (1, 2)
    boxes: list[tuple[int, Box]] = [(place, ((first, stop), *matrix)) for place, first, stop in runs_of(experts)]
    for (place, box), whole in itertools.product(boxes, names.pieces(name)):
        piece = intersect(whole, box)
        if piece is None:
            continue
        logical = names.logical(piece.tensor)
        last = len(logical.shape) - 1
        step = GROUP if mxfp4 else BLOCK
        edges = [*piece.source[last], *(() if mxfp4 else (*piece.source[last - 1], *piece.target[row]))]
        odd = [edge for edge in edges if edge % step]
        if piece.axes[row] != last - 1 or piece.axes[column] != last or odd or piece.target[column] != (0, K):
            raise _layout(name, piece)
        if not mxfp4 and logical.block[-2:] != (BLOCK, BLOCK):
            raise _layout(name, piece)
        part = (mxfp4_codes if mxfp4 else fp8_codes)(reader, logical, piece.source)
        (first, stop), lines = piece.target[0], piece.target[row]
        filled, extent = slice(place + first, place + stop), stop - first
        bytes_, scale = (one.reshape(extent, *one.shape[-2:]) for one in part)
        values[filled, slice(*lines)] = bytes_.view(torch.uint8)
        scales[filled, slice(*(lines if mxfp4 else (lines[0] // BLOCK, lines[1] // BLOCK)))] = scale
    return values, scales


def _require_finite(name: str, finite: bool, names: NameMap) -> None:
    if not finite:
        raise CheckFailed(
            "nan-weights",
            f"a scale of {name} is not a finite number",
            where=", ".join(names.hub_names(name)[:4]),
            next_action="fetch this shard again; if its hash is right, the checkpoint itself is damaged",
        )


def _layout(name: str, piece: Piece) -> CheckpointError:
    return CheckpointError(
        "packed-layout",
        f"{piece.tensor} gives {piece.source} for {piece.target}: not whole blocks in rows of out × in",
        where=name,
        next_action="plan with base_format compute: the weights are then decoded at load",
    )
