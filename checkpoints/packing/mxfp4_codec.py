"""MXFP4 to values and back, in the two layouts that checkpoints use.

- compressed-tensors (``mxfp4-pack-quantized``, Kimi K3): bytes ``[..., out, in / 2]``, scales ``[..., out, in / 32]``;
- gpt-oss: bytes ``[..., out, in / 32, 16]``, scales ``[..., out, in / 32]``.

In both a byte holds the even input index in its low nibble and the next one in its high nibble. A value is its
E2M1 number times its group's E8M0 power of two. Sources: OCP Microscaling Formats 1.0 (5.3.3, 5.4.1, 6.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.checkpoints.packing import codec
from shardwright.checkpoints.packing.mxfp4 import GROUP, VALUES_PER_BYTE

COMPRESSED, GPT_OSS = "mxfp4 (compressed-tensors)", "mxfp4 (gpt-oss)"
BYTES = GROUP // VALUES_PER_BYTE
SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values of the compressed-tensors layout.

    Args:
        packed: uint8 ``[..., out, in / 2]``.
        scale: uint8 or E8M0 ``[..., out, in / 32]``.
        dtype: of the result; a value is rounded to it once. bf16 and wider hold every value exactly, except
            that values from 2¹²⁸ on are infinite.

    Returns:
        ``[..., out, in]``; NaN where a group's scale is NaN.

    Raises:
        CheckpointError: ``packed-dtype`` or ``packed-shape``.
    """
    codec.check_dtype(COMPRESSED, "packed", packed, (torch.uint8,))
    codec.check_dtype(COMPRESSED, "scale", scale, SCALE_DTYPES)
    codec.check_target(COMPRESSED, dtype)
    if packed.dim() < 1 or packed.shape[-1] % BYTES:
        found = f"packed is {list(packed.shape)}"
        raise codec.refuse("packed-shape", found, COMPRESSED, f"its last dim must be whole groups of {BYTES} bytes")
    groups = packed.shape[-1] // BYTES
    codec.check_shape(COMPRESSED, "scale", scale, (*packed.shape[:-1], groups))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    table = torch.tensor([*codec.E2M1, *(-v for v in codec.E2M1)], dtype=wide, device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), -1).reshape(*packed.shape[:-1], groups, GROUP)
    power = codec.powers_of_two(scale.view(torch.uint8), wide)
    return (table[codes.int()] * power.unsqueeze(-1)).to(dtype).reshape(*packed.shape[:-1], groups * GROUP)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The compressed-tensors layout of ``weight [..., out, in]``; loses what four bits cannot hold.

    A group's scale is the power of two that brings its largest magnitude to 4 … 8 (OCP 6.3); values are rounded
    to the nearest code, ties to the even one, and saturate at 6. Values that came from this format return exactly.

    Returns:
        ``packed`` uint8 ``[..., out, in / 2]`` and ``scale`` uint8 ``[..., out, in / 32]``.

    Raises:
        CheckpointError: ``packed-dtype``, ``packed-shape`` or ``not-finite``.
    """
    codec.check_source(COMPRESSED, weight)
    if weight.dim() < 1 or weight.shape[-1] % GROUP:
        found = f"the weight is {list(weight.shape)}"
        raise codec.refuse("packed-shape", found, COMPRESSED, f"its last dim must be whole groups of {GROUP}")
    groups = weight.double().reshape(*weight.shape[:-1], weight.shape[-1] // GROUP, GROUP)
    _, exponent = torch.frexp(groups.abs().amax(-1))  # largest = m · 2^exponent with 0.5 <= m < 1
    code = exponent - 1 - codec.E2M1_LARGEST_EXPONENT + codec.E8M0_BIAS
    code = torch.where(groups.abs().amax(-1) == 0, 0, code).clamp(0, codec.E8M0_NAN - 1)
    scaled = torch.ldexp(groups, (codec.E8M0_BIAS - code).unsqueeze(-1))
    nibbles = nearest(scaled.abs()) | (torch.signbit(scaled).to(torch.uint8) << 3)
    pairs = nibbles.reshape(*weight.shape[:-1], -1, VALUES_PER_BYTE)
    return pairs[..., 0] | (pairs[..., 1] << 4), code.to(torch.uint8)


def nearest(magnitude: Tensor) -> Tensor:
    """The E2M1 code (uint8, 0 … 7) nearest to each magnitude >= 0; ties take the even code."""
    code = torch.zeros(magnitude.shape, dtype=torch.uint8, device=magnitude.device)
    for low, (below, above) in enumerate(zip(codec.E2M1[:-1], codec.E2M1[1:], strict=True)):
        middle = (below + above) / 2
        passed = magnitude >= middle if low % 2 else magnitude > middle
        code += passed.to(torch.uint8)
    return code


def decode_blocks(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values of the gpt-oss layout, with out before in as the file has them (the module keeps in before out).

    Args:
        blocks: uint8 ``[..., out, groups, 16]``.
        scales: uint8 ``[..., out, groups]``.

    Returns:
        ``[..., out, 32 · groups]``.

    Raises:
        CheckpointError: ``packed-dtype`` or ``packed-shape``.
    """
    if blocks.dim() < 2 or blocks.shape[-1] != BYTES:
        found = f"blocks is {list(blocks.shape)}"
        raise codec.refuse("packed-shape", found, GPT_OSS, f"pass [..., out, groups, {BYTES}]")
    codec.check_shape(GPT_OSS, "scales", scales, tuple(blocks.shape[:-1]))
    return decode(blocks.flatten(-2), scales, dtype)


def encode_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gpt-oss layout of ``weight [..., out, in]``: ``blocks [..., out, in / 32, 16]`` and ``scales``.

    Raises:
        CheckpointError: as ``encode``.
    """
    packed, scale = encode(weight)
    return packed.unflatten(-1, (-1, BYTES)), scale
