"""How head and cross-entropy are verified, timed and compiled.

The head and the labels are frozen data, so the only input is x: its width names the vocabulary, and head
and labels follow from it by a fixed seed.

Legend: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Shape, normal, normal_on_device
from shardwright.kernels.compile_gate import CompileCase
from shardwright.kernels.linear_cross_entropy import configs, op
from shardwright.kernels.linear_cross_entropy.cost import cost
from shardwright.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from shardwright.kernels.linear_cross_entropy.triton import (
    count_targets_kernel,
    cross_entropy_kernel,
    scale_rows_kernel,
)

IGNORED = -100
LARGE = {"T": 8192, "H": 7168, "V": 163_840}
VOCABULARIES = {7168: 163_840, 2048: 32_003, 576: 49_152, 96: 301, 33: 64, 64: 7, 16: 3}
"""Width of the input → vocabulary of the cases with that width."""

COMPILE_VOCABULARIES = (163_840, 151_936, 129_280, 49_152, 32_003, 301)
SEED = 11
SPREAD = 0.02
"""Spread of head values. Full random digits: a product of rounder ones draws less power and runs faster."""

IGNORED_EVERY = 97


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    draw = normal_on_device if shape["T"] * shape["H"] > 1 << 24 else normal
    return (draw((shape["T"], shape["H"]), dtype, device, seed),)


@lru_cache(maxsize=1)
def head(H: int, dtype: torch.dtype, device: str) -> Tensor:
    """``[V, H]`` of normal values with a head's usual spread, drawn in bf16 whatever the dtype."""
    shape = (VOCABULARIES[H], H)
    draw = normal_on_device if shape[0] * H > 1 << 24 else normal
    return draw(shape, torch.bfloat16, device, SEED).mul_(SPREAD).to(dtype)


def labels(T: int, H: int, device: str) -> Tensor:
    """``[T]`` labels; a few are ignored."""
    generator = torch.Generator().manual_seed(SEED + 1)
    found = torch.randint(0, VOCABULARIES[H], (T,), generator=generator)
    found[2::IGNORED_EVERY] = IGNORED
    return found.to(device)


def data(x: Tensor) -> tuple[Tensor, Tensor]:
    """Head and labels for an input."""
    T, H = x.shape
    return head(H, x.dtype, str(x.device)), labels(T, H, str(x.device))


def fused(x: Tensor) -> tuple[Tensor, ...]:
    return (op.linear_cross_entropy(x, *data(x), ignore_index=IGNORED, reduction="mean"),)


def reference(x: Tensor) -> tuple[Tensor, ...]:
    return (linear_cross_entropy_reference(x, *data(x), ignore_index=IGNORED, reduction="mean"),)


def products_only(x: Tensor) -> tuple[Tensor, ...]:
    """The two matrix products of every chunk and nothing else: what the vendor's library leaves to win."""
    weight, _ = data(x)
    T, V = x.shape[0], weight.shape[0]
    C = configs.chunk_rows(T, V, x.element_size())
    logits, dx = x.new_empty((C, configs.stride(V))), torch.empty_like(x)
    for start in range(0, T, C):
        piece = slice(start, min(start + C, T))
        rows = logits[: piece.stop - start, :V]
        torch.mm(x[piece], weight.t(), out=rows)
        torch.mm(rows, weight, out=dx[piece])
    return (dx,)


def liger() -> Function:
    """Liger's fused head and loss, with the head frozen."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction

    def run(x: Tensor) -> tuple[Tensor, ...]:
        found = function.apply(x, *data(x))
        return (found[0] if isinstance(found, tuple) else found,)

    return run


def rivals() -> dict[str, Any]:
    """Eager torch, and Liger where it is installed."""
    found: dict[str, Any] = {"eager": lambda: reference}
    return {**found, "liger": liger} if find_spec("liger_kernel") else found


def compile_cases() -> tuple[CompileCase, ...]:
    """Every shipped launch configuration of every kernel, in bf16."""
    found = []
    types = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "factors_ptr": "*fp32", "loss_ptr": "*fp32"}
    types |= {"V": "i32", "stride": "i32", "ignore_index": "i32"}
    for V in COMPILE_VOCABULARIES:
        groups, warps = configs.loss_groups(V)
        for gradient in (True, False):
            constants = {"GRADIENT": gradient, "PADDED": configs.stride(V) != V, "GROUPS": groups}
            name = f"cross_entropy/{V}/{'gradient' if gradient else 'loss'}"
            aligned = ("logits_ptr", "factors_ptr", "stride")
            constants["WIDTH"] = configs.WIDTH
            found.append(CompileCase(name, cross_entropy_kernel, types, constants, aligned, warps))
    count = {
        "targets_ptr": "*i64",
        "tokens_ptr": "*i64",
        "counts_ptr": "*i64",
        "factors_ptr": "*fp32",
        "T": "i32",
        "V": "i32",
    }
    found.append(
        CompileCase(
            "count_targets",
            count_targets_kernel,
            {**count, "ignore_index": "i32"},
            {"MEAN": True, "GIVEN": False, "BLOCK": configs.COUNT_BLOCK},
            ("counts_ptr", "factors_ptr"),
            configs.COUNT_WARPS,
        )
    )
    scale = {"x_ptr": "*bf16", "scale_ptr": "*fp32", "factors_ptr": "*fp32", "y_ptr": "*bf16", "n": "i32", "H": "i32"}
    found += [
        CompileCase(
            f"scale_rows/{'rows' if per_row else 'one'}",
            scale_rows_kernel,
            scale,
            {"PER_ROW": per_row, "BLOCK": configs.SCALE_BLOCK},
            ("x_ptr", "y_ptr", "factors_ptr"),
            configs.SCALE_WARPS,
        )
        for per_row in (False, True)
    ]
    return tuple(found)


SUITE = OpSuite(
    op="linear_cross_entropy",
    inputs=inputs,
    input_names=("x",),
    output_names=("loss",),
    frozen=(),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals=rivals(),
    small_shapes=(
        {"T": 13, "H": 96, "V": 301},
        {"T": 9, "H": 33, "V": 64},
        {"T": 2, "H": 64, "V": 7},
        {"T": 5, "H": 16, "V": 3},
    ),
    large_shapes=(
        {"T": 1031, "H": 2048, "V": 32_003},
        {"T": 4097, "H": 576, "V": 49_152},
        {"T": 1300, "H": 7168, "V": 163_840},
    ),
    bench=(BenchCase("linear-ce/8k", LARGE, torch.bfloat16, ("fwd+dx", "fwd")),),
    compile_cases=compile_cases(),
)
