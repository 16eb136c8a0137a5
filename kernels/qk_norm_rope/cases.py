"""How query/key norm + RoPE is verified, timed and compiled.

Three suites: ``SUITE`` norms and rotates halves (Qwen3, GLM-4.5), ``PAIRS_SUITE`` rotates neighbouring pairs
without a norm (GLM-4), ``MLA_SUITE`` the last dimensions of wide queries and of one narrow key (DeepSeek-V3).

Legend: T tokens, Q and K heads, D head width, DK the keys' where it differs, W rotary width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Shape, normal, normal_on_device
from shardwright.kernels.compile_gate import POINTERS, CompileCase
from shardwright.kernels.qk_norm_rope import configs, op
from shardwright.kernels.qk_norm_rope.contract import PAIRINGS
from shardwright.kernels.qk_norm_rope.cost import cost
from shardwright.kernels.qk_norm_rope.reference import qk_norm_rope_reference
from shardwright.kernels.qk_norm_rope.triton import qk_norm_rope_bwd_kernel, qk_norm_rope_fwd_kernel

EPS = 1e-6
THETA = 1e6
GRID = 256
"""Tables of the cases are multiples of 1/256, which every dtype holds exactly."""
PASSES = ("fwd", "bwd", "fwd+bwd", "fwd+dx")


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """q, k, cos and sin; both weights after them unless ``norm`` is 0."""
    T, Q, K, D, W = (shape[name] for name in ("T", "Q", "K", "D", "W"))
    DK = shape.get("DK", D)
    draw = normal_on_device if T * Q * D > 1 << 24 else normal
    q, k = draw((T, Q, D), dtype, device, seed), draw((T, K, DK), dtype, device, seed + 2)
    found = (q, k, *tables(T, W, dtype, device))
    if not shape.get("norm", 1):
        return found
    return *found, normal((D,), dtype, device, seed + 1), normal((DK,), dtype, device, seed + 3)


def tables(T: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin ``[T, W]`` of positions 0..T-1, both halves alike, as transformers gives them."""
    frequency = THETA ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angle = torch.arange(T, dtype=torch.float32, device=device)[:, None] * frequency
    cos, sin = (torch.round(f(torch.cat([angle, angle], -1)) * GRID) / GRID for f in (torch.cos, torch.sin))
    return cos.to(dtype), sin.to(dtype)


def rotated(function: Callable[..., tuple[Tensor, Tensor]], *given: Tensor, **kind: Any) -> tuple[Tensor, ...]:
    """``function`` on the inputs of a case: the rotary width is the table's."""
    q, k, cos, sin, *weights = given
    if weights:
        kind |= {"q_weight": weights[0], "k_weight": weights[1], "eps": EPS}
    return function(q, k, cos, sin, width=cos.shape[-1], **kind)


def compiled(**kind: Any) -> Function:
    return torch.compile(partial(rotated, qk_norm_rope_reference, **kind), dynamic=False)


