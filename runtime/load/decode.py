"""Base weights from files, packed ones decoded on the way: only the blocks that hold the wanted part are read.

A packed weight is the bf16 tensor that it decodes to: MXFP4 exactly, fp8 and int4 rounded once. The same meaning holds
where the weight stays packed (``experts/packed.py``), so both ways train the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.checkpoints.conversion import Box, intersect
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.packing import int4_group, mxfp4_codec
from shardwright.checkpoints.packing.int4 import VALUES_PER_WORD
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.checkpoints.reader import Part, ShardReader, read_parameter, whole_box
from shardwright.runtime.load.fills import Fill, all_finite, cut_source, order_of, plain_fills
from shardwright.schemas.errors import CheckpointError

DECODED = torch.bfloat16
GROUP = 32
"""Values that share a scale in MXFP4."""
DECODED_AT_ONCE = 8 << 20
"""Values of a fill that are decoded together; the codecs take some twenty bytes for each on the way."""


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
    for fill in base_fills(reader, names, parameter, wanted, out):
        fill.place([reader.read(part.tensor, part.box).to(device) for part in fill.parts])
    return out


def base_fills(reader: ShardReader, names: NameMap, parameter: str, box: Box, into: Tensor) -> Iterator[Fill]:
    """Fills of a base parameter's box, ``into`` a tensor of the box's shape.

    Raises:
        CheckpointError: as :func:`plain_fills` and :func:`stored_parts`.
    """
    if not is_packed(names, parameter):
        yield from plain_fills(reader, names, parameter, box, into)
        return
    for whole in names.pieces(parameter):
        piece = intersect(whole, box)
        if piece is None:
            continue
        logical = names.logical(piece.tensor)
        for part in cut_source(piece, DECODED_AT_ONCE, _steps(logical)):
            place = tuple(slice(*extent) for extent in part.target)
            outer = aligned(part.source, logical)
            yield DecodedFill(
                logical, part.source, outer, stored_parts(reader, logical, outer), order_of(part), into[place]
            )


@dataclass(frozen=True)
class DecodedFill:
    """Codes and scales of whole blocks that are decoded into a parameter.

    Attributes:
        box: the values wanted.
        outer: the blocks around them.
        order: dims of the logical tensor in the order of the parameter's.
        into: the part of the parameter that they fill.
    """

    logical: LogicalTensor
    box: Box
    outer: Box
    parts: tuple[Part, ...]
    order: tuple[int, ...]
    into: Tensor

    def place(self, read: Sequence[Tensor]) -> Tensor:
        value = decode(self.logical, self.outer, read)
        inner = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(self.box, self.outer, strict=True))
        self.into.copy_(value[inner].permute(self.order).reshape(self.into.shape))
        return all_finite(self.into)


def decoded(reader: ShardReader, logical: LogicalTensor, box: Box) -> Tensor:
    """The bf16 values of a logical tensor inside ``box``.

    Raises:
        CheckpointError: ``packed-weights`` and as the codecs.
    """
    outer = aligned(box, logical)
    value = decode(
        logical, outer, [reader.read(part.tensor, part.box) for part in stored_parts(reader, logical, outer)]
    )
    return value[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, outer, strict=True))]


def _steps(logical: LogicalTensor) -> tuple[int, ...]:
    """For each dim, at whose multiples the files can be cut."""
    steps = logical.block or (1,) * len(logical.shape)
    if logical.format == "fp8-block":
        return tuple(1 if step >= size else step for step, size in zip(steps, logical.shape, strict=True))
    if logical.format != "int4-group":
        return steps
    rows = VALUES_PER_WORD if any(name.endswith("_zero_point") for name in logical.companions) else 1
    return (*steps[:-2], rows, logical.shape[-1])


def aligned(box: Box, logical: LogicalTensor) -> Box:
    """The smallest box of whole blocks around ``box``: whole rows of 4-bit integers, whose groups need not be runs."""
    return tuple(
        (start // step * step, min(-(-stop // step) * step, size))
        for (start, stop), step, size in zip(box, _steps(logical), logical.shape, strict=True)
    )


def stored_parts(reader: ShardReader, logical: LogicalTensor, box: Box) -> tuple[Part, ...]:
    """What :func:`decode` needs of the files for a box of whole blocks: values first, then scales.

    Raises:
        CheckpointError: ``packed-weights`` for a packing whose scales are not known, and as ``ShardReader.part``.
    """
    if logical.format == "plain":
        return (reader.part(logical.values, box),)
    if not logical.companions:
        raise CheckpointError(
            "packed-weights",
            f"{logical.values} is {logical.format} and has no scale",
            where=logical.name,
            next_action="fetch the whole checkpoint, or dequantise it to bf16 first",
        )
    if logical.format == "fp8-block":
        return fp8_parts(reader, logical, box)
    if logical.format == "int4-group":
        return _int4_parts(reader, logical, box)
    return mxfp4_parts(reader, logical, box)


def decode(logical: LogicalTensor, box: Box, read: Sequence[Tensor]) -> Tensor:
    """bf16 values of a box of whole blocks, from its ``stored_parts``, wherever those are."""
    if logical.format == "plain":
        return read[0].to(DECODED)
    if logical.format == "int4-group":
        return _int4(logical, read)
    if logical.format == "fp8-block":
        values, scale = fp8_codes(read)
        for dim, block in enumerate(logical.block):
            if scale.shape[dim] > 1:
                scale = scale.repeat_interleave(block, dim).narrow(dim, 0, values.shape[dim])
        return (values.float() * scale).to(DECODED)
    return mxfp4_codec.decode(*mxfp4_codes(logical, read), DECODED)


def mxfp4_parts(reader: ShardReader, logical: LogicalTensor, box: Box) -> tuple[Part, Part]:
    """Codes and scales of a box that begins and ends with whole groups."""
    *lead, (start, stop) = box
    scales: Box = (*lead, (start // GROUP, stop // GROUP))
    codes: Box = scales if logical.format == "gpt-oss-mxfp4" else (*lead, (start // 2, stop // 2))
    return reader.part(logical.values, codes), reader.part(logical.companions[0], scales)


def mxfp4_codes(logical: LogicalTensor, read: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Bytes [… , in / 2] and scales [… , in / 32], both uint8."""
    codes, scales = read
    return (codes.flatten(-2) if logical.format == "gpt-oss-mxfp4" else codes.view(torch.uint8)), scales.view(
        torch.uint8
    )


