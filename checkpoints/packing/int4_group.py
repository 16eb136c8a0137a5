"""4-bit integers in groups, to values and back: compressed-tensors' ``pack-quantized`` (Kimi K2 Thinking and others).

``weight_packed`` I32 ``[..., out, ⌈in/8⌉]``: word w holds inputs 8w … 8w+7, the first in its lowest four bits, each
as code + 8. ``weight_scale [..., out, groups]``. Asymmetric weights add ``weight_zero_point`` I32
``[..., ⌈out/8⌉, groups]``, packed the same way but along the outputs. A value is (code - zero point) · scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.checkpoints.packing import codec
from shardwright.checkpoints.packing.int4 import VALUES_PER_WORD

LAYOUT = "int4 groups"
BITS, OFFSET, SMALLEST, LARGEST = 4, 8, -8, 7
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def decode(
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    width: int | None = None,
    zero_point: Tensor | None = None,
    group_of: Tensor | None = None,
) -> Tensor:
    """Values ``[..., out, in]``, each product rounded once to ``dtype``.

    Args:
        packed: int32 ``[..., out, ⌈in/8⌉]``.
        scale: ``[..., out, groups]``.
        width: in, from ``weight_shape``; eight values a word where not given.
        zero_point: int32 ``[..., ⌈out/8⌉, groups]``; none for symmetric weights.
        group_of: integers ``[in]``, from ``weight_g_idx``: the group of each input; equal runs where not given.

    Raises:
        CheckpointError: ``packed-dtype``, ``packed-shape`` or ``group-out-of-range``.
    """
    codec.check_dtype(LAYOUT, "packed", packed, (torch.int32,))
    codec.check_dtype(LAYOUT, "scale", scale, SCALE_DTYPES)
    codec.check_target(LAYOUT, dtype)
    if packed.dim() < 2 or scale.dim() != packed.dim() or scale.shape[:-1] != packed.shape[:-1] or not scale.shape[-1]:
        found = f"packed is {list(packed.shape)}, scale is {list(scale.shape)}"
        raise codec.refuse("packed-shape", found, LAYOUT, "pass [..., out, words] and [..., out, groups]")
    most, groups = packed.shape[-1] * VALUES_PER_WORD, scale.shape[-1]
    into = most if width is None else width
    if not most - VALUES_PER_WORD < into <= most:
        found = f"{packed.shape[-1]} words cannot be {into} inputs"
        raise codec.refuse("packed-shape", found, LAYOUT, "pass the weight_shape that belongs to these words")
    index = _groups(into, groups, packed.device) if group_of is None else _given(group_of, into, groups)
    codes = _unpack(packed)[..., :into]
    if zero_point is not None:
        codec.check_dtype(LAYOUT, "zero_point", zero_point, (torch.int32,))
        out = packed.shape[-2]
        codec.check_shape(LAYOUT, "zero_point", zero_point, (*packed.shape[:-2], -(-out // VALUES_PER_WORD), groups))
        codes = codes - _unpack(zero_point.mT).mT[..., :out, :].index_select(-1, index)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(wide) * scale.to(wide).index_select(-1, index)).to(dtype)


def encode(weight: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """Symmetric codes of ``weight [..., out, in]``: each group's largest magnitude becomes code 7.

    The scale has the weight's dtype (fp32 for fp64) and is rounded to it before values are divided by it.

    Returns:
        ``packed`` int32 ``[..., out, ⌈in/8⌉]`` and ``scale [..., out, in / group]``.

    Raises:
        CheckpointError: ``packed-dtype``, ``packed-shape`` or ``not-finite``.
    """
    codec.check_source(LAYOUT, weight)
    if weight.dim() < 2 or group < 1 or weight.shape[-1] % group:
        found = f"the weight is {list(weight.shape)}"
        raise codec.refuse("packed-shape", found, LAYOUT, f"its last dim must be whole groups of {group}")
    parts = weight.double().unflatten(-1, (-1, group))
    stored = torch.float32 if weight.dtype == torch.float64 else weight.dtype
    scale = (parts.abs().amax(-1) / LARGEST).to(stored)
    divisor = torch.where(scale == 0, 1.0, scale.double())
    codes = (parts / divisor.unsqueeze(-1)).round().clamp(SMALLEST, LARGEST).to(torch.int32).flatten(-2)
    missing = -codes.shape[-1] % VALUES_PER_WORD
    codes = torch.nn.functional.pad(codes + OFFSET, (0, missing)).unflatten(-1, (-1, VALUES_PER_WORD))
    shifts = torch.arange(VALUES_PER_WORD, device=weight.device, dtype=torch.int64) * BITS
    words = (codes.to(torch.int64) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32), scale


def _unpack(words: Tensor) -> Tensor:
    """Codes (int32, -8 … 7) of int32 words along the last dim."""
    shifts = torch.arange(VALUES_PER_WORD, device=words.device, dtype=torch.int32) * BITS
    return (((words.unsqueeze(-1) >> shifts) & 0xF) - OFFSET).flatten(-2)


def _groups(into: int, groups: int, device: torch.device) -> Tensor:
    if into % groups:
        found = f"{into} inputs in {groups} groups"
        raise codec.refuse("packed-shape", found, LAYOUT, "pass the width and scales that belong together")
    return torch.arange(into, device=device) // (into // groups)


def _given(group_of: Tensor, into: int, groups: int) -> Tensor:
    codec.check_dtype(LAYOUT, "group_of", group_of, (torch.int32, torch.int64))
    codec.check_shape(LAYOUT, "group_of", group_of, (into,))
    if into and not bool(((group_of >= 0) & (group_of < groups)).all()):
        raise codec.refuse("group-out-of-range", f"a group outside 0 … {groups - 1}", LAYOUT, "repair weight_g_idx")
    return group_of.to(torch.int64)
