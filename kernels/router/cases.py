"""How the router is verified, timed and compiled.

The number of experts names the model's settings, so the only input is the logits.

Legend: T tokens, E experts, k chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

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
    row_facts,
)
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.launched import cases_of, meta, noted
from shardwright.kernels.passes import SEED as PASS_SEED
from shardwright.kernels.router import compute, configs, op
from shardwright.kernels.router.compute import Settings
from shardwright.kernels.router.cost import cost
from shardwright.kernels.router.reference import router_reference

SETTINGS = {
    (896, 16): (Settings(16, "sigmoid", 1, 1, "top2", True, 2.5), True),
    (896, 22): (Settings(22, "sigmoid", 1, 1, "top2", True, 2.5), True),
    (384, 8): (Settings(8, "sigmoid", 1, 1, "top2", True, 2.5), True),
    (256, 8): (Settings(8, "sigmoid", 8, 4, "top2", True, 2.5), True),
    (160, 6): (Settings(6, "softmax", 8, 3, "max", False, 16.0), False),
    (128, 8): (Settings(8, "softmax", 1, 1, "top2", True, 1.0), False),
    (128, 6): (Settings(6, "sigmoid", 1, 1, "top2", True, 1.0), True),
    (60, 4): (Settings(4, "softmax", 1, 1, "top2", False, 1.0), False),
    (22, 22): (Settings(22, "sigmoid", 1, 1, "top2", True, 1.0), True),
    (5, 2): (Settings(2, "softmax", 1, 1, "top2", True, 1.0), True),
}
"""(Experts, k) → the router's settings, and whether a bias picks. (896, 16): Kimi K3; (256, 8): DeepSeek V3;
(160, 6): V2; (128, 8): Qwen3-MoE."""

CHOSEN = {(3, 896): 22, (2048, 896): 22, (5, 128): 6}
"""(T, E) of the cases that take another than the first k with so many experts."""


def settings_of(logits: Tensor) -> tuple[Settings, Tensor | None]:
    """The settings and bias of a case: its sizes name them."""
    T, E = logits.shape
    k = CHOSEN.get((T, E), next(k for experts, k in SETTINGS if experts == E))
    settings, biased = SETTINGS[E, k]
    return settings, bias_of(E, str(logits.device)) if biased else None


WIDE_ROW, SHORT_ROW = 256, "32 threads share a row of fewer than 256 values: less than 16 bytes each"
BIAS_SPREAD = 0.1
SEED = 13


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    return (normal((shape["T"], shape["E"]), dtype, device, seed),)


@lru_cache(maxsize=8)
def bias_of(E: int, device: str) -> Tensor:
    """fp32 ``[E]``, as models store it."""
    return normal((E,), torch.float32, device, SEED) * BIAS_SPREAD


def fused(logits: Tensor) -> tuple[Tensor, ...]:
    settings, bias = settings_of(logits)
    return tuple(op.router(logits, bias, **settings._asdict()))


def reference(logits: Tensor) -> tuple[Tensor, ...]:
    settings, bias = settings_of(logits)
    weights, experts, counts, mean = router_reference(logits, bias, **settings._asdict())
    return weights, experts, counts.to(torch.int32), mean


def library(logits: Tensor) -> tuple[Tensor, ...]:
    """What model code does, with torch.topk, and the statistics beside it; ties in arbitrary order."""
    return library_router(logits, *settings_of(logits))


def library_router(logits: Tensor, settings: Settings, bias: Tensor | None) -> tuple[Tensor, ...]:
    """``library`` with its settings given, so that a tracer sees torch operations alone."""
    E = logits.shape[1]
    wide = logits.float()
    score = wide.softmax(-1) if settings.scoring == "softmax" else wide.sigmoid()
    rank = score if bias is None else score + bias
    if settings.groups > 1:
        members = rank.view(-1, settings.groups, E // settings.groups)
        value = members.amax(-1) if settings.group_score == "max" else members.topk(2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(value).scatter_(1, value.topk(settings.groups_kept, dim=-1, sorted=False)[1], 1)
        rank = rank.masked_fill(~kept.bool().repeat_interleave(E // settings.groups, dim=1), float("-inf"))
    experts = rank.topk(settings.k, dim=-1)[1]
    weights = score.gather(1, experts)
    if settings.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    share = score if settings.scoring == "softmax" else score / score.sum(-1, keepdim=True)
    counts = torch.histc(experts.reshape(-1).int(), bins=E, min=0, max=E)
    return weights * settings.scale, experts, counts.int(), share.mean(0)


def compiled() -> Function:
    traced = torch.compile(library_router, dynamic=False)
    return lambda logits: traced(logits, *settings_of(logits))


def facts(case: BenchCase) -> dict[str, float]:
    """The distribution of tokens over experts that the case's logits give."""
    (logits,) = inputs(case.shape, case.dtype, "cuda", PASS_SEED)
    return row_facts(fused(logits)[2])


