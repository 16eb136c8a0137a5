"""Codecs of packed weights: value tables from the specifications, round trips, other libraries' decoders."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.checkpoints.packing import fp8_block, int4_group, mxfp4_codec
from shardwright.schemas.errors import CheckpointError


def e2m1(code: int) -> float:
    """A 4-bit float by its definition: sign, two exponent bits (bias 1), one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def test_every_code_at_every_scale_is_exact() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    row = torch.cat((codes[0::2] | (codes[1::2] << 4), torch.zeros(8, dtype=torch.uint8)))
    scale = torch.arange(255, dtype=torch.uint8).unsqueeze(1)
    found = mxfp4_codec.decode(row.repeat(255, 1), scale, torch.float64)
    exact = [[e2m1(c) * 2.0 ** (s - 127) for c in range(16)] + [0.0] * 16 for s in range(255)]
    assert torch.equal(found, torch.tensor(exact, dtype=torch.float64))
    assert torch.equal(torch.signbit(found[:, 8]), torch.ones(255, dtype=torch.bool)), "code 8 is minus zero"
    narrow = mxfp4_codec.decode(row.repeat(255, 1), scale)
    assert torch.equal(narrow.double(), found.to(torch.bfloat16).double())
    assert torch.equal(narrow[:253].double(), found[:253]), "bf16 holds every value below 2^128"


def test_a_nan_scale_makes_its_group_nan_alone() -> None:
    packed, scale = torch.zeros((2, 32), dtype=torch.uint8), torch.tensor([[127, 255], [0, 1]], dtype=torch.uint8)
    found = mxfp4_codec.decode(packed, scale)
    assert torch.isnan(found[0, 32:]).all() and not torch.isnan(found[0, :32]).any() and not torch.isnan(found[1]).any()


def test_gpt_oss_blocks_are_what_transformers_decodes() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8, generator=generator)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales)  # [E, in, out]
    assert torch.equal(mxfp4_codec.decode_blocks(blocks, scales), theirs.transpose(1, 2))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_packed_values_survive_a_second_packing(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (3, 32), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 253, (3, 2), dtype=torch.uint8, generator=generator)
    value = mxfp4_codec.decode(packed, scale, dtype)
    assert torch.equal(mxfp4_codec.decode(*mxfp4_codec.encode(value), dtype), value)
    blocks, scales = mxfp4_codec.encode_blocks(value)
    assert tuple(blocks.shape) == (3, 2, 16) and torch.equal(mxfp4_codec.decode_blocks(blocks, scales, dtype), value)


def test_encoding_takes_the_nearest_code_and_even_ones_at_ties() -> None:
    magnitudes = torch.arange(0, 800, dtype=torch.float64) / 100
    codes = mxfp4_codec.nearest(magnitudes)
    for value, code in zip(magnitudes.tolist(), codes.tolist(), strict=True):
        gaps = [abs(value - e2m1(c)) for c in range(8)]
        nearest = [c for c in range(8) if math.isclose(gaps[c], min(gaps), abs_tol=1e-12)]
        assert code in nearest and (len(nearest) == 1 or code % 2 == 0)


