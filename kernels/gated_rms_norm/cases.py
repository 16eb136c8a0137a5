"""How gated RMSNorm is verified, timed, swept and compiled.

Legend: T tokens, H heads, D row width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Shape, SweepCase, normal, normal_on_device
from shardwright.kernels.compile_gate import POINTERS, CompileCase
from shardwright.kernels.gated_rms_norm import configs, op
from shardwright.kernels.gated_rms_norm.cost import cost
from shardwright.kernels.gated_rms_norm.reference import gated_rms_norm_reference
from shardwright.kernels.gated_rms_norm.triton import gated_rms_norm_bwd_kernel, gated_rms_norm_fwd_kernel
from shardwright.kernels.launch import Launch, columns
from shardwright.kernels.rms_norm.cases import SWEEP_ELEMENTS, row_launches

EPS = 1e-5
ACTIVATION = "sigmoid"
"""What verify and bench run; the tests run both."""
PASSES = ("fwd", "bwd", "fwd+bwd", "fwd+dx")
COMPILE_WIDTHS = {"bfloat16": (128, 1024, 4096, 8192), "float32": (256, 8192)}
"""Every entry of the launch table at its widest row; fp32 where a row needs the most registers."""


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    size = (shape["T"], shape["H"], shape["D"])
    draw = normal_on_device if shape["T"] * shape["H"] * shape["D"] > 1 << 24 else normal
    x, gate = (draw(size, dtype, device, seed + at) for at in (0, 2))
    return x, gate, normal((shape["D"],), dtype, device, seed + 1)


def fused(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (op.gated_rms_norm(x, gate, weight, EPS, activation=ACTIVATION),)


def reference(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (gated_rms_norm_reference(x, gate, weight, EPS, ACTIVATION),)


def compiled() -> Function:
    return torch.compile(reference, dynamic=False)


def sweep_forward(
    D: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Callable[[Launch], None], list[tuple[Tensor, Tensor]]]:
    R = SWEEP_ELEMENTS // D
    x, gate, weight = inputs({"T": R, "H": 1, "D": D}, dtype, device, seed)
    y, rstd = torch.empty_like(x), torch.empty(R, device=device)
    tail = [t[-256:].double() for t in (x, gate)]
    exact = gated_rms_norm_reference(tail[0], tail[1], weight.double(), EPS, ACTIVATION)
    run = lambda launch: op.launch_forward(x, gate, weight, EPS, False, y, rstd, launch)  # noqa: E731
    return run, [(y, exact)]


def sweep_backward(
    D: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Callable[[Launch], None], list[tuple[Tensor, Tensor]]]:
    R = SWEEP_ELEMENTS // D
    x, gate, weight = inputs({"T": R, "H": 1, "D": D}, dtype, device, seed)
    dy = normal_on_device((R, 1, D), dtype, device, seed + 5)
    rstd = torch.rsqrt(x.float().pow(2).mean(-1) + EPS).reshape(-1)
    dx, dgate, dweight = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight)
    leaves = [t[-256:].double().requires_grad_() for t in (x, gate)]
    y = gated_rms_norm_reference(leaves[0], leaves[1], weight.double(), EPS, ACTIVATION)
    exact = torch.autograd.grad(y, leaves, dy[-256:].double())
    run = lambda launch: op.launch_backward(  # noqa: E731
        dy, x, gate, weight, rstd, EPS, False, dx, dgate, dweight, launch
    )
    return run, [(dx, exact[0]), (dgate, exact[1])]


def row_argument_types(kernel: Any, dtype: str, weight: str) -> dict[str, str]:
    """Triton types: dense x and dy, a gate strided by heads; sizes of 1 are constants."""
    fp32 = ("rstd_ptr", "partial_ptr")
    types = {n: "*fp32" if n in fp32 else POINTERS[dtype] for n in kernel.arg_names if n.endswith("_ptr")}
    types["weight_ptr"] = POINTERS[weight]
    integers = ("R", "D", "gate_i", "gate_so", "gate_si", "x_so", "dy_so", "gate_sm", "x_sm", "x_si", "dy_sm", "dy_si")
    types |= {n: "i32" for n in integers if n in kernel.arg_names}
    return {**types, **({"eps": "fp32"} if "eps" in kernel.arg_names else {})}


def row_case(name: str, kernel: Any, D: int, dtype: str, weight: str, launch: Launch, **flags: bool) -> CompileCase:
    """One kernel at one width, with a gate that is a slice of a joint projection."""
    types = row_argument_types(kernel, dtype, weight)
    single = {n: 1 for n in ("x_m", "x_i", "dy_m", "dy_i", "gate_m") if n in kernel.arg_names}
    tile = {"ROWS": launch.rows, "COLUMNS": columns(D), "STAGES": launch.stages}
    aligned = tuple(n for n in types if n not in ("eps", "R", "gate_i"))
    label = f"{name}/{D}/{dtype}" + ("" if weight == dtype else f"/w-{weight}")
    return CompileCase(label, kernel, types, {**single, **tile, **flags}, aligned, launch.warps, launch.stages)


def compile_cases() -> tuple[CompileCase, ...]:
    """Every shipped launch configuration: sigmoid at every width, silu and an fp32 weight at heads of 128."""
    kinds = [(D, dtype, dtype, False) for dtype, widths in COMPILE_WIDTHS.items() for D in widths]
    found = []
    for D, dtype, weight, silu in [*kinds, (128, "bfloat16", "bfloat16", True), (128, "bfloat16", "float32", True)]:
        gate, forward, backward = "silu" if silu else "sigmoid", configs.forward(D), configs.backward(D)
        name = f"gated_rms_norm_fwd/{gate}"
        found.append(row_case(name, gated_rms_norm_fwd_kernel, D, dtype, weight, forward, SILU=silu))
        for learns in (True, False):
            name = f"gated_rms_norm_bwd/{gate}/{'dw' if learns else 'frozen'}"
            flags = {"SILU": silu, "SINGLE": False, "WEIGHT_GRADIENT": learns}
            found.append(row_case(name, gated_rms_norm_bwd_kernel, D, dtype, weight, backward, **flags))
    return tuple(found)


SUITE = OpSuite(
    op="gated_rms_norm",
    inputs=inputs,
    input_names=("x", "gate", "weight"),
    output_names=("y",),
    frozen=("weight",),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={"eager": lambda: reference, "torch.compile": compiled},
    small_shapes=(
        {"T": 5, "H": 3, "D": 128},
        {"T": 3, "H": 2, "D": 33},
        {"T": 1, "H": 1, "D": 1},
        {"T": 0, "H": 4, "D": 64},
        {"T": 2, "H": 1, "D": 1000},
        {"T": 40, "H": 2, "D": 64},
    ),
    large_shapes=(
        {"T": 4097, "H": 32, "D": 128},
        {"T": 1025, "H": 96, "D": 128},
        {"T": 515, "H": 3, "D": 256},
        {"T": 8191, "H": 1, "D": 2048},
        {"T": 1025, "H": 1, "D": 8192},
    ),
    far_rows={"T": (1 << 31) // (32 * 128) + 8, "H": 32, "D": 128},
    bench=(
        BenchCase("gated-rmsnorm/16kx32x128", {"T": 16384, "H": 32, "D": 128}, torch.bfloat16, PASSES),
        BenchCase("gated-rmsnorm/8kx96x128", {"T": 8192, "H": 96, "D": 128}, torch.bfloat16, PASSES),
    ),
    sweep=(
        SweepCase("fwd", 3 * SWEEP_ELEMENTS * 2, lambda D: row_launches(D, False), sweep_forward),
        SweepCase("bwd", 5 * SWEEP_ELEMENTS * 2, lambda D: row_launches(D, True), sweep_backward),
    ),
    compile_cases=compile_cases(),
)
