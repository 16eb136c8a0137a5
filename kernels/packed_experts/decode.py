# mypy: disable-error-code="no-untyped-def"
"""Packed weights to bf16 inside a kernel: exact, a few instructions a pair of values.

MXFP4 in the kernels' own order (``storage``): a block of 64 values along the packed dim is 32 bytes, byte j
holding value j in its low and value j + 32 in its high nibble. So the low nibbles of a block are one group of 32
values with one scale, the high nibbles the next group, and no value has to change places.

A nibble is sign, two exponent bits, one mantissa bit. Moved to the same fields of a bf16 it is the value times
2⁻¹²⁶, zero and the subnormal 0.5 included; a product with 2¹²⁶ and one with the group's power of two follow.

FP8 (E4M3): value times its block's fp32 scale, rounded to bf16 once, as a dequantised copy would hold it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(code):
    """E8M0 codes (0 .. 255) as bf16: 2^(code - 127); code 0 is the subnormal 2⁻¹²⁷, 255 is NaN."""
    bits = tl.where(code == 0, 0x0040, code.to(tl.int32) << 7)
    return tl.where(code == 255, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def low_scale(pair):
    """The scale of the low nibbles' group, out of a pair of codes (int16)."""
    return power_of_two(pair.to(tl.int32) & 0xFF)


@triton.jit
def high_scale(pair):
    """The scale of the high nibbles' group, out of a pair of codes (int16)."""
    return power_of_two((pair.to(tl.int32) >> 8) & 0xFF)


@triton.jit
def _nibble(code):
    """Nibbles (in the low bits of an int32) as bf16, unscaled."""
    bits = ((code & 0x8) << 12) | ((code & 0x7) << 6)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True) * tl.full([1, 1], 2.0**126, tl.bfloat16)


@triton.jit
def decode_mxfp4(packed, low, high, ASM: tl.constexpr):
    """A tile of bytes [A, B] as two bf16 tiles of its shape: low nibbles, high nibbles.

    ``low`` and ``high`` are scales in bf16 that broadcast to the tile. ``ASM`` packs two values a register; without
    it the same bits come from plain operations (the interpreter has no assembler).
    """
    if ASM:
        return tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 a, b, m, s;
            mov.b32 m, 0x7E807E80;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 s, a, 12;
            and.b32 s, s, 0x80008000;
            shl.b32 $0, a, 6;
            lop3.b32 $0, $0, 0x01C001C0, s, 0xEA;
            mul.bf16x2 $0, $0, m;
            mul.bf16x2 $0, $0, $5;
            shl.b32 s, b, 12;
            and.b32 s, s, 0x80008000;
            shl.b32 $1, b, 6;
            lop3.b32 $1, $1, 0x01C001C0, s, 0xEA;
            mul.bf16x2 $1, $1, m;
            mul.bf16x2 $1, $1, $6;
            shl.b32 s, a, 8;
            and.b32 s, s, 0x80008000;
            shl.b32 $2, a, 2;
            lop3.b32 $2, $2, 0x01C001C0, s, 0xEA;
            mul.bf16x2 $2, $2, m;
            mul.bf16x2 $2, $2, $7;
            shl.b32 s, b, 8;
            and.b32 s, s, 0x80008000;
            shl.b32 $3, b, 2;
            lop3.b32 $3, $3, 0x01C001C0, s, 0xEA;
            mul.bf16x2 $3, $3, m;
            mul.bf16x2 $3, $3, $8;
            }
            """,
            constraints="=&r,=&r,=&r,=&r,r,r,r,r,r",
            args=[packed, low, high],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = packed.to(tl.int32)
        return _nibble(wide & 0xF) * low, _nibble(wide >> 4) * high


@triton.jit
def decode_fp8(values, scale):
    """A tile of E4M3 values times fp32 scales that broadcast to it, rounded to bf16."""
    return (values.to(tl.float32) * scale).to(tl.bfloat16)
