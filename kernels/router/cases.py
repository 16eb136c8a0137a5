"""How the router is verified, timed and compiled.

The number of experts names the model's settings, so the only input is the logits.

Legend: T tokens, E experts, k chosen experts.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Shape, normal
from shardwright.kernels.compile_gate import CompileCase
from shardwright.kernels.router import configs, op
from shardwright.kernels.router.cost import cost
from shardwright.kernels.router.op import Settings
from shardwright.kernels.router.reference import router_reference
from shardwright.kernels.router.triton import router_bwd_kernel, router_fwd_kernel, router_mean_kernel

SETTINGS = {
    896: (Settings(16, "sigmoid", 1, 1, "top2", True, 2.5), True),
    384: (Settings(8, "sigmoid", 1, 1, "top2", True, 2.5), True),
    256: (Settings(8, "sigmoid", 8, 4, "top2", True, 2.5), True),
    160: (Settings(6, "softmax", 8, 3, "max", False, 16.0), False),
    128: (Settings(8, "softmax", 1, 1, "top2", True, 1.0), False),
    60: (Settings(4, "softmax", 1, 1, "top2", False, 1.0), False),
    22: (Settings(22, "sigmoid", 1, 1, "top2", True, 1.0), True),
    5: (Settings(2, "softmax", 1, 1, "top2", True, 1.0), True),
}
"""Experts → the router's settings, and whether a bias picks. 896: Kimi K3; 256: DeepSeek V3; 160: V2;
128: Qwen3-MoE."""

BIAS_SPREAD = 0.1
SEED = 13


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    return (normal((shape["T"], shape["E"]), dtype, device, seed),)


@lru_cache(maxsize=8)
def bias_of(E: int, device: str) -> Tensor | None:
    """fp32 ``[E]``, as models store it; none where the settings have none."""
    return normal((E,), torch.float32, device, SEED) * BIAS_SPREAD if SETTINGS[E][1] else None


def fused(logits: Tensor) -> tuple[Tensor, ...]:
    E = logits.shape[1]
    found = op.router(logits, bias_of(E, str(logits.device)), **SETTINGS[E][0]._asdict())
    return found.weights, found.mean_probability


def reference(logits: Tensor) -> tuple[Tensor, ...]:
    E = logits.shape[1]
    weights, _, _, mean = router_reference(logits, bias_of(E, str(logits.device)), **SETTINGS[E][0]._asdict())
    return weights, mean


def library(logits: Tensor) -> tuple[Tensor, ...]:
    """What model code does, with torch.topk, and the statistics beside it; ties in arbitrary order."""
    return library_router(logits, bias_of(logits.shape[1], str(logits.device)))


def library_router(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """``library`` with its bias given, so that a tracer sees torch operations alone."""
    E = logits.shape[1]
    settings = SETTINGS[E][0]
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
    torch.histc(experts.reshape(-1).int(), bins=E, min=0, max=E)
    return weights * settings.scale, share.mean(0)


def compiled() -> Function:
    traced = torch.compile(library_router, dynamic=False)
    return lambda logits: traced(logits, bias_of(logits.shape[1], str(logits.device)))


def compile_cases() -> tuple[CompileCase, ...]:
    """Every kernel at every settings table entry, in bf16."""
    found = []
    forward = {"logits_ptr": "*bf16", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "experts_ptr": "*i64"}
    forward |= {"counts_ptr": "*i32", "partial_ptr": "*fp32", "scale": "fp32", "T": "i32"}
    backward = {"logits_ptr": "*bf16", "experts_ptr": "*i64", "dweights_ptr": "*fp32", "dmean_ptr": "*fp32"}
    backward |= {"dlogits_ptr": "*bf16", "scale": "fp32", "T": "i32"}
    for E, (settings, biased) in SETTINGS.items():
        groups, members = configs.tile(E, settings.groups)
        shared = {"E": E, "K": settings.k, "SLOTS": configs.slots(settings.k), "RENORMALISE": settings.renormalise}
        shared["SOFTMAX"] = settings.scoring == "softmax"
        tile = {"G": settings.groups, "M": E // settings.groups, "GROUPS": groups, "MEMBERS": members}
        choice = {"KEPT": settings.groups_kept, "TOP2": settings.group_score == "top2", "BIASED": biased}
        pointers = tuple(name for name in forward if name.endswith("_ptr"))
        constants = {**shared, **tile, **choice}
        found.append(CompileCase(f"router_fwd/{E}", router_fwd_kernel, forward, constants, pointers, configs.WARPS))
        pointers = tuple(name for name in backward if name.endswith("_ptr"))
        constants = {**shared, "COLUMNS": configs.tile(E, 1)[1], "MEAN_GRADIENT": True}
        found.append(CompileCase(f"router_bwd/{E}", router_bwd_kernel, backward, constants, pointers, configs.WARPS))
    mean = {"partial_ptr": "*fp32", "mean_ptr": "*fp32", "P": "i32", "T": "i32", "E": "i32"}
    blocks = {"BLOCK_P": configs.MEAN_BLOCK_P, "BLOCK_E": configs.MEAN_BLOCK_E}
    pointers = ("partial_ptr", "mean_ptr")
    found.append(CompileCase("router_mean", router_mean_kernel, mean, blocks, pointers, configs.MEAN_WARPS))
    return tuple(found)


SUITE = OpSuite(
    op="router",
    inputs=inputs,
    input_names=("logits",),
    output_names=("weights", "mean_probability"),
    frozen=(),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={"eager": lambda: library, "torch.compile": compiled},
    small_shapes=tuple(
        {"T": T, "E": E, "k": SETTINGS[E][0].k} for T, E in ((5, 60), (7, 256), (3, 160), (3, 5), (4, 22))
    ),
    large_shapes=tuple({"T": T, "E": E, "k": SETTINGS[E][0].k} for T, E in ((4099, 896), (8191, 128), (2048, 384))),
    bench=tuple(
        BenchCase(
            f"router/{E}e{SETTINGS[E][0].k}", {"T": 8192, "E": E, "k": SETTINGS[E][0].k}, dtype, ("fwd", "fwd+dx")
        )
        for E, dtype in ((896, torch.float32), (256, torch.float32), (128, torch.bfloat16))
    ),
    compile_cases=compile_cases(),
)