def suite(
    small: tuple[Shape, ...], large: tuple[Shape, ...], bench: tuple[BenchCase, ...], *, norm: bool, **kind: Any
) -> OpSuite:
    """One suite of the operator for one rotary kind."""
    reference = partial(rotated, qk_norm_rope_reference, **kind)
    weights = ("q_weight", "k_weight") if norm else ()
    return OpSuite(
        op="qk_norm_rope",
        inputs=inputs,
        input_names=("q", "k", "cos", "sin", *weights),
        output_names=("q_rotated", "k_rotated"),
        frozen=weights,
        constant=("cos", "sin"),
        fused=partial(rotated, op.qk_norm_rope, **kind),
        reference=reference,
        cost=cost,
        rivals={"eager": lambda: reference, "torch.compile": partial(compiled, **kind)},
        small_shapes=small,
        large_shapes=large,
        bench=bench,
        far_rows={"T": (1 << 31) // (32 * 128) + 8, "Q": 32, "K": 4, "D": 128, "W": 128} if norm else None,
        compile_cases=compile_cases() if norm else (),
    )


def compile_pair(
    name: str,
    dtype: str,
    *,
    heads: tuple[int, int],
    widths: tuple[int, int, int],
    pairing: str = "half",
    last: bool = False,
    norm: bool = True,
    unit_offset: bool = False,
) -> list[CompileCase]:
    """Forward, and backward with frozen and with learning weights, on slices of a joint projection."""
    DQ, DK, W = widths
    model = {
        "DQ": DQ,
        "DK": DK,
        "W": W,
        "KIND": PAIRINGS.index(pairing),
        "LAST": last,
        "WHOLE": pairing == "half",
        "NORM": norm,
        "UNIT_OFFSET": unit_offset,
        "HALF": configs.power_of_two(W // 2),
        "PASS_Q": configs.power_of_two(DQ - W),
        "PASS_K": configs.power_of_two(DK - W),
        **({"K": 1} if heads[1] == 1 else {}),
    }
    found = []
    width = max(configs.tile_width(DQ, W), configs.tile_width(DK, W))
    flags = [(False, configs.forward(width)), (False, configs.backward(width)), (True, configs.backward(width))]
    for at, (learns, launch) in enumerate(flags[: 3 if norm else 2]):
        kernel = qk_norm_rope_bwd_kernel if at else qk_norm_rope_fwd_kernel
        fp32 = ("q_partial_ptr", "k_partial_ptr")
        types = {
            n: "*fp32" if n in fp32 and learns else POINTERS[dtype] for n in kernel.arg_names if n.endswith("_ptr")
        }
        counts = ("RQ", "RK", "T", "Q", "K", "PQ", "PK", "tiles")
        strides = [n for n in kernel.arg_names if n.endswith(("_sb", "_st", "_sh"))]
        types |= {n: "i32" for n in (*counts, *strides) if n in kernel.arg_names and n not in model}
        types["eps"] = "fp32"
        aligned = tuple(n for n in types if n.endswith("_ptr") or n in strides)
        constants = {**model, "ROWS": launch.rows}
        if at:
            constants |= {"WEIGHT_GRADIENT": learns, "STAGES": launch.stages}
        label = f"qk_norm_rope_{'bwd' if at else 'fwd'}/{name}/{dtype}{'/dw' if learns else ''}"
        found.append(CompileCase(label, kernel, types, constants, aligned, launch.warps, launch.stages))
    return found


def compile_cases() -> tuple[CompileCase, ...]:
    """The rotary kinds of the reference models, and the widest head in fp32."""
    found = compile_pair("qwen3-moe", "bfloat16", heads=(32, 4), widths=(128, 128, 128))
    found += compile_pair("glm-4.5", "bfloat16", heads=(96, 8), widths=(128, 128, 64))
    found += compile_pair("qwen3-next", "bfloat16", heads=(16, 2), widths=(256, 256, 64), unit_offset=True)
    found += compile_pair("glm-4", "bfloat16", heads=(32, 2), widths=(128, 128, 64), pairing="interleaved", norm=False)
    mla = {"heads": (128, 1), "widths": (192, 64, 64), "last": True, "norm": False}
    found += compile_pair("deepseek-v3", "bfloat16", pairing="interleaved-to-half", **mla)  # type: ignore[arg-type]
    found += compile_pair("pairs", "float32", heads=(8, 8), widths=(128, 128, 128), pairing="interleaved")
    found += compile_pair("widest", "float32", heads=(8, 8), widths=(512, 512, 512))
    return tuple(found)


SUITE = suite(
    (
        {"T": 5, "Q": 4, "K": 2, "D": 128, "W": 128},
        {"T": 7, "Q": 3, "K": 3, "D": 64, "W": 32},
        {"T": 9, "Q": 1, "K": 1, "D": 41, "W": 24},
        {"T": 0, "Q": 4, "K": 2, "D": 128, "W": 128},
    ),
    (
        {"T": 4097, "Q": 32, "K": 4, "D": 128, "W": 128},
        {"T": 1025, "Q": 96, "K": 8, "D": 128, "W": 64},
        {"T": 515, "Q": 16, "K": 2, "D": 256, "W": 64},
        {"T": 300, "Q": 3, "K": 1, "D": 512, "W": 512},
    ),
    (
        BenchCase("qk-norm-rope/8kx32x4x128", {"T": 8192, "Q": 32, "K": 4, "D": 128, "W": 128}, torch.bfloat16, PASSES),
        BenchCase(
            "qk-norm-rope/8kx64x8x128-w64", {"T": 8192, "Q": 64, "K": 8, "D": 128, "W": 64}, torch.bfloat16, PASSES
        ),
    ),
    norm=True,
)
"""Halves, normed: Qwen3-30B rotates whole heads, GLM-4.5 and MiniMax-M2 half of each."""

PAIRS = {"pairing": 1, "norm": 0}
PAIRS_SUITE = suite(
    (
        {"T": 3, "Q": 2, "K": 1, "D": 48, "W": 16, **PAIRS},
        {"T": 5, "Q": 3, "K": 2, "D": 32, "W": 32, **PAIRS},
        {"T": 0, "Q": 4, "K": 2, "D": 128, "W": 64, **PAIRS},
    ),
    ({"T": 2049, "Q": 32, "K": 2, "D": 128, "W": 64, **PAIRS}, {"T": 515, "Q": 3, "K": 3, "D": 96, "W": 96, **PAIRS}),
    (),
    norm=False,
    pairing="interleaved",
)

MLA = {"DK": 64, "W": 64, "pairing": 2, "norm": 0}
MLA_SUITE = suite(
    (
        {"T": 3, "Q": 2, "K": 1, "D": 96, **MLA},
        {"T": 4, "Q": 3, "K": 1, "D": 64, **MLA},
        {"T": 0, "Q": 4, "K": 1, "D": 192, **MLA},
    ),
    ({"T": 1025, "Q": 128, "K": 1, "D": 192, **MLA},),
    (BenchCase("rope-mla/8kx128x1x192", {"T": 8192, "Q": 128, "K": 1, "D": 192, **MLA}, torch.bfloat16, PASSES[:3]),),
    norm=False,
    pairing="interleaved-to-half",
    last=True,
)