def test_encoding_saturates_within_a_group() -> None:
    weight = torch.full((1, 32), 0.25)
    weight[0, 0] = 7.5  # 7.5 = 1.875 · 2²: the scale is 1, and the largest code is 6
    assert mxfp4_codec.decode(*mxfp4_codec.encode(weight), torch.float32)[0, 0] == 6.0


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 11), st.integers(0, 2**32 - 1))
def test_fp8_blocks_against_one_block_at_a_time(N: int, K: int, seed: int) -> None:
    generator, block = torch.Generator().manual_seed(seed), (4, 3)
    values = (torch.randn((2, N, K), generator=generator) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand((2, -(-N // 4), -(-K // 3)), generator=generator)
    found = fp8_block.decode(values, scale, torch.float32, block)
    for n in range(N):
        for k in range(K):
            assert torch.equal(found[:, n, k], values[:, n, k].float() * scale[:, n // 4, k // 3])
    again, scales = fp8_block.encode(found, block)
    error = (fp8_block.decode(again, scales, torch.float64, block) - found.double()).abs()
    largest = scales.repeat_interleave(4, 1).repeat_interleave(3, 2)[:, :N, :K].double() * fp8_block.LARGEST
    assert bool((error <= largest * 2.0**-4 * 1.001).all()), "half a step of three mantissa bits"


def test_fp8_values_round_to_bf16_once() -> None:
    values, scale = torch.tensor([[1.125]]).to(torch.float8_e4m3fn), torch.tensor([[1.0 + 2.0**-8 + 2.0**-20]])
    exact = torch.tensor(1.125 * (1.0 + 2.0**-8 + 2.0**-20), dtype=torch.float64).to(torch.bfloat16)
    assert fp8_block.decode(values, scale)[0, 0] == exact
    zeros, ones = fp8_block.encode(torch.zeros((3, 5)))
    assert torch.equal(fp8_block.decode(zeros, ones), torch.zeros((3, 5), dtype=torch.bfloat16))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_int4_words_by_arithmetic(seed: int, asymmetric: bool) -> None:
    """Words made with Python integers: code + 8 in four bits each, zero points along the outputs."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (9, 20), generator=generator)
    points = torch.randint(-8, 8, (9, 2), generator=generator)
    scale = torch.rand((9, 2), generator=generator)

    def words(rows: list[list[int]]) -> torch.Tensor:
        packed = []
        for row in rows:
            padded = row + [-8] * (-len(row) % 8)
            whole = [sum((c + 8) << (4 * i) for i, c in enumerate(padded[w : w + 8])) for w in range(0, len(padded), 8)]
            packed.append([w - (1 << 32) if w >= 1 << 31 else w for w in whole])
        return torch.tensor(packed, dtype=torch.int32)

    zero_point = words(points.T.tolist()).T.contiguous() if asymmetric else None
    found = int4_group.decode(words(codes.tolist()), scale, torch.float32, width=20, zero_point=zero_point)
    group = torch.arange(20) // 10
    shifted = codes - (points[:, group] if asymmetric else 0)
    assert torch.equal(found, shifted.float() * scale[:, group])
    mixed = torch.randint(0, 2, (20,), generator=generator)
    moved = int4_group.decode(words(codes.tolist()), scale, torch.float32, width=20, group_of=mixed)
    assert torch.equal(moved, codes.float() * scale[:, mixed])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 12, 32]))
def test_int4_round_trip(seed: int, group: int) -> None:
    weight = torch.randn((5, group * 3), generator=torch.Generator().manual_seed(seed))
    packed, scale = int4_group.encode(weight, group)
    value = int4_group.decode(packed, scale, torch.float32, width=group * 3)
    assert bool(((value - weight).abs() <= scale.repeat_interleave(group, 1) * 0.5001).all())
    again, _ = int4_group.encode(value, group)
    assert torch.equal(again, packed), "codes are stable"


def bad(code: str, call: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.code == f"checkpoint/{code}"


def test_what_is_refused() -> None:
    u8, f32 = torch.zeros((2, 16), dtype=torch.uint8), torch.zeros((2, 32))
    words = torch.zeros((2, 4), dtype=torch.int32)
    bad("packed-dtype", lambda: mxfp4_codec.decode(u8.int(), u8[:, :1]))
    bad("packed-dtype", lambda: mxfp4_codec.decode(u8, u8[:, :1], torch.int8))
    bad("packed-shape", lambda: mxfp4_codec.decode(u8[:, :15], u8[:, :1]))
    bad("packed-shape", lambda: mxfp4_codec.decode(u8, u8[:, :2]))
    bad("packed-shape", lambda: mxfp4_codec.decode_blocks(u8[:, :8], u8[:, :1]))
    bad("packed-shape", lambda: mxfp4_codec.encode(f32[:, :31]))
    bad("not-finite", lambda: mxfp4_codec.encode(f32 / 0))
    bad("packed-dtype", lambda: fp8_block.decode(f32, f32[:1, :1]))
    bad("packed-shape", lambda: fp8_block.decode(f32.to(torch.float8_e4m3fn), f32[:1, :2]))
    bad("packed-shape", lambda: fp8_block.encode(f32[0]))
    bad("packed-dtype", lambda: int4_group.decode(u8, f32))
    bad("packed-shape", lambda: int4_group.decode(words, f32[:, :3]))
    bad("packed-shape", lambda: int4_group.decode(words, f32[:, :1], width=24))
    bad("packed-shape", lambda: int4_group.decode(words, f32[:, :4], zero_point=words))
    bad("group-out-of-range", lambda: int4_group.decode(words, f32[:, :4], group_of=torch.full((32,), 4)))