def compile_cases() -> tuple[AnyCase, ...]:
    """Every launch at every entry of the settings table, in bf16 logits."""
    found: list[AnyCase] = []
    for (E, k), (settings, biased) in SETTINGS.items():
        bias = meta((E,), torch.float32) if biased else None

        def call(E: int = E, bias: Tensor | None = bias, settings: Settings = settings) -> tuple[Tensor, ...]:
            made = op.router(meta((8192, E), learns=True), bias, **settings._asdict())
            return made.weights, made.mean_probability

        launches = cases_of(f"router/{E}e{k}", call)
        short = ("router_fwd_kernel", "router_bwd_kernel", *(("router_mean_kernel",) if E % 16 else ()))
        found += noted(launches, narrow=dict.fromkeys(short, SHORT_ROW)) if E < WIDE_ROW else launches
    return tuple(found)


def tune_cases() -> tuple[TuneCase, ...]:
    """Both passes of the benchmark's cases."""
    return tuple(_tune_case(case, backward) for case in SUITE.bench for backward in (False, True))


def _tune_case(case: BenchCase, backward: bool) -> TuneCase:
    def prepare() -> tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]:
        (logits,) = inputs(case.shape, case.dtype, "cuda", PASS_SEED)
        settings, bias = settings_of(logits)
        few = logits[:64].double().requires_grad_()
        weights, _, _, _ = router_reference(few, bias, **settings._asdict())
        got: dict[str, Tensor] = {}
        if not backward:

            def forward() -> None:
                got["weights"] = compute.compute_forward(logits, bias, settings).weights[:64]

            return forward, lambda: [(got["weights"], weights.detach())]
        chosen = compute.compute_forward(logits, bias, settings).experts
        dweights = normal_on_device(tuple(chosen.shape), torch.float32, "cuda", PASS_SEED + 1)
        (exact,) = torch.autograd.grad(weights, few, dweights[:64].double())

        def gradient() -> None:
            got["dlogits"] = compute.compute_backward(dweights, None, logits, chosen, settings)[:64]

        return gradient, lambda: [(got["dlogits"], exact)]

    sizes = {name: case.shape[name] for name in ("T", "E", "k")}
    choices = tuple(configs.RowLaunch(warps, programs) for warps in (1, 2, 4) for programs in (4, 8, 16, 32))
    kernel = "router_bwd" if backward else "router_fwd"
    return TuneCase(kernel, tuned.bucket(**sizes), configs.DEFAULT, choices, prepare)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    logits = torch.zeros((3, 64), device=device)
    run = op.router
    return (
        BadInput("one-row-too-few-dims", "wrong-shape", lambda: run(logits[0], k=4)),
        BadInput("bias-of-other-experts", "wrong-shape", lambda: run(logits, logits[0, :63].contiguous(), k=4)),
        BadInput("bias-with-gaps", "not-contiguous", lambda: run(logits, torch.zeros(128, device=device)[::2], k=4)),
        BadInput("more-experts-than-a-warp-holds", "too-many-experts", lambda: run(logits.repeat(1, 17), k=4)),
        BadInput("more-chosen-than-experts", "bad-top-k", lambda: run(logits[:, :3].contiguous(), k=4)),
        BadInput("groups-that-do-not-divide", "bad-groups", lambda: run(logits, k=4, groups=3, groups_kept=1)),
        BadInput("too-few-in-kept-groups", "bad-top-k", lambda: run(logits, k=20, groups=4, groups_kept=1)),
        BadInput("unknown-scoring", "bad-scoring", lambda: run(logits, k=4, scoring="tanh")),
        BadInput("scale-is-nan", "bad-scale", lambda: run(logits, k=4, scale=float("nan"))),
    )


def _shapes(*sizes: tuple[int, int]) -> tuple[Shape, ...]:
    return tuple({"T": T, "E": E, "k": settings_of(torch.empty((T, E), device="meta"))[0].k} for T, E in sizes)


SUITE = OpSuite(
    op="router",
    inputs=inputs,
    input_names=("logits",),
    output_names=("weights", "experts", "counts", "mean_probability"),
    frozen=(),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={"eager": lambda: library, "torch.compile": compiled},
    small_shapes=_shapes((5, 60), (7, 256), (3, 160), (3, 5), (4, 22), (5, 128), (3, 896), (0, 60)),
    large_shapes=_shapes((4099, 896), (2048, 896), (8191, 128), (2047, 384), (1025, 256)),
    bench=tuple(
        BenchCase(f"router/{E}e{k}", {"T": 8192, "E": E, "k": k}, dtype, ("fwd", "fwd+dx"))
        for E, k, dtype in ((896, 16, torch.float32), (256, 8, torch.float32), (128, 8, torch.bfloat16))
    ),
    compile_cases=compile_cases,
    index_slack=8,
    facts=facts,
    tune=tune_cases,
    bad_inputs=bad_inputs,
)
