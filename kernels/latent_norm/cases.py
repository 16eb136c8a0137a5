"""How latent norm is verified, timed and compiled.

Legend: T rows, W width of the joint projection, H width of the latent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Shape, normal, normal_on_device
from shardwright.kernels.compile_gate import POINTERS, CompileCase
from shardwright.kernels.latent_norm import configs, op
from shardwright.kernels.latent_norm.cost import cost
from shardwright.kernels.latent_norm.reference import latent_norm_reference
from shardwright.kernels.latent_norm.triton import latent_norm_bwd_kernel, latent_norm_fwd_kernel
from shardwright.kernels.launch import Launch, columns

EPS = 1e-6
PASSES = ("fwd", "bwd", "fwd+bwd", "fwd+dx")
COMPILE_SIZES = {"bfloat16": ((576, 512), (2112, 1536), (4160, 4096), (8192, 7168)), "float32": ((576, 512),)}
"""``(W, H)``: DeepSeek and Kimi's latent with its rotary key, a query latent beside it, and the widest rows."""


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    draw = normal_on_device if shape["T"] * shape["W"] > 1 << 24 else normal
    return draw((shape["T"], shape["W"]), dtype, device, seed), normal((shape["H"],), dtype, device, seed + 1)


def fused(joint: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return op.latent_norm(joint, weight, EPS)


def reference(joint: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return latent_norm_reference(joint, weight, EPS)


def compiled() -> Function:
    return torch.compile(reference, dynamic=False)


def row_case(name: str, kernel: Any, sizes: tuple[int, int], dtype: str, launch: Launch, **flags: bool) -> CompileCase:
    """One kernel at one width, on dense rows."""
    W, H = sizes
    fp32 = ("rstd_ptr", "partial_ptr")
    types = {n: "*fp32" if n in fp32 else POINTERS[dtype] for n in kernel.arg_names if n.endswith("_ptr")}
    integers = [n for n in kernel.arg_names if n in ("R", "W", "H") or n.endswith(("_so", "_sm", "_si"))]
    types |= dict.fromkeys(integers, "i32") | ({"eps": "fp32"} if "eps" in kernel.arg_names else {})
    single = {n: 1 for n in kernel.arg_names if n.endswith(("_m", "_i")) and not n.endswith(("_sm", "_si"))}
    tile = {"ROWS": launch.rows, "COLUMNS": columns(H), "REST": columns(W - H), "STAGES": launch.stages}
    aligned = tuple(n for n in types if n not in ("eps", "R"))
    label = f"{name}/{W}-{H}/{dtype}"
    return CompileCase(label, kernel, types, {**single, **tile, **flags}, aligned, launch.warps, launch.stages)


def compile_cases() -> tuple[CompileCase, ...]:
    """Every entry of the launch table."""
    found = []
    for dtype, all_sizes in COMPILE_SIZES.items():
        for sizes in all_sizes:
            width = configs.tile_width(*sizes)
            found.append(row_case("latent_norm_fwd", latent_norm_fwd_kernel, sizes, dtype, configs.forward(width)))
            for learns in (True, False):
                name = f"latent_norm_bwd/{'dw' if learns else 'frozen'}"
                flags = {"SINGLE": False, "LATENT_GRADIENT": True, "REST_GRADIENT": True, "WEIGHT_GRADIENT": learns}
                launch = configs.backward(width)
                found.append(row_case(name, latent_norm_bwd_kernel, sizes, dtype, launch, **flags))
    return tuple(found)


SUITE = OpSuite(
    op="latent_norm",
    inputs=inputs,
    input_names=("joint", "weight"),
    output_names=("latent", "rest"),
    frozen=("weight",),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={"eager": lambda: reference, "torch.compile": compiled},
    small_shapes=(
        {"T": 5, "W": 576, "H": 512},
        {"T": 7, "W": 40, "H": 33},
        {"T": 1, "W": 2, "H": 1},
        {"T": 0, "W": 96, "H": 64},
        {"T": 3, "W": 300, "H": 100},
    ),
    large_shapes=(
        {"T": 8191, "W": 576, "H": 512},
        {"T": 4097, "W": 2112, "H": 1536},
        {"T": 1025, "W": 8192, "H": 7168},
    ),
    far_rows={"T": (1 << 31) // 576 + 8, "W": 576, "H": 512},
    bench=(
        BenchCase("latent-norm/16kx576", {"T": 16384, "W": 576, "H": 512}, torch.bfloat16, PASSES),
        BenchCase("latent-norm/64kx576", {"T": 65536, "W": 576, "H": 512}, torch.bfloat16, PASSES),
    ),
    compile_cases=compile_cases(),
)
