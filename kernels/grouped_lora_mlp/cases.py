"""How the grouped LoRA MLP is verified, timed and compiled.

Counts are fixed by the sizes (R, E): they are data of a case, made once and outside what is timed.

Legend: R rows, E experts, H hidden, I expert width, F = 2I, r rank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Shape, normal_on_device
from shardwright.kernels.compile_gate import CompileCase
from shardwright.kernels.grouped_lora_mlp import configs, rivals
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.cost import cost
from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp
from shardwright.kernels.grouped_lora_mlp.reference import grouped_lora_mlp_reference
from shardwright.kernels.grouped_lora_mlp.triton import activation_bwd_kernel, gate_up_kernel, rows_kernel

SCALINGS = (0.5, 0.25)
RANK = 16
SMALL: dict[tuple[int, int], tuple[int, ...]] = {
    (30, 4): (7, 0, 22, 1),
    (210, 3): (0, 210, 0),
    (50, 2): (20, 10),
    (0, 3): (0, 0, 0),
}
"""Rows of each expert: none, one, one hot expert, rows that belong to nobody, no rows at all."""


@cache
def counts(R: int, E: int, device: str) -> Tensor:
    """Rows of each expert; equal parts where the sizes are none of ``SMALL``."""
    equal = tuple(R // E + (e < R % E) for e in range(E))
    return torch.tensor(SMALL.get((R, E), equal), dtype=torch.int32, device=device)


def frozen(y: Tensor, *base: Tensor) -> Tensor:
    """``y``, with zero gradients for base weights that a verification differentiates with respect to."""
    for weight in base:
        if weight.requires_grad:
            y = y + 0 * weight.sum().to(y.dtype)
    return y


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """x, gate_up, down; and the adapters' four factors where the shape has a rank."""
    R, E, H, I, r = (shape.get(name, 0) for name in ("R", "E", "H", "I", "r"))
    sizes: list[tuple[tuple[int, ...], float]] = [((R, H), 1.0), ((E, 2 * I, H), H**-0.5), ((E, H, I), I**-0.5)]
    if r:
        sizes += [((E, r, H), H**-0.5), ((E, 2 * I, r), r**-0.5), ((E, r, I), I**-0.5), ((E, H, r), r**-0.5)]
    return tuple(normal_on_device(size, dtype, device, seed + at).mul_(scale) for at, (size, scale) in enumerate(sizes))


def fused(x: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    """The operator on a frozen base."""
    up = low = None
    if factors:
        up, low = Adapter(factors[0], factors[1], SCALINGS[0]), Adapter(factors[2], factors[3], SCALINGS[1])
    n = counts(x.shape[0], gate_up.shape[0], str(x.device))
    return (frozen(grouped_lora_mlp(x, n, gate_up.detach(), down.detach(), up=up, low=low), gate_up, down),)


def reference(x: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    up = low = None
    if factors:
        up, low = (factors[0], factors[1], SCALINGS[0]), (factors[2], factors[3], SCALINGS[1])
    n = counts(x.shape[0], gate_up.shape[0], str(x.device))
    y = grouped_lora_mlp_reference(x, n, gate_up.detach(), down.detach(), up, low, Activation(), Layout())
    return (frozen(y, gate_up, down),)


@cache
def _ends(R: int, E: int, device: str) -> Tensor:
    return counts(R, E, device).cumsum(0).to(torch.int32)


def grouped_mm_mlp() -> Function:
    """torch's grouped products, with the elementwise activation between them."""

    def mlp(x: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        up = low = None
        if factors:
            up, low = (factors[0], factors[1], SCALINGS[0]), (factors[2], factors[3], SCALINGS[1])
        return (rivals.split_mlp(x, _ends(x.shape[0], gate_up.shape[0], str(x.device)), gate_up, down, up, low),)

    return mlp


def _arguments(kernel: Any, constants: dict[str, Any], blocks: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name.endswith("_desc"):
            types[name] = f"tensordesc<bf16{blocks[name]}>"
        elif name in ("expert_ptr", "first_ptr", "last_ptr", "tiles_ptr", "entry_ptr"):
            types[name] = "*i32"
        elif name.endswith("_ptr"):
            types[name] = "*fp32" if name == "part_ptr" else "*bf16"
        else:
            types[name] = "i32"
    aligned = [n for n in types if n.endswith("_ptr") or n in ("H", "I", "F", "N", "K", "RANK")]
    return types, aligned


def compile_cases(*, gather: bool, lora: bool) -> tuple[CompileCase, ...]:
    """The shipped bf16 configurations of the three products, as they run in training."""
    activation = {"STEP": 1, "KIND": "swiglu", "P0": 1.0, "P1": 1.0, "P2": 0.0, "GATED": True}
    shared = {"GROUP": 1, "LORA": lora, "RP": 16}
    up, rows, back = (f(2, 0, 1) for f in (configs.gate_up, configs.rows, configs.activation_bwd))
    plans = [
        (
            "gate_up",
            gate_up_kernel,
            up,
            True,
            {**activation, "GATHER": gather, "EVEN": True, "SPLIT": False, "SAVE": True},
        ),
        ("down", rows_kernel, rows, True, {}),
        ("dx", rows_kernel, rows, False, {}),
        (
            "activation_bwd",
            activation_bwd_kernel,
            back,
            False,
            {
                **activation,
                "GATHER": gather,
                "EVEN": True,
                "WEIGHTED": gather,
                "PARTS": gather,
                "STRIP": configs.STRIP_ROWS,
            },
        ),
    ]
    found = []
    for name, kernel, at, n_first, more in plans:
        constants = {**shared, **more, "BN": at.BN, "BK": at.BK, "N_FIRST": n_first}
        weight = f"[1, {at.BN}, {at.BK}]" if n_first else f"[1, {at.BK}, {at.BN}]"
        blocks = {f"{x}{n}_desc": f"[{n}, {at.BK}]" for x in "xd" for n in (128, 64, 32)}
        blocks |= {"gate_desc": weight, "up_desc": weight, "w_desc": weight}
        types, aligned = _arguments(kernel, constants, blocks)
        label = f"{name}/{'tokens' if gather else 'rows'}/{'lora' if lora else 'base'}"
        found.append(CompileCase(label, kernel, types, constants, tuple(aligned), at.warps, at.stages))
    return tuple(found)


NAMES = ("x", "gate_up", "down")
FACTORS = ("up_a", "up_b", "down_a", "down_b")
K3 = {"R": 14 * 4681, "E": 14, "H": 3584, "I": 3072}


def _suite(lora: bool) -> OpSuite:
    """``fwd+dx`` is the training pass of a frozen base: gradients of x and of the adapters."""
    prefix, rank = ("moe-lora", {"r": RANK}) if lora else ("moe", {})
    small = {"r": 6} if lora else {}
    return OpSuite(
        op="grouped_lora_mlp",
        inputs=inputs,
        input_names=(*NAMES, *FACTORS) if lora else NAMES,
        output_names=("y",),
        frozen=("gate_up", "down"),
        fused=fused,
        reference=reference,
        cost=cost,
        rivals={"grouped_mm": grouped_mm_mlp},
        small_shapes=tuple({"R": R, "E": E, "H": 72, "I": 40, **small} for R, E in SMALL),
        large_shapes=({"R": 5000, "E": 7, "H": 1024, "I": 384, **rank},),
        bench=(BenchCase(f"{prefix}/k3-ep64", {**K3, **rank}, torch.bfloat16, ("fwd", "fwd+dx")),),
        compile_cases=compile_cases(gather=False, lora=lora),
    )


SUITE, LORA_SUITE = _suite(False), _suite(True)
