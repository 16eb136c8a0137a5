"""Base weights from files, packed ones decoded on the way: only the blocks that hold the wanted part are read.

A packed weight is the bf16 tensor that it decodes to: MXFP4 exactly, fp8 and int4 rounded once. The same meaning holds
where the weight stays packed (``experts/packed.py``), so both ways train the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.checkpoints.conversion import Box, intersect
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.packing import int4_group, mxfp4_codec
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.checkpoints.reader import ShardReader, read_parameter, whole_box
from shardwright.schemas.errors import CheckpointError

DECODED = torch.bfloat16
GROUP = 32
"""Values that share a scale in MXFP4."""


def is_packed(names: NameMap, parameter: str) -> bool:
    """Whether any file tensor behind a parameter is packed."""
    return any(names.logical(piece.tensor).format != "plain" for piece in names.pieces(parameter))


def read_base(
    reader: ShardReader,
    names: NameMap,
    parameter: str,
    shape: tuple[int, ...],
    box: Box | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """A base parameter or the part of it inside ``box``: in its stored dtype, or bf16 where it is packed.

    Args:
        device: where packed weights are decoded, and where they then are; the host unless told.

    Raises:
        CheckpointError: as :func:`read_parameter`; ``packed-weights`` for a packing whose scales are not known.
    """
    if not is_packed(names, parameter):
        return read_parameter(reader, names.reads(parameter), shape, box)
    wanted = whole_box(shape, box, where=parameter)
    out = torch.empty([stop - start for start, stop in wanted], dtype=DECODED, device=device)
    for whole in names.pieces(parameter):
        piece = intersect(whole, wanted)
        if piece is None:
            continue
        order = [axis for axis in piece.axes if axis is not None]
        value = decoded(reader, names.logical(piece.tensor), piece.source, device).permute(order)
        place = tuple(slice(start, stop) for start, stop in piece.target)
        out[place] = value.reshape([stop - start for start, stop in piece.target])
    return out


def decoded(reader: ShardReader, logical: LogicalTensor, box: Box, device: torch.device | None = None) -> Tensor:
    """The bf16 values of a logical tensor inside ``box``; blocks of MXFP4 and fp8 are decoded on ``device``.

    Raises:
        CheckpointError: ``packed-weights`` and as the codecs.
    """
    if logical.format == "plain":
        return reader.read(logical.values, box).to(DECODED)
    if logical.format == "int4-group":
        return _int4(reader, logical)[tuple(slice(start, stop) for start, stop in box)]
    if not logical.companions:
        raise CheckpointError(
            "packed-weights",
            f"{logical.values} is {logical.format} and has no scale",
            where=logical.name,
            next_action="fetch the whole checkpoint, or dequantise it to bf16 first",
        )
    outer = aligned(box, logical)
    decode = _fp8 if logical.format == "fp8-block" else _mxfp4
    value = decode(reader, logical, outer, device)
    inner = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, outer, strict=True))
    return value[inner]


def aligned(box: Box, logical: LogicalTensor) -> Box:
    """The smallest box of whole blocks around ``box``."""
    blocks = logical.block or (1,) * len(box)
    return tuple(
        (start // block * block, min(-(-stop // block) * block, size))
        for (start, stop), block, size in zip(box, blocks, logical.shape, strict=True)
    )


def mxfp4_codes(reader: ShardReader, logical: LogicalTensor, box: Box) -> tuple[Tensor, Tensor]:
    """Bytes [… , in / 2] and scales [… , in / 32] of a box that begins and ends with whole groups, both uint8."""
    *lead, (start, stop) = box
    scales: Box = (*lead, (start // GROUP, stop // GROUP))
    scale = reader.read(logical.companions[0], scales).view(torch.uint8)
    if logical.format == "gpt-oss-mxfp4":
        return reader.read(logical.values, scales).flatten(-2), scale
    packed = reader.read(logical.values, (*lead, (start // 2, stop // 2)))
    return packed.view(torch.uint8), scale


def fp8_codes(reader: ShardReader, logical: LogicalTensor, box: Box) -> tuple[Tensor, Tensor]:
    """Values of a box of whole blocks, and the scales of those blocks in fp32, one for each dim's blocks."""
    name = logical.companions[0]
    shape = reader.headers.tensors[name].shape
    values = reader.read(logical.values, box)
    if len(shape) != len(box) or (all(size == 1 for size in shape) and len(logical.block) == len(box)):
        scale = reader.read(name).reshape([1] * len(box))
    else:
        cut = tuple((a // block, -(-b // block)) for (a, b), block in zip(box, logical.block, strict=True))
        scale = reader.read(name, cut)
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return values, scale.float()


def _mxfp4(reader: ShardReader, logical: LogicalTensor, box: Box, device: torch.device | None) -> Tensor:
    blocks, scales = mxfp4_codes(reader, logical, box)
    return mxfp4_codec.decode(blocks.to(device), scales.to(device), DECODED)


def _fp8(reader: ShardReader, logical: LogicalTensor, box: Box, device: torch.device | None) -> Tensor:
    values, scale = (part.to(device) for part in fp8_codes(reader, logical, box))
    for dim, block in enumerate(logical.block):
        if scale.shape[dim] > 1:
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, values.shape[dim])
    return (values.float() * scale).to(DECODED)


def _int4(reader: ShardReader, logical: LogicalTensor) -> Tensor:
    """The whole tensor: its zero points and group numbers run across rows and columns."""
    parts = {name.rsplit("_", 1)[-1]: reader.read(name) for name in logical.companions}
    return int4_group.decode(
        reader.read(logical.values),
        parts["scale"],
        DECODED,
        width=logical.shape[-1],
        zero_point=parts.get("point"),
        group_of=parts.get("idx"),
    )
