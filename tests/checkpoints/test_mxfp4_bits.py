"""MXFP4 bit for bit: every byte at every scale, and packing, against arithmetic on the bits and on exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from shardwright.checkpoints.packing import mxfp4_codec

BYTES = torch.arange(256, dtype=torch.uint8)


def value_of(nibble: int) -> Fraction:
    """One sign bit, two exponent bits (bias 1), one mantissa bit; exponent 0 has no leading one."""
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    magnitude = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -magnitude if nibble & 8 else magnitude


def test_every_byte_at_every_scale() -> None:
    """256 bytes × 256 scales; the scale by torch's own E8M0, the low nibble first; 255 is not a number."""
    scale = BYTES.unsqueeze(1).expand(256, 16).contiguous()
    found = mxfp4_codec.decode(BYTES.repeat(256, 1), scale, torch.float64)
    both = [float(value_of(nibble)) for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    power = BYTES.view(torch.float8_e8m0fnu).to(torch.float64).unsqueeze(1)
    expected = torch.tensor(both, dtype=torch.float64) * power
    assert torch.isnan(found[255]).all() and torch.isnan(power[255]).all()
    assert torch.equal(found[:255], expected[:255])
    minus = torch.tensor([bool(nibble & 8) for byte in range(256) for nibble in (byte & 15, byte >> 4)])
    assert torch.equal(torch.signbit(found[:255]), minus.expand(255, 512))
    for dtype in (torch.bfloat16, torch.float32):
        narrow = mxfp4_codec.decode(BYTES.repeat(256, 1), scale, dtype)
        assert torch.equal(narrow[:255], expected[:255].to(dtype)), dtype


def packed_exactly(row: list[float]) -> tuple[list[int], list[int]]:
    """Bytes and scales of a row of whole groups, in exact arithmetic."""
    packed, scales = [], []
    table = [value_of(code) for code in range(8)]
    for start in range(0, len(row), 32):
        group = [Fraction(one) for one in row[start : start + 32]]
        largest = max(abs(one) for one in group)
        code = 0
        if largest:
            floor = next(e for e in range(-1100, 1100) if Fraction(2) ** e <= largest < Fraction(2) ** (e + 1))
            code = min(max(floor - 2 + 127, 0), 254)
        scales.append(code)
        nibbles = []
        for one, original in zip(group, row[start : start + 32], strict=True):
            scaled = abs(one) / Fraction(2) ** (code - 127)
            gaps = [abs(scaled - known) for known in table]
            best = [c for c in range(8) if gaps[c] == min(gaps)]
            chosen = best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0)
            negative = torch.signbit(torch.tensor(original)).item()
            nibbles.append(chosen | (8 if negative else 0))
        packed += [low | (high << 4) for low, high in zip(nibbles[0::2], nibbles[1::2], strict=True)]
    return packed, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("deviation", [1e-30, 0.02, 1.0, 3e4])
def test_packing_is_the_exact_one(dtype: torch.dtype, deviation: float) -> None:
    """Random weights, a group of zeros, ties, minus zero; and what comes out packs to itself."""
    generator = torch.Generator().manual_seed(7)
    weight = (torch.randn(4, 96, generator=generator) * deviation).to(dtype)
    weight[1, 32:64] = 0
    weight[2, :32] = torch.tensor([0.25, -0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0, -5.0, 7.9, -0.0, 4.0] + [1.0] * 20)
    packed, scale = mxfp4_codec.encode(weight)
    for found, exponents, row in zip(packed.tolist(), scale.tolist(), weight.double().tolist(), strict=True):
        assert (found, exponents) == packed_exactly(row)
    again = mxfp4_codec.decode(packed, scale, torch.float64)
    assert torch.equal(mxfp4_codec.decode(*mxfp4_codec.encode(again), torch.float64), again)
