"""How the whole MoE layer is verified, timed and compiled.

A routing is fixed by the sizes (T, K, E): it is data of a case, drawn once and outside what is timed, as
every rival gets it too.

Legend: T tokens, K experts a token, E experts, H hidden, I expert width, r rank.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Shape, normal_on_device
from shardwright.kernels.grouped_lora_mlp import rivals
from shardwright.kernels.grouped_lora_mlp.cases import compile_cases, frozen
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.op import Adapter
from shardwright.kernels.moe_layer.cost import cost
from shardwright.kernels.moe_layer.op import moe_layer
from shardwright.kernels.moe_layer.reference import moe_layer_reference

SCALINGS = (0.5, 0.25)
"""Of the gate-up and the down adapter: two different powers of two, exact in every dtype."""

SMALL: dict[tuple[int, int, int], str] = {
    (40, 3, 5): "skewed",
    (97, 2, 4): "hot",
    (33, 4, 9): "empty",
    (21, 3, 6): "sentinels",
    (0, 2, 3): "uniform",
}
"""Distributions of the small routings: heavy tail, all tokens on one expert, experts without tokens, -1 slots."""


@cache
def routing(T: int, K: int, E: int, device: str) -> Tensor:
    """``ids [T, K]``: K different experts a token (but for ``sentinels``), by seeded scores."""
    kind = SMALL.get((T, K, E), "uniform")
    generator = torch.Generator().manual_seed(11)
    scores = torch.randn((T, E), generator=generator)
    if kind == "skewed":
        scores += 2 * torch.randn(E, generator=generator)
    if kind == "hot":
        scores[:, 1] += 100
    if kind == "empty":
        scores[:, ::3] -= 100
    ids = scores.topk(K, dim=-1).indices
    if kind == "sentinels":
        ids[torch.rand((T, K), generator=generator) < 0.4] = -1
        ids[0] = E + 7
    return ids.to(device)


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """x, weights, gate_up, down; and the adapters' four factors where the shape has a rank."""
    T, K, E, H, I, r = (shape.get(name, 0) for name in ("T", "K", "E", "H", "I", "r"))
    sizes: list[tuple[tuple[int, ...], float]] = [
        ((T, H), 1.0),
        ((T, K), 0.5),
        ((E, 2 * I, H), H**-0.5),
        ((E, H, I), I**-0.5),
    ]
    if r:
        sizes += [((E, r, H), H**-0.5), ((E, 2 * I, r), r**-0.5), ((E, r, I), I**-0.5), ((E, H, r), r**-0.5)]
    return tuple(normal_on_device(size, dtype, device, seed + at).mul_(scale) for at, (size, scale) in enumerate(sizes))


def fused(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    """The operator on a frozen base."""
    ids = routing(x.shape[0], weights.shape[1], gate_up.shape[0], str(x.device))
    up = low = None
    if factors:
        up, low = Adapter(factors[0], factors[1], SCALINGS[0]), Adapter(factors[2], factors[3], SCALINGS[1])
    y = moe_layer(x, ids, weights, gate_up.detach(), down.detach(), up=up, low=low)
    return (frozen(y, gate_up, down),)


def reference(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    ids = routing(x.shape[0], weights.shape[1], gate_up.shape[0], str(x.device))
    up = low = None
    if factors:
        up, low = (factors[0], factors[1], SCALINGS[0]), (factors[2], factors[3], SCALINGS[1])
    found = moe_layer_reference(x, ids, weights, gate_up.detach(), down.detach(), up, low, Activation(), Layout())
    return (frozen(found, gate_up, down),)


@cache
def _ends(T: int, K: int, E: int, device: str) -> Tensor:
    return torch.bincount(routing(T, K, E, device).flatten(), minlength=E).cumsum(0).to(torch.int32)


def _rival(merged: bool) -> Function:
    """Sort, gather, grouped products, weighted scatter; group ends are given."""
    mlp = rivals.merged_mlp if merged else rivals.split_mlp

    def layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        (T, K), E = weights.shape, gate_up.shape[0]
        up = low = None
        if factors:
            up, low = (factors[0], factors[1], SCALINGS[0]), (factors[2], factors[3], SCALINGS[1])
        order = routing(T, K, E, str(x.device)).flatten().argsort(stable=True)
        token = order // K
        y = mlp(x[token], _ends(T, K, E, str(x.device)), gate_up, down, up, low)
        y = y * weights.flatten()[order][:, None]
        return (torch.zeros_like(x).index_add(0, token, y),)

    return layer


def grouped_mm_layer() -> Function:
    return _rival(False)


def peft_layer() -> Function:
    return _rival(True)


NAMES = ("x", "weights", "gate_up", "down")
FACTORS = ("up_a", "up_b", "down_a", "down_b")
PASSES = ("fwd", "fwd+dx")
SIZES = {
    "128e8": {"T": 8192, "K": 8, "E": 128, "H": 2048, "I": 768},
    "896e16": {"T": 8192, "K": 16, "E": 896, "H": 2048, "I": 2048},
    "256e8": {"T": 8192, "K": 8, "E": 256, "H": 7168, "I": 2048},
}
RANK = 16


def _suite(lora: bool) -> OpSuite:
    """``fwd+dx`` is the training pass of a frozen base: gradients of x and of the adapters."""
    prefix, rank = ("moe-lora", {"r": RANK}) if lora else ("moe", {})
    small = {"r": 6} if lora else {}
    return OpSuite(
        op="moe_layer",
        inputs=inputs,
        input_names=(*NAMES, *FACTORS) if lora else NAMES,
        output_names=("y",),
        frozen=("weights", "gate_up", "down"),
        fused=fused,
        reference=reference,
        cost=cost,
        rivals={"grouped_mm": grouped_mm_layer, **({"peft": peft_layer} if lora else {})},
        small_shapes=tuple({"T": T, "K": K, "E": E, "H": 72, "I": 40, **small} for T, K, E in SMALL),
        large_shapes=({"T": 4096, "K": 8, "E": 64, "H": 1024, "I": 384, **rank},),
        bench=tuple(BenchCase(f"{prefix}/{k}", {**v, **rank}, torch.bfloat16, PASSES) for k, v in SIZES.items()),
        compile_cases=compile_cases(gather=True, lora=lora),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )


SUITE, LORA_SUITE = _suite(False), _suite(True)
