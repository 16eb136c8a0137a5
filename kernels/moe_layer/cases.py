"""How the whole MoE layer is verified, timed and compiled.

A routing is fixed by the sizes (T, K, E): it is data of a case, drawn once and outside what is timed, as
every rival gets it too.

Legend: T tokens, K experts a token, E experts, H hidden, I expert width, r rank.
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
from shardwright.kernels.grouped_lora_mlp.op import Adapter
from shardwright.kernels.launched import cases_of, meta, noted
from shardwright.kernels.moe_layer.cost import cost
from shardwright.kernels.moe_layer.op import moe_layer
from shardwright.kernels.moe_layer.reference import moe_layer_reference
from shardwright.kernels.passes import timed_pass
from shardwright.kernels.permute.cases import routing

SCALINGS = (0.5, 0.25)
"""Of the gate-up and the down adapter: two different powers of two, exact in every dtype."""

SMALL = ((40, 3, 5), (97, 2, 4), (33, 4, 9), (21, 3, 6), (0, 2, 3))
"""Sizes (T, K, E) of routings that ``permute.cases`` draws: heavy tail, one hot expert, experts without tokens,
-1 slots, no tokens."""


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
    return (moe_layer(x, ids, weights, gate_up, down, up=up, low=low),)


def reference(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    ids = routing(x.shape[0], weights.shape[1], gate_up.shape[0], str(x.device))
    up = low = None
    if factors:
        up, low = (factors[0], factors[1], SCALINGS[0]), (factors[2], factors[3], SCALINGS[1])
    return (moe_layer_reference(x, ids, weights, gate_up, down, up, low, Activation(), Layout()),)


def fused_base(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
    """The operator with biases on a base that learns."""
    ids = routing(x.shape[0], weights.shape[1], gate_up.shape[0], str(x.device))
    up_bias, down_bias = biases
    return (moe_layer(x, ids, weights, gate_up, down, up_bias=up_bias, down_bias=down_bias, trains_base=True),)


def reference_base(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
    ids = routing(x.shape[0], weights.shape[1], gate_up.shape[0], str(x.device))
    return (moe_layer_reference(x, ids, weights, gate_up, down, None, None, Activation(), Layout(), *biases),)


def inputs_base(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """x, weights, gate_up, down and both biases."""
    E, H, I = (shape[name] for name in ("E", "H", "I"))
    biases = (normal_on_device(size, dtype, device, seed + 8 + at) for at, size in enumerate(((E, 2 * I), (E, H))))
    return *inputs({**shape, "r": 0}, dtype, device, seed), *biases


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
BIASES = ("up_bias", "down_bias")
PASSES = ("fwd", "fwd+dx")
SIZES = {
    "128e8": {"T": 8192, "K": 8, "E": 128, "H": 2048, "I": 768},
    "896e16": {"T": 8192, "K": 16, "E": 896, "H": 2048, "I": 2048},
    "256e8": {"T": 8192, "K": 8, "E": 256, "H": 7168, "I": 2048},
}
FEW_ROWS = {"T": 1024, "K": 8, "E": 128, "H": 2048, "I": 768}
"""Compiled, not timed: 64 rows an expert, which the portable product makes."""
RANK = 16
SPILLS = {
    "hopper_product_kernel": (
        448,
        "three consumers of 160 registers and a producer of 32 fill the register file: launches that gather rows spill "
        "116 bytes, with biases 356 and with an adapter 388",
    )
}
"""Spilled bytes a thread that a kernel may have, and why."""


def facts(case: BenchCase) -> dict[str, float]:
    """The distribution of rows over experts."""
    T, K, E = (case.shape[name] for name in ("T", "K", "E"))
    return row_facts(torch.bincount(routing(T, K, E, "cuda").flatten(), minlength=E))


def extras(case: BenchCase, name: str) -> dict[str, Run]:
    """Our own time at the same size without adapters, for a case that has them."""
    if not case.shape.get("r"):
        return {}
    bare = replace(case, shape={key: size for key, size in case.shape.items() if key != "r"})
    return {"without_lora": timed_pass(SUITE, bare, SUITE.fused, name)}


def launched(label: str, size: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[AnyCase, ...]:
    """Every launch of the layer and its gradients at one size, as in training."""
    T, K, E, H, I, r = (size.get(n, 0) for n in ("T", "K", "E", "H", "I", "r"))

    def call() -> Tensor:
        up = low = None
        if r:
            factors = ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r))
            a, b, c, d = (meta(shape, dtype, learns=True) for shape in factors)
            up, low = Adapter(a, b, SCALINGS[0]), Adapter(c, d, SCALINGS[1])
        x, weights = meta((T, H), dtype, learns=True), meta((T, K), dtype)
        return moe_layer(
            x, meta((T, K), torch.int64), weights, meta((E, 2 * I, H), dtype), meta((E, H, I), dtype), up=up, low=low
        )

    return noted(cases_of(label, call), spills=SPILLS)


def launched_base(label: str, size: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[AnyCase, ...]:
    """Every launch of the layer with biases on a base that learns, at one size."""
    T, K, E, H, I = (size[n] for n in ("T", "K", "E", "H", "I"))

    def call() -> Tensor:
        x, weights = meta((T, H), dtype, learns=True), meta((T, K), dtype, learns=True)
        stacks = (meta(shape, dtype, learns=True) for shape in ((E, 2 * I, H), (E, H, I)))
        up_bias, down_bias = (meta(shape, dtype) for shape in ((E, 2 * I), (E, H)))
        ids = meta((T, K), torch.int64)
        return moe_layer(x, ids, weights, *stacks, up_bias=up_bias, down_bias=down_bias, trains_base=True)

    return noted(cases_of(label, call), spills=SPILLS)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    x, ids = torch.ones((4, 16), device=device), torch.zeros((4, 2), dtype=torch.int64, device=device)
    weights, up, low = (torch.ones(size, device=device) for size in ((4, 2), (2, 16, 16), (2, 16, 8)))
    narrow = tuple(torch.ones(size, device=device) for size in ((4, 6), (2, 16, 6), (2, 6, 8)))
    learning = up.clone().requires_grad_()
    return (
        BadInput("rows-unlike-ids", "wrong-shape", lambda: moe_layer(x[:3], ids, weights, up, low)),
        BadInput("weights-unlike-ids", "wrong-shape", lambda: moe_layer(x, ids, weights[:, :1], up, low)),
        BadInput("stacks-of-other-widths", "wrong-shape", lambda: moe_layer(x, ids, weights, up[:, :8], low)),
        BadInput("ids-of-floats", "dtype-unsupported", lambda: moe_layer(x, ids.float(), weights, up, low)),
        BadInput(
            "width-not-whole-vectors", "misaligned-width", lambda: moe_layer(narrow[0], ids, weights, *narrow[1:])
        ),
        BadInput("base-learns", "trains-the-base", lambda: moe_layer(x, ids, weights, learning, low)),
    )


def _suite(lora: bool) -> OpSuite:
    """``fwd+dx`` is the training pass of a frozen base: gradients of x and of the adapters."""
    prefix, rank = ("moe-lora", {"r": RANK}) if lora else ("moe", {})
    small = {"r": 6} if lora else {}
    return OpSuite(
        op="moe_layer",
        inputs=inputs,
        input_names=(*NAMES, *FACTORS) if lora else NAMES,
        output_names=("y",),
        frozen=("weights",),
        constant=("gate_up", "down"),
        fused=fused,
        reference=reference,
        cost=cost,
        rivals={"grouped_mm": grouped_mm_layer, **({"peft": peft_layer} if lora else {})},
        small_shapes=tuple({"T": T, "K": K, "E": E, "H": 72, "I": 40, **small} for T, K, E in SMALL),
        large_shapes=({"T": 4096, "K": 8, "E": 64, "H": 1024, "I": 384, **rank},),
        bench=tuple(BenchCase(f"{prefix}/{k}", {**v, **rank}, torch.bfloat16, PASSES) for k, v in SIZES.items()),
        compile_cases=lambda: tuple(
            case
            for k, v in {**SIZES, "few-rows": FEW_ROWS}.items()
            for case in launched(f"{prefix}/{k}", {**v, **rank})
        ),
        extras=extras,
        facts=facts,
        bad_inputs=None if lora else bad_inputs,
    )


SUITE, LORA_SUITE = _suite(False), _suite(True)
BASE_SUITE = replace(
    SUITE,
    inputs=inputs_base,
    input_names=(*NAMES, *BIASES),
    constant=BIASES,
    fused=fused_base,
    reference=reference_base,
    rivals={},
    bench=(),
    compile_cases=lambda: launched_base("moe-base/128e8", SIZES["128e8"]),
    extras=None,
    bad_inputs=None,
)
"""Biases and learning stacks: verified and compiled, not timed."""
