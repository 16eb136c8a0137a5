"""How attention residuals are verified, timed and compiled, a suite for each number of rows.

Legend: T tokens, R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.attention_residual.cost import cost
from shardwright.kernels.attention_residual.op import attention_residual
from shardwright.kernels.attention_residual.reference import attention_residual_reference
from shardwright.kernels.attention_residual.rivals import rivals
from shardwright.kernels.attention_residual.tuning import SWEEP
from shardwright.kernels.cases import FAR, BadInput, BenchCase, OpSuite, Shape, normal, normal_on_device
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.launched import cases_of, meta

EPS = 1e-6
COMPILE_WIDTHS = (128, 2048, 4096, 7168, 8192)
FIRST = 2
TOKENS = 8192
"""A sequence of 4,096 tokens, twice, as the plan for 128 devices has it."""


def inputs(rows: int) -> Callable[[Shape, torch.dtype, str, int], tuple[Tensor, ...]]:
    """Rows of growing size, as a residual stream has them, and logits of order one."""

    def draw(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
        make = normal_on_device if shape["T"] * shape["H"] > 1 << 24 else normal
        found = [make((shape["T"], shape["H"]), dtype, device, seed + 7 * r).mul_(1 + r / 4) for r in range(rows)]
        norm, projection = (normal((shape["H"],), dtype, device, seed + at) for at in (1, 2))
        return *found, norm.mul_(0.1).add_(1), projection.mul_(shape["H"] ** -0.5)

    return draw


def fused(*given: Tensor) -> tuple[Tensor, ...]:
    *rows, norm, projection = given
    return (attention_residual(rows, norm, projection, EPS),)


def reference(*given: Tensor) -> tuple[Tensor, ...]:
    *rows, norm, projection = given
    return (attention_residual_reference(rows, norm, projection, EPS),)


def compile_cases() -> tuple[AnyCase, ...]:
    """Every launch at every width, frozen and learning: the same for any number of rows."""
    found: list[AnyCase] = []
    for dtype in (torch.bfloat16, torch.float32):
        for H in COMPILE_WIDTHS:
            for learns in (False, True):
                given = [meta((TOKENS, H), dtype, learns=True) for _ in range(2)]
                weights = [meta((H,), dtype, learns=learns) for _ in range(2)]
                label = f"attention_residual/{H}/{str(dtype).rpartition('.')[2]}/{'dw' if learns else 'frozen'}"
                found += cases_of(label, partial(fused, *given, *weights))
    return tuple(found)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    """What only this operator refuses."""
    row, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        "no-rows": ("row-count", lambda: attention_residual((), weight, weight, EPS)),
        "seventeen-rows": ("row-count", lambda: attention_residual([row] * 17, weight, weight, EPS)),
        "rows-of-two-lengths": ("wrong-shape", lambda: attention_residual((row, row[:2]), weight, weight, EPS)),
        "projection-of-two": (
            "wrong-shape",
            lambda: attention_residual((row,), weight, torch.randn(2, 64, device=device), EPS),
        ),
        "eps": ("bad-epsilon", lambda: attention_residual((row,), weight, weight, float("nan"))),
    }
    return tuple(BadInput(name, code, call) for name, (code, call) in calls.items())


def suite_of(rows: int, *passes: str) -> OpSuite:
    """R rows, each a tensor of its own. The first suite compiles and sweeps for all."""
    sizes = ((5, 96), (7, 33), (0, 64), (70, 128), (3, 1000))
    shapes: tuple[Shape, ...] = tuple({"T": T, "R": rows, "H": H} for T, H in sizes)
    shape = {"T": TOKENS, "R": rows, "H": 7168}
    return OpSuite(
        op="attention_residual",
        inputs=inputs(rows),
        input_names=(*(f"row_{r}" for r in range(rows)), "norm", "projection"),
        output_names=("y",),
        frozen=("norm", "projection"),
        fused=fused,
        reference=reference,
        cost=cost,
        rivals=rivals(reference, EPS),
        small_shapes=shapes,
        large_shapes=({"T": 4097, "R": rows, "H": 7168}, {"T": 1025, "R": rows, "H": 8192}),
        far_rows={**FAR, "R": rows} if rows == 1 else None,
        bench=(BenchCase(f"attention-residual/R{rows}", shape, torch.bfloat16, passes),),
        sweep=SWEEP if rows == FIRST else (),
        compile_cases=compile_cases if rows == FIRST else (),
        bad_inputs=bad_inputs,
    )


SUITE = suite_of(FIRST, "fwd", "fwd+dx")
ROWS_1 = suite_of(1, "fwd+dx")
ROWS_3 = suite_of(3, "fwd+dx")
ROWS_5 = suite_of(5, "fwd", "bwd", "fwd+dx")
ROWS_9 = suite_of(9, "fwd", "bwd", "fwd+dx")
"""As many as the mix before Kimi K3's last norm reads."""
