"""How head and cross-entropy are verified, timed and compiled.

The head and the labels are frozen data, so the inputs are x, and LoRA's factors where the head has them: the
width of x names the vocabulary, and head and labels follow from it by a fixed seed.

Legend: T tokens, H hidden, V vocabulary, r LoRA rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels import tuned
from shardwright.kernels.cases import (
    BadInput,
    BenchCase,
    Function,
    OpSuite,
    Run,
    Shape,
    TuneCase,
    normal,
    normal_on_device,
)
from shardwright.kernels.compile_gate import AnyCase, LaunchCase
from shardwright.kernels.launched import meta, noted, recorded
from shardwright.kernels.linear_cross_entropy import configs, op
from shardwright.kernels.linear_cross_entropy.chunks import loss_pass, scaled, walk
from shardwright.kernels.linear_cross_entropy.cost import cost, loss_cost
from shardwright.kernels.linear_cross_entropy.labels import raise_pending as labels_seen
from shardwright.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from shardwright.kernels.passes import timed_pass

IGNORED = -100
LARGE = {"T": 8192, "H": 7168, "V": 163_840}
VOCABULARIES = {7168: 163_840, 2048: 32_003, 576: 49_152, 96: 301, 33: 64, 64: 7, 16: 3}
"""Width of the input → vocabulary of the cases with that width."""

COMPILE_VOCABULARIES = (163_840, 151_936, 129_280, 49_152, 32_003, 301)
SEED = 11
SPREAD = 0.02
"""Spread of head values. Full random digits: a product of rounder ones draws less power and runs faster."""

IGNORED_EVERY = 97
LORA_SCALE, RANK = 0.5, 16


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """x; and LoRA's a [r, H] and b [V, r] where the shape has a rank."""
    T, H, r = shape["T"], shape["H"], shape.get("r", 0)
    draw = normal_on_device if T * H > 1 << 24 else normal
    x = draw((T, H), dtype, device, seed)
    if not r:
        return (x,)
    a, b = normal((r, H), dtype, device, seed + 1), normal((VOCABULARIES[H], r), dtype, device, seed + 2)
    return x, a.mul_(H**-0.5), b.mul_(r**-0.5)


@lru_cache(maxsize=1)
def head(H: int, dtype: torch.dtype, device: str) -> Tensor:
    """``[V, H]`` of normal values with a head's usual spread, drawn in bf16 whatever the dtype."""
    shape = (VOCABULARIES[H], H)
    draw = normal_on_device if shape[0] * H > 1 << 24 else normal
    return draw(shape, torch.bfloat16, device, SEED).mul_(SPREAD).to(dtype)


def labels(T: int, H: int, device: str) -> Tensor:
    """``[T]`` labels; a few are ignored."""
    generator = torch.Generator().manual_seed(SEED + 1)
    found = torch.randint(0, VOCABULARIES[H], (T,), generator=generator)
    found[2::IGNORED_EVERY] = IGNORED
    return found.to(device)


def data(x: Tensor) -> tuple[Tensor, Tensor]:
    """Head and labels for an input."""
    T, H = x.shape
    return head(H, x.dtype, str(x.device)), labels(T, H, str(x.device))


def fused(x: Tensor, *lora: Tensor) -> tuple[Tensor, ...]:
    """The operator; LoRA's factors learn where given."""
    settings: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "mean", "lora_scale": LORA_SCALE}
    return (op.linear_cross_entropy(x, *data(x), *lora, **settings),)


def reference(x: Tensor, *lora: Tensor) -> tuple[Tensor, ...]:
    settings: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "mean", "lora_scale": LORA_SCALE}
    return (linear_cross_entropy_reference(x, *data(x), *lora, **settings),)


def products_only(x: Tensor) -> tuple[Tensor, ...]:
    """The two matrix products of every chunk and nothing else: what the vendor's library leaves to win."""
    weight, _ = data(x)
    T, V = x.shape[0], weight.shape[0]
    C = configs.chunk_rows(T, V, x.element_size())
    logits, dx = x.new_empty((C, configs.stride(V))), torch.empty_like(x)
    for start in range(0, T, C):
        piece = slice(start, min(start + C, T))
        rows = logits[: piece.stop - start, :V]
        torch.mm(x[piece], weight.t(), out=rows)
        torch.mm(rows, weight, out=dx[piece])
    return (dx,)


