"""Packed tensors: logical shapes, members and blocks; anything unknown is refused."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

from shardwright.checkpoints.packing.detect import logical_tensors
from shardwright.schemas.errors import CheckpointError

SIZES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}


@dataclass(frozen=True)
class Stored:
    dtype: str
    shape: tuple[int, ...]

    @property
    def stored_bytes(self) -> int:
        return prod(self.shape) * SIZES[self.dtype]


def group(document: dict[str, Any] | None = None, **tensors: tuple[str, tuple[int, ...]]) -> Any:
    table = {name.replace("__", "."): Stored(dtype, shape) for name, (dtype, shape) in tensors.items()}
    return logical_tensors(table, document or {})


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((256, 512), (2, 4), (128, 128)),
        ((576, 7168), (5, 56), (128, 128)),
        ((100, 40), (1, 1), (100, 40)),
        ((256, 512), (256, 1), (1, 512)),
    ],
)
def test_fp8_blocks(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, ...]) -> None:
    found = group(a__weight=("F8_E4M3", shape), a__weight_scale_inv=("F32", scale))
    assert list(found) == ["a.weight"]
    assert (found["a.weight"].format, found["a.weight"].shape, found["a.weight"].block) == ("fp8-block", shape, block)
    assert found["a.weight"].companions == ("a.weight_scale_inv",)


def test_mxfp4_of_compressed_tensors() -> None:
    found = group(a__weight_packed=("U8", (3072, 1792)), a__weight_scale=("U8", (3072, 112)))
    assert found["a.weight"].shape == (3072, 3584)
    assert found["a.weight"].format == "mxfp4" and found["a.weight"].block == (1, 32)


def test_int4_groups() -> None:
    found = group(
        a__weight_packed=("I32", (64, 16)),
        a__weight_scale=("BF16", (64, 4)),
        a__weight_shape=("I64", (2,)),
        a__weight_zero_point=("I32", (8, 4)),
    )
    assert list(found) == ["a.weight"]
    assert found["a.weight"].shape == (64, 128) and found["a.weight"].block == (1, 32)
    assert len(found["a.weight"].companions) == 3


@pytest.mark.parametrize("declared", [{"expert_dtype": "fp4"}, {"quantization_config": {"fmt": "e2m1"}}])
def test_a5_4_bit_floats_in_int8_count_twice_when_the_config_says_so(declared: dict[str, Any]) -> None:
    found = group(declared, x__experts__0__w1__weight=("I8", (16, 32)))
    assert prod(found["x.experts.0.w1.weight"].shape) == 1024
    undeclared = group(x__experts__0__w1__weight=("I8", (16, 32)))
    assert undeclared["x.experts.0.w1.weight"].format == "plain"


@pytest.mark.parametrize(
    "tensors",
    [
        {"a__qweight": ("I32", (64, 16))},
        {"a__weight": ("F8_E4M3", (256, 256))},
        {"a__weight": ("F8_E4M3", (256, 256)), "a__weight_scale_inv": ("F32", (3, 1))},
        {"a__weight_packed": ("U8", (64, 16)), "a__weight_scale": ("F8_E4M3", (64, 2))},
        {"a__weight_packed": ("U8", (64, 16)), "a__weight_scale": ("U8", (64, 2))},
        {"a__weight_packed": ("I32", (64, 16))},
        {"p_blocks": ("U8", (4, 8, 3, 16)), "p_scales": ("U8", (4, 8, 2))},
    ],
)
def test_unknown_packing_is_refused(tensors: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        group(**tensors)
    assert caught.value.code == "checkpoint/unknown-quantization"


def test_a_weight_stored_twice_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        group(
            a__weight=("BF16", (64, 64)),
            a__weight_packed=("U8", (64, 32)),
            a__weight_scale=("U8", (64, 2)),
        )
    assert caught.value.code == "checkpoint/duplicate-tensor"
