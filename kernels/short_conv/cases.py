"""How the short convolution is verified, timed and compiled.

Legend: T tokens of all documents, C channels, J taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, Function, OpSuite, Shape, normal, normal_on_device
from shardwright.kernels.compile_gate import LaunchCase
from shardwright.kernels.kda.cases import bounds
from shardwright.kernels.launched import cases_of, meta, noted
from shardwright.kernels.short_conv import op
from shardwright.kernels.short_conv.cost import cost
from shardwright.kernels.short_conv.reference import short_conv_reference

INPUT_NAMES = ("x", "weight", "initial")
PASSES = ("fwd", "fwd+bwd", "fwd+dx")
SEED = 31


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    T, C, J = (shape[name] for name in ("T", "C", "J"))
    draw = normal_on_device if T * C > 1 << 24 else normal
    x = draw((1, T, C), dtype, device, seed)
    return x, normal((C, J), dtype, device, seed + 1), normal((shape.get("docs", 1), C, J - 1), dtype, device, seed + 2)


def fused(x: Tensor, weight: Tensor, initial: Tensor) -> tuple[Tensor, ...]:
    y, final = op.short_conv(
        x, weight, initial, cu_seqlens=bounds(x.shape[1], initial.shape[0]), output_final_state=True
    )
    assert final is not None
    return y, final


def reference(x: Tensor, weight: Tensor, initial: Tensor) -> tuple[Tensor, ...]:
    return short_conv_reference(x, weight, initial, cu_seqlens=bounds(x.shape[1], initial.shape[0]))


def compiled() -> Function:
    return torch.compile(reference, dynamic=False)


NARROW = {"short_conv_bwd_kernel": "a lane owns four channels: of eight, half the programs share a multiprocessor"}


def compile_cases() -> tuple[LaunchCase, ...]:
    """Both passes at the widths of the benchmark, weights learning and frozen, with and without states."""
    found: list[LaunchCase] = []
    for C, learns, stated in ((12288, True, False), (12288, False, False), (4096, False, True), (4096, True, True)):
        x = meta((1, 8192, C), learns=True)
        weight = meta((C, 4), torch.float32, learns=learns)
        initial = meta((1, C, 3), learns=True) if stated else None

        def call(
            x: Tensor = x, weight: Tensor = weight, initial: Tensor | None = initial, stated: bool = stated
        ) -> tuple[Tensor, ...]:
            return tuple(t for t in op.short_conv(x, weight, initial, output_final_state=stated) if t is not None)

        found += cases_of(f"short_conv/{C}/{'dw' if learns else 'frozen'}{'/state' if stated else ''}", call)
    return noted(found, narrow=NARROW)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    x, weight, initial = inputs({"T": 5, "C": 8, "J": 4}, torch.float32, device, SEED)

    def call(code: str, name: str, changed: Mapping[str, Tensor] | None = None, **settings: Any) -> BadInput:
        given: dict[str, Any] = {"x": x, "weight": weight, "initial": initial, **(changed or {})}
        return BadInput(name, code, lambda: op.short_conv(**given, **settings))

    return (
        call("taps-unsupported", "nine-taps", {"weight": weight.repeat(1, 3)[:, :9].contiguous()}),
        call("taps-unsupported", "one-tap", {"weight": weight[:, :1].contiguous()}),
        call("wrong-shape", "other-channels", {"weight": weight[:4].contiguous()}),
        call("wrong-shape", "taps-with-a-middle-dimension", {"weight": weight[:, None]}),
        call("wrong-shape", "state-of-another-count", {"initial": initial.repeat(2, 1, 1)}),
        call("no-tokens", "no-tokens", {"x": x[:, :0]}),
        call("bad-documents", "bounds-that-fall", cu_seqlens=(0, 4, 3, 5)),
        call("bad-documents", "bounds-that-end-early", cu_seqlens=torch.tensor([0, 4])),
        call("bad-documents", "bounds-and-rows", {"x": x.repeat(2, 1, 1)}, cu_seqlens=(0, 5)),
    )


SUITE = OpSuite(
    op="short_conv",
    inputs=inputs,
    input_names=INPUT_NAMES,
    output_names=("y", "final"),
    frozen=("weight",),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={"eager": lambda: reference, "torch.compile": compiled},
    small_shapes=(
        {"T": 50, "C": 40, "J": 4, "docs": 3},
        {"T": 1, "C": 300, "J": 4},
        {"T": 9, "C": 8, "J": 8, "docs": 4},
        {"T": 35, "C": 70, "J": 2},
    ),
    large_shapes=({"T": 4099, "C": 12288, "J": 4, "docs": 7}, {"T": 1000, "C": 1000, "J": 3}),
    bench=(
        BenchCase("short-conv/8kx12288", {"T": 8192, "C": 12288, "J": 4}, torch.bfloat16, PASSES),
        BenchCase("short-conv/32kx12288", {"T": 32768, "C": 12288, "J": 4}, torch.bfloat16, PASSES),
        BenchCase("short-conv/varlen", {"T": 65536, "C": 12288, "J": 4, "docs": 32}, torch.bfloat16, PASSES),
    ),
    compile_cases=compile_cases,
    bad_inputs=bad_inputs,
)
