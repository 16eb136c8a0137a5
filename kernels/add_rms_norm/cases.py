"""How residual add + RMSNorm is verified, timed, swept and compiled.

Legend: T rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.kernels.add_rms_norm import configs, op
from shardwright.kernels.add_rms_norm.cost import cost
from shardwright.kernels.add_rms_norm.reference import add_rms_norm_reference
from shardwright.kernels.add_rms_norm.triton import add_rms_norm_bwd_kernel, add_rms_norm_fwd_kernel
from shardwright.kernels.cases import FAR, BenchCase, Function, OpSuite, Shape, SweepCase, normal, normal_on_device
from shardwright.kernels.compile_gate import CompileCase
from shardwright.kernels.launch import Launch
from shardwright.kernels.rms_norm.cases import (
    COMPILE_DTYPES,
    COMPILE_WIDTHS,
    EPS,
    LARGE,
    SWEEP_ELEMENTS,
    row_case,
    row_launches,
)


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    draw = normal_on_device if shape["T"] * shape["H"] > 1 << 24 else normal
    x, residual = (draw((shape["T"], shape["H"]), dtype, device, seed + i) for i in (0, 2))
    return x, residual, normal((shape["H"],), dtype, device, seed + 1)


def fused(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return op.add_rms_norm(x, residual, weight, EPS)


def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return add_rms_norm_reference(x, residual, weight, EPS)


def torch_native(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, EPS), total


def compiled() -> Function:
    return torch.compile(reference, dynamic=False)


def sweep_forward(
    H: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Callable[[Launch], None], list[tuple[Tensor, Tensor]]]:
    T = SWEEP_ELEMENTS // H
    x, residual, weight = inputs({"T": T, "H": H}, dtype, device, seed)
    y, total, rstd = torch.empty_like(x), torch.empty_like(x), torch.empty(T, device=device)
    tail = [t[-256:].double() for t in (x, residual)]
    exact = add_rms_norm_reference(tail[0], tail[1], weight.double(), EPS)
    run = lambda launch: op.launch_forward(x, residual, weight, EPS, y, total, rstd, launch)  # noqa: E731
    return run, [(y, exact[0]), (total, exact[1])]


def sweep_backward(
    H: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Callable[[Launch], None], list[tuple[Tensor, Tensor]]]:
    T = SWEEP_ELEMENTS // H
    total, dy, weight = inputs({"T": T, "H": H}, dtype, device, seed)
    dtotal = normal_on_device((T, H), dtype, device, seed + 5)
    rstd = torch.rsqrt(total.float().pow(2).mean(-1) + EPS)
    dx, dweight = torch.empty_like(total), torch.empty_like(weight)
    leaf = total[-256:].double().requires_grad_()
    y = add_rms_norm_reference(leaf, torch.zeros_like(leaf), weight.double(), EPS)
    torch.autograd.backward(y, [dy[-256:].double(), dtotal[-256:].double()])
    assert leaf.grad is not None
    run = lambda launch: op.launch_backward(dy, dtotal, total, weight, rstd, EPS, dx, dweight, launch)  # noqa: E731
    return run, [(dx, leaf.grad)]


def compile_cases() -> tuple[CompileCase, ...]:
    """Every shipped launch configuration of every kernel."""
    found = []
    for dtype in COMPILE_DTYPES:
        for H in COMPILE_WIDTHS:
            found.append(row_case("add_rms_norm_fwd", add_rms_norm_fwd_kernel, H, dtype, configs.forward(H)))
            for learns in (True, False):
                name = f"add_rms_norm_bwd/{'dw' if learns else 'frozen'}"
                flags = {"SINGLE": False, "WEIGHT_GRADIENT": learns, "RESIDUAL_GRADIENT": True}
                found.append(row_case(name, add_rms_norm_bwd_kernel, H, dtype, configs.backward(H), **flags))
    return tuple(found)


SUITE = OpSuite(
    op="add_rms_norm",
    inputs=inputs,
    input_names=("x", "residual", "weight"),
    output_names=("y", "new_residual"),
    frozen=("weight",),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={"eager": lambda: reference, "torch.compile": compiled, "F.rms_norm": lambda: torch_native},
    small_shapes=(
        {"T": 5, "H": 96},
        {"T": 7, "H": 33},
        {"T": 1, "H": 1},
        {"T": 0, "H": 64},
        {"T": 70, "H": 128},
        {"T": 3, "H": 1000},
    ),
    large_shapes=({"T": 4097, "H": 7168}, {"T": 1025, "H": 8192}, {"T": 8191, "H": 576}),
    far_rows=FAR,
    bench=(BenchCase("add-rmsnorm/16kx7168", LARGE, torch.bfloat16, ("fwd", "bwd", "fwd+bwd", "fwd+dx")),),
    sweep=(
        SweepCase("fwd", 4 * SWEEP_ELEMENTS * 2, lambda H: row_launches(H, False), sweep_forward),
        SweepCase("bwd", 4 * SWEEP_ELEMENTS * 2, lambda H: row_launches(H, True), sweep_backward),
    ),
    compile_cases=compile_cases(),
)