def liger() -> Function:
    """Liger's fused head and loss, with the head frozen."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction

    def run(x: Tensor) -> tuple[Tensor, ...]:
        found = function.apply(x, *data(x))
        return (found[0] if isinstance(found, tuple) else found,)

    return run


def extras(case: BenchCase, name: str) -> dict[str, Run]:
    """The two products alone beside the training pass; and ours without LoRA where the case has it."""
    if name != "fwd+dx":
        return {}
    (x,) = inputs({**case.shape, "r": 0}, case.dtype, "cuda", SEED)
    found: dict[str, Run] = {"products": lambda: products_only(x)}
    if case.shape.get("r"):
        bare = replace(case, shape={key: size for key, size in case.shape.items() if key != "r"})
        found["without_lora"] = timed_pass(SUITE, bare, SUITE.fused, name)
    return found


def rivals() -> dict[str, Any]:
    """Eager torch, and Liger where it is installed."""
    found: dict[str, Any] = {"eager": lambda: reference}
    return {**found, "liger": liger} if find_spec("liger_kernel") else found


def compile_cases() -> tuple[AnyCase, ...]:
    """Every launch at every shipped vocabulary, in bf16: with gradients, and the loss alone."""
    found: list[LaunchCase] = []
    for V in COMPILE_VOCABULARIES:
        for gradient in (True, False):
            with recorded() as launches:
                x, head_like, marks = meta((LARGE["T"], 7168)), meta((V, 7168)), meta((LARGE["T"],), torch.int64)
                seen = walk(
                    x,
                    head_like,
                    marks,
                    None,
                    None,
                    ignore_index=IGNORED,
                    mean=True,
                    x_gradient=gradient,
                    lora_gradient=False,
                )
                if seen.dx is not None:
                    for per_row in (False, True):
                        scale = meta((x.shape[0] if per_row else 1,), torch.float32)
                        scaled(seen.dx, scale, seen.factors, x.dtype, per_row=per_row)
            kind = "gradient" if gradient else "loss"
            found += [case.named(f"{case.name}/{V}/{kind}") for case in launches]
    found = list(noted(found, narrow={"count_targets_kernel": "one program reads T labels of 8 bytes"}))
    return tuple(case for at, case in enumerate(found) if not any(case.same_as(other) for other in found[:at]))


def tune_cases() -> tuple[TuneCase, ...]:
    """The loss pass over one chunk of logits at every shipped vocabulary."""
    return tuple(_tune_case(V) for V in COMPILE_VOCABULARIES)


def _tune_case(V: int) -> TuneCase:
    rows = configs.chunk_rows(LARGE["T"], V, 2)

    def prepare() -> tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]:
        source = normal_on_device((rows, configs.stride(V)), torch.bfloat16, "cuda", SEED)
        targets = torch.arange(rows, device="cuda") % V
        logits, losses = source.clone(), torch.empty(rows, device="cuda")
        factors = torch.ones(2, device="cuda")
        few = source[:8, :V].double()
        exact = few.softmax(-1) - torch.nn.functional.one_hot(targets[:8], V)
        loss = torch.nn.functional.cross_entropy(few, targets[:8], reduction="none")

        def run() -> None:
            logits.copy_(source)
            loss_pass(logits, targets, factors, losses, V, IGNORED, True)

        return run, lambda: [(logits[:8, :V], exact), (losses[:8], loss)]

    with tuned.on(None):
        default = configs.loss(V)
    choices = tuple(
        configs.LossLaunch(groups, warps)
        for groups in (256, 512, 1024, 2048)
        for warps in (4, 8, 16, 32)
        if 32 * warps <= groups and configs.WIDTH * groups <= 2 * configs.stride(V)
    )
    return TuneCase("cross_entropy", tuned.bucket(V=V), default, choices, prepare)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    x, weight = torch.ones((3, 16), device=device), torch.ones((5, 16), device=device)
    marks = torch.zeros(3, dtype=torch.int64, device=device)
    a, b = torch.ones((2, 16), device=device), torch.ones((5, 2), device=device)
    loss = op.linear_cross_entropy

    def bad_label() -> None:
        loss(x, weight, marks + 5)
        labels_seen(wait=True)

    return (
        BadInput("label-out-of-range", "label-out-of-range", bad_label),
        BadInput("labels-of-int32", "dtype-unsupported", lambda: loss(x, weight, marks.int())),
        BadInput("labels-of-another-count", "wrong-shape", lambda: loss(x, weight, marks[:2])),
        BadInput("labels-with-gaps", "not-contiguous", lambda: loss(x, weight, marks.repeat(2)[::2])),
        BadInput("head-of-another-width", "wrong-shape", lambda: loss(x, weight[:, :8], marks)),
        BadInput("head-of-another-dtype", "dtype-mixed", lambda: loss(x, weight.bfloat16(), marks)),
        BadInput("head-with-gaps", "not-contiguous", lambda: loss(x, weight.repeat(1, 2)[:, ::2], marks)),
        BadInput("head-learns", "weight-learns", lambda: loss(x, weight.clone().requires_grad_(), marks)),
        BadInput("one-lora-factor", "lora-incomplete", lambda: loss(x, weight, marks, a)),
        BadInput("ranks-differ", "wrong-shape", lambda: loss(x, weight, marks, a, b[:, :1])),
    )


SMALL: tuple[Shape, ...] = (
    {"T": 13, "H": 96, "V": 301},
    {"T": 9, "H": 33, "V": 64},
    {"T": 2, "H": 64, "V": 7},
    {"T": 5, "H": 16, "V": 3},
)
LARGE_SHAPES: tuple[Shape, ...] = (
    {"T": 1031, "H": 2048, "V": 32_003},
    {"T": 4097, "H": 576, "V": 49_152},
    {"T": 1300, "H": 7168, "V": 163_840},
)


def _suite(lora: bool) -> OpSuite:
    prefix, rank, small = ("linear-ce-lora", {"r": RANK}, {"r": 3}) if lora else ("linear-ce", {}, {})
    return OpSuite(
        op="linear_cross_entropy",
        inputs=inputs,
        input_names=("x", "lora_a", "lora_b") if lora else ("x",),
        output_names=("loss",),
        frozen=(),
        fused=fused,
        reference=reference,
        cost=cost,
        forward_cost=loss_cost,
        rivals={"eager": lambda: reference} if lora else rivals(),
        small_shapes=tuple({**shape, **small} for shape in SMALL),
        large_shapes=tuple({**shape, **rank} for shape in LARGE_SHAPES),
        bench=(BenchCase(f"{prefix}/8k", {**LARGE, **rank}, torch.bfloat16, ("fwd+dx", "fwd")),),
        compile_cases=compile_cases,
        extras=extras,
        tune=None if lora else tune_cases,
        bad_inputs=None if lora else bad_inputs,
    )


SUITE, LORA_SUITE = _suite(False), _suite(True)
