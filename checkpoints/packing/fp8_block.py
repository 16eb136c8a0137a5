"""FP8 with one scale for a block of values, to values and back: DeepSeek-V3's layout and its descendants'.

``weight [..., N, K]`` in E4M3 and ``weight_scale_inv [..., ⌈N/128⌉, ⌈K/128⌉]``, by which a stored value is
**multiplied**. Blocks at the edges are cut off where the weight ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.checkpoints.packing import codec

LAYOUT = "fp8 blocks"
BLOCK = (128, 128)
LARGEST = 448.0
"""The largest finite E4M3 value, 1.75 · 2⁸."""
VALUE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The scales' shape for a weight's."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def decode(
    values: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, block: tuple[int, int] = BLOCK
) -> Tensor:
    """``value · scale``, formed in fp32 (fp64 where that is asked for) and rounded once to ``dtype``.

    Args:
        values: E4M3 or E5M2 ``[..., N, K]``.
        scale: fp32, bf16, fp16 or E8M0 ``[..., ⌈N/block⌉, ⌈K/block⌉]``.

    Raises:
        CheckpointError: ``packed-dtype`` or ``packed-shape``.
    """
    codec.check_dtype(LAYOUT, "values", values, VALUE_DTYPES)
    codec.check_dtype(LAYOUT, "scale", scale, SCALE_DTYPES)
    codec.check_target(LAYOUT, dtype)
    _check_dims(values, block)
    codec.check_shape(LAYOUT, "scale", scale, blocks(tuple(values.shape), block))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (values.to(wide) * _spread(scale.to(wide), tuple(values.shape), block)).to(dtype)


def encode(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """E4M3 values and fp32 scales of ``weight [..., N, K]``; each block's largest magnitude becomes 448.

    Raises:
        CheckpointError: ``packed-dtype``, ``packed-shape`` or ``not-finite``.
    """
    codec.check_source(LAYOUT, weight)
    _check_dims(weight, block)
    *lead, N, K = weight.shape
    rows, columns = -(-N // block[0]), -(-K // block[1])
    whole = weight.new_zeros((*lead, rows * block[0], columns * block[1]), dtype=torch.float32)
    whole[..., :N, :K] = weight.float()
    largest = whole.reshape(*lead, rows, block[0], columns, block[1]).abs().amax((-3, -1))
    scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny))
    quotient = weight.float() / _spread(scale, tuple(weight.shape), block)
    return quotient.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def _check_dims(weight: Tensor, block: tuple[int, int]) -> None:
    if weight.dim() < 2 or min(block) < 1:
        found = f"the weight is {list(weight.shape)}, blocks are {list(block)}"
        raise codec.refuse("packed-shape", found, LAYOUT, "pass [..., N, K] and a block of two sizes")


def _spread(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """Each block's scale at each of its values."""
    wide = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]
