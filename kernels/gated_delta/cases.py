"""How Gated DeltaNet is verified, timed and compiled.

Legend: T tokens of all documents, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, Function, OpSuite, Shape
from shardwright.kernels.compile_gate import LaunchCase
from shardwright.kernels.gated_delta import op
from shardwright.kernels.gated_delta.cost import cost
from shardwright.kernels.gated_delta.reference import gated_delta_chunk_reference
from shardwright.kernels.kda import cases as kda_cases
from shardwright.kernels.kda.cases import INPUT_NAMES, PASSES, SEED, documents_of
from shardwright.kernels.launched import cases_of, meta, noted


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """As KDA's with one gate for a head: the first channel's."""
    q, k, v, g, beta, A_log, dt_bias, state = kda_cases.inputs(shape, dtype, device, seed)
    return q, k, v, g[..., 0].contiguous(), beta, A_log, dt_bias[:, 0].contiguous(), state


def fused(*tensors: Tensor) -> tuple[Tensor, ...]:
    o, final = op.gated_delta(*tensors, cu_seqlens=documents_of(tensors[0], tensors[7]), output_final_state=True)
    assert final is not None
    return o, final


def reference(*tensors: Tensor) -> tuple[Tensor, ...]:
    return gated_delta_chunk_reference(*tensors, cu_seqlens=documents_of(tensors[0], tensors[7]))


def flash_linear_attention() -> Function:
    """``chunk_gated_delta_rule`` with the gate, and where its version takes them normalisation and grouped heads."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor
    ) -> tuple[Tensor, ...]:
        bounds, groups = documents_of(q, state), v.shape[2] // q.shape[2]
        packed = None if len(bounds) == 2 else torch.tensor(bounds, dtype=torch.int64, device=q.device)
        decay = -A_log.exp() * torch.nn.functional.softplus(g.float() + dt_bias)
        wide = [t.repeat_interleave(groups, dim=2) for t in (q, k)] if groups > 1 else [q, k]
        found = rule(
            *wide,
            v,
            g=decay,
            beta=beta.sigmoid(),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=packed,
        )
        return (found[0], found[1])

    return run


def rivals() -> Mapping[str, Callable[[], Function]]:
    """None where the package is missing."""
    return {"fla": flash_linear_attention} if find_spec("fla") else {}


def compile_cases() -> tuple[LaunchCase, ...]:
    """Every kernel of both passes at the benchmark's widths."""
    drawn = inputs({"T": 256, "H": 16, "HV": 32, "K": 128, "V": 128}, torch.bfloat16, "meta", SEED)[:7]
    learning = [meta(tuple(t.shape), t.dtype, learns=True) for t in drawn]
    return noted(cases_of("gated_delta", lambda: op.gated_delta(*learning)[0]), spills=SPILLS)


SPILLS: Mapping[str, tuple[int, str]] = {
    "scalar_keys_kernel": (
        128,
        "on one H200, T 8192 and H 32, forward and backward: 2.76 ms with these spills, 3.02 without (64 columns in 8 "
        "warps)",
    ),
}


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    good = dict(zip(INPUT_NAMES, inputs({"T": 5, "H": 2, "K": 64, "V": 64}, torch.float32, device, SEED), strict=True))

    def call(code: str, name: str, changed: Mapping[str, Tensor | None] | None = None, **settings: Any) -> BadInput:
        given: dict[str, Any] = {**good, **(changed or {})}
        return BadInput(name, code, lambda: op.gated_delta(**given, **settings))

    outside = {"A_log": None, "dt_bias": None}
    return (
        call("wrong-shape", "decay-of-channels", {"g": good["g"][..., None].repeat(1, 1, 1, 64)}),
        call("wrong-shape", "bias-of-channels", {"dt_bias": good["dt_bias"][:, None].repeat(1, 64)}),
        call("head-ratio", "heads-do-not-divide", {name: good[name][:, :, :1].repeat(1, 1, 3, 1) for name in "qk"}),
        call("no-tokens", "no-tokens", {name: good[name][:, :0] for name in ("q", "k", "v", "g", "beta")}),
        call("unknown-gate", "bounded-gate", gate="bounded"),
        call("gate-incomplete", "gate-without-bias", {"dt_bias": None}),
        call("gate-positive", "growing-state", {**outside, "g": good["g"].abs()}, gate="given"),
        call("bad-documents", "bounds-that-fall", cu_seqlens=(0, 4, 3, 5)),
    )


def _case(name: str, T: int, docs: int = 1) -> BenchCase:
    shape = {"T": T, "H": 16, "HV": 32, "K": 128, "V": 128, "docs": docs}
    return BenchCase(f"gated-delta/{name}", shape, torch.bfloat16, PASSES)


SUITE = OpSuite(
    op="gated_delta",
    inputs=inputs,
    input_names=INPUT_NAMES,
    output_names=("o", "final_state"),
    frozen=("A_log", "dt_bias"),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals=rivals(),
    small_shapes=({"T": 70, "H": 1, "HV": 2, "K": 64, "V": 64, "docs": 3},),
    large_shapes=(
        {"T": 1000, "H": 16, "HV": 32, "K": 128, "V": 128, "docs": 7},
        {"T": 1040, "H": 32, "HV": 64, "K": 256, "V": 128, "docs": 9},
        {"T": 320, "H": 8, "HV": 16, "K": 128, "V": 256},
    ),
    bench=(_case("T8k", 8192), _case("T32k", 32768), _case("varlen", 65536, docs=32)),
    compile_cases=compile_cases,
    dtypes=(torch.bfloat16,),
    bad_inputs=bad_inputs,
)
