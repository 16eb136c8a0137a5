"""How the grouped LoRA MLP is verified, timed and compiled.

Counts are fixed by the sizes (R, E): they are data of a case, made once and outside what is timed.

Legend: R rows, E experts, H hidden, I expert width, F = 2I, r rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, Function, OpSuite, Run, Shape, normal_on_device, row_facts
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.grouped_lora_mlp import rivals
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.cost import cost
from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp
from shardwright.kernels.grouped_lora_mlp.reference import grouped_lora_mlp_reference
from shardwright.kernels.grouped_lora_mlp.tuning import tune_cases
from shardwright.kernels.launched import cases_of, meta, noted
from shardwright.kernels.passes import timed_pass

SCALINGS = (0.5, 0.25)
RANK = 16
SPILLS = {
    "hopper_product_kernel": (
        224,
        "three consumers of 160 registers and a producer of 32 fill the register file: the fused activation spills up "
        "to 200 bytes",
    )
}
"""Spilled bytes a thread that a kernel may have, and why."""

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
    return (grouped_lora_mlp(x, n, gate_up, down, up=up, low=low),)


def reference(x: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    up = low = None
    if factors:
        up, low = (factors[0], factors[1], SCALINGS[0]), (factors[2], factors[3], SCALINGS[1])
    n = counts(x.shape[0], gate_up.shape[0], str(x.device))
    return (grouped_lora_mlp_reference(x, n, gate_up, down, up, low, Activation(), Layout()),)


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


def facts(case: BenchCase) -> dict[str, float]:
    """The distribution of rows over experts."""
    return row_facts(counts(case.shape["R"], case.shape["E"], "cuda"))


def extras(case: BenchCase, name: str) -> dict[str, Run]:
    """Our own time at the same size without adapters, for a case that has them."""
    if not case.shape.get("r"):
        return {}
    bare = replace(case, shape={key: size for key, size in case.shape.items() if key != "r"})
    return {"without_lora": timed_pass(SUITE, bare, SUITE.fused, name)}


def launched(label: str, size: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[AnyCase, ...]:
    """Every launch of the operator and its gradients at one size, as in training."""
    R, E, H, I, r = (size.get(n, 0) for n in ("R", "E", "H", "I", "r"))

    def call() -> Tensor:
        up = low = None
        if r:
            factors = ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r))
            a, b, c, d = (meta(shape, dtype, learns=True) for shape in factors)
            up, low = Adapter(a, b, SCALINGS[0]), Adapter(c, d, SCALINGS[1])
        x, n = meta((R, H), dtype, learns=True), meta((E,), torch.int32)
        return grouped_lora_mlp(x, n, meta((E, 2 * I, H), dtype), meta((E, H, I), dtype), up=up, low=low)

    return noted(cases_of(label, call), spills=SPILLS)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    x, up, low = (torch.ones(size, device=device) for size in ((4, 16), (2, 16, 16), (2, 16, 8)))
    n = torch.tensor([2, 2], device=device)
    a, b = torch.ones((2, 3, 16), device=device), torch.ones((2, 16, 3), device=device)
    narrow = tuple(torch.ones(size, device=device) for size in ((4, 6), (2, 16, 6), (2, 6, 8)))
    odd = Activation("clamped_swiglu", (-1.0, 1.0, 0.0))
    return (
        BadInput("counts-of-other-experts", "wrong-shape", lambda: grouped_lora_mlp(x, n[:1], up, low)),
        BadInput("counts-of-floats", "dtype-unsupported", lambda: grouped_lora_mlp(x, n.float(), up, low)),
        BadInput("counts-with-gaps", "not-contiguous", lambda: grouped_lora_mlp(x, n.repeat(2)[::2], up, low)),
        BadInput("x-transposed", "not-contiguous", lambda: grouped_lora_mlp(x.repeat(4, 1).mT, n, up, low)),
        BadInput("width-not-whole-vectors", "misaligned-width", lambda: grouped_lora_mlp(narrow[0], n, *narrow[1:])),
        BadInput("base-learns", "trains-the-base", lambda: grouped_lora_mlp(x, n, up.clone().requires_grad_(), low)),
        BadInput(
            "ranks-differ", "wrong-shape", lambda: grouped_lora_mlp(x, n, up, low, up=Adapter(a, b[..., :2], 1.0))
        ),
        BadInput("negative-limit", "bad-parameter", lambda: grouped_lora_mlp(x, n, up, low, activation=odd)),
    )


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
        frozen=(),
        constant=("gate_up", "down"),
        fused=fused,
        reference=reference,
        cost=cost,
        rivals={"grouped_mm": grouped_mm_mlp},
        small_shapes=tuple({"R": R, "E": E, "H": 72, "I": 40, **small} for R, E in SMALL),
        large_shapes=({"R": 5000, "E": 7, "H": 1024, "I": 384, **rank},),
        bench=(BenchCase(f"{prefix}/k3-ep64", {**K3, **rank}, torch.bfloat16, ("fwd", "fwd+dx")),),
        compile_cases=lambda: launched(f"{prefix}/k3-ep64", {**K3, **rank}),
        extras=extras,
        facts=facts,
        tune=None if lora else tune_cases,
        bad_inputs=None if lora else bad_inputs,
    )


SUITE, LORA_SUITE = _suite(False), _suite(True)
