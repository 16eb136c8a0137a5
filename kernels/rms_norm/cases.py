"""How RMSNorm is verified, timed, swept and compiled.

Legend: T rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.kernels.cases import FAR, BenchCase, Function, OpSuite, Shape, SweepCase, normal, normal_on_device
from shardwright.kernels.compile_gate import POINTERS, CompileCase
from shardwright.kernels.launch import Launch, columns
from shardwright.kernels.rms_norm import configs, op
from shardwright.kernels.rms_norm.cost import cost
from shardwright.kernels.rms_norm.reference import rms_norm_reference
from shardwright.kernels.rms_norm.triton import (
    rms_norm_bwd_kernel,
    rms_norm_bwd_weight_kernel,
    rms_norm_fwd_kernel,
)

EPS = 1e-6
LARGE = {"T": 16384, "H": 7168}
COMPILE_WIDTHS = (128, 576, 2048, 4096, 7168, 8192)
COMPILE_DTYPES = ("bfloat16", "float32")


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    draw = normal_on_device if shape["T"] * shape["H"] > 1 << 24 else normal
    x = draw((shape["T"], shape["H"]), dtype, device, seed)
    return x, normal((shape["H"],), dtype, device, seed + 1)


def fused(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (op.rms_norm(x, weight, EPS),)


def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm_reference(x, weight, EPS),)


def torch_native(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (F.rms_norm(x, (x.shape[-1],), weight, EPS),)


def compiled() -> Function:
    return torch.compile(reference, dynamic=False)


SWEEP_ELEMENTS = LARGE["T"] * LARGE["H"]
"""Values of a swept tensor at every width: several times the second-level cache."""


def row_launches(H: int, backward: bool) -> tuple[Launch, ...]:
    """Launches worth timing at a width: 8 to 64 values a thread, copies in flight, programs."""
    found = []
    for warps in (4, 8, 16) if backward else (2, 4, 8):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            tile_values = rows * columns(H)
            if not (2048 <= tile_values <= 8192 and 8 <= tile_values // (32 * warps) <= 64):
                continue
            if not backward:
                found += [Launch(rows, warps, 1, 0, reload) for reload in (False, True)]
                continue
            for stages in (3, 4):
                found += [Launch(rows, warps, stages, programs) for programs in (1, 2) if programs * warps <= 32]
    return tuple(found)


def sweep_forward(
    H: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Callable[[Launch], None], list[tuple[Tensor, Tensor]]]:
    T = SWEEP_ELEMENTS // H
    x, weight = inputs({"T": T, "H": H}, dtype, device, seed)
    y, rstd = torch.empty_like(x), torch.empty(T, device=device)
    exact = rms_norm_reference(x[-256:].double(), weight.double(), EPS)
    return lambda launch: op.launch_forward(x, weight, EPS, y, rstd, launch), [(y, exact)]


def sweep_backward(
    H: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[Callable[[Launch], None], list[tuple[Tensor, Tensor]]]:
    T = SWEEP_ELEMENTS // H
    x, weight = inputs({"T": T, "H": H}, dtype, device, seed)
    dy = normal_on_device((T, H), dtype, device, seed + 2)
    rstd = torch.rsqrt(x.float().pow(2).mean(-1) + EPS)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    leaf = x[-256:].double().requires_grad_()
    rms_norm_reference(leaf, weight.double(), EPS).backward(dy[-256:].double())
    exact_dweight = torch.zeros(H, dtype=torch.float64, device=device)
    for at in range(0, T, 2048):
        piece = slice(at, at + 2048)
        exact_dweight += (dy[piece].double() * x[piece].double() * rstd[piece].double()[:, None]).sum(0)
    assert leaf.grad is not None
    run = lambda launch: op.launch_backward(dy, x, weight, rstd, EPS, dx, dweight, launch)  # noqa: E731
    return run, [(dx, leaf.grad), (dweight, exact_dweight)]


def arguments(kernel: Any, dtype: str, fp32: tuple[str, ...]) -> dict[str, str]:
    """Triton types of a kernel's run-time arguments: tensors of ``dtype`` but for the named fp32 ones."""
    pointers = {n: "*fp32" if n in fp32 else POINTERS[dtype] for n in kernel.arg_names if n.endswith("_ptr")}
    sizes = {n: "i32" for n in ("T", "P", "H") if n in kernel.arg_names}
    return {**pointers, **sizes, **({"eps": "fp32"} if "eps" in kernel.arg_names else {})}


def row_case(name: str, kernel: Any, H: int, dtype: str, launch: Launch, **constants: bool) -> CompileCase:
    """One row kernel at one width; row counts and eps are never specialised."""
    types = arguments(kernel, dtype, ("rstd_ptr", "partial_ptr"))
    tile = {"ROWS": launch.rows, "COLUMNS": columns(H), "STAGES": launch.stages}
    aligned = tuple(n for n in types if n not in ("eps", "T"))
    return CompileCase(
        f"{name}/{H}/{dtype}", kernel, types, {**tile, **constants}, aligned, launch.warps, launch.stages
    )


def compile_cases() -> tuple[CompileCase, ...]:
    """Every shipped launch configuration of every kernel."""
    found = []
    for dtype in COMPILE_DTYPES:
        for H in COMPILE_WIDTHS:
            launch = configs.forward(H)
            found.append(row_case("rms_norm_fwd", rms_norm_fwd_kernel, H, dtype, launch, RELOAD=launch.reload))
            for learns in (True, False):
                name = f"rms_norm_bwd/{'dw' if learns else 'frozen'}"
                launch = configs.backward(H)
                found.append(
                    row_case(name, rms_norm_bwd_kernel, H, dtype, launch, SINGLE=False, WEIGHT_GRADIENT=learns)
                )
    types = arguments(rms_norm_bwd_weight_kernel, "bfloat16", ("partial_ptr",))
    blocks = {"BLOCK_P": configs.WEIGHT_BLOCK_P, "BLOCK_H": configs.WEIGHT_BLOCK_H}
    aligned = ("partial_ptr", "dweight_ptr", "H")
    found.append(
        CompileCase("rms_norm_bwd_weight", rms_norm_bwd_weight_kernel, types, blocks, aligned, configs.WEIGHT_WARPS)
    )
    return tuple(found)


SUITE = OpSuite(
    op="rms_norm",
    inputs=inputs,
    input_names=("x", "weight"),
    output_names=("y",),
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
    large_shapes=({"T": 4097, "H": 7168}, {"T": 1025, "H": 8192}, {"T": 8191, "H": 576}, {"T": 300_000, "H": 128}),
    far_rows=FAR,
    bench=(BenchCase("rmsnorm/16kx7168", LARGE, torch.bfloat16, ("fwd", "bwd", "fwd+bwd", "fwd+dx")),),
    sweep=(
        SweepCase("fwd", 2 * SWEEP_ELEMENTS * 2, lambda H: row_launches(H, False), sweep_forward),
        SweepCase("bwd", 3 * SWEEP_ELEMENTS * 2, lambda H: row_launches(H, True), sweep_backward),
    ),
    compile_cases=compile_cases(),
)