def fp8_parts(reader: ShardReader, logical: LogicalTensor, box: Box) -> tuple[Part, Part]:
    """Values of a box of whole blocks, and the scales of those blocks."""
    name = logical.companions[0]
    shape = reader.headers.tensors[name].shape
    if len(shape) != len(box) or (all(size == 1 for size in shape) and len(logical.block) == len(box)):
        return reader.part(logical.values, box), reader.part(name)
    cut = tuple((a // block, -(-b // block)) for (a, b), block in zip(box, logical.block, strict=True))
    return reader.part(logical.values, box), reader.part(name, cut)


def fp8_codes(read: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Values, and their blocks' scales in fp32, one for each dim's blocks."""
    values, scale = read
    if scale.numel() == 1:
        scale = scale.reshape([1] * values.dim())
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return values, scale.float()


def _int4_parts(reader: ShardReader, logical: LogicalTensor, box: Box) -> tuple[Part, ...]:
    """Rows of words, of scales and of zero points; the group of each input where the files say it."""
    *lead, (start, stop), _ = box
    rows: Box = (*lead, (start, stop))
    found = [reader.part(logical.values, rows)]
    for name in logical.companions:
        if name.endswith("_scale"):
            found.append(reader.part(name, rows))
        elif name.endswith("_zero_point"):
            found.append(reader.part(name, (*lead, (start // VALUES_PER_WORD, -(-stop // VALUES_PER_WORD)))))
        elif name.endswith("_g_idx"):
            found.append(reader.part(name))
    return tuple(found)


def _int4(logical: LogicalTensor, read: Sequence[Tensor]) -> Tensor:
    kinds = [name.rsplit("_", 1)[-1] for name in logical.companions if not name.endswith("_shape")]
    parts = dict(zip(kinds, read[1:], strict=True))
    return int4_group.decode(
        read[0],
        parts["scale"],
        DECODED,
        width=logical.shape[-1],
        zero_point=parts.get("point"),
        group_of=parts.get("idx"),
    )
