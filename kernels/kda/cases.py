"""How KDA is verified, timed and compiled.

Legend: T tokens of all documents, H key heads, HV value heads, K, V widths, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.cases import BadInput, BenchCase, OpSuite, Run, Shape, normal, normal_on_device
from shardwright.kernels.compile_gate import LaunchCase
from shardwright.kernels.kda import op
from shardwright.kernels.kda.cost import cost
from shardwright.kernels.kda.reference import kda_chunk_reference
from shardwright.kernels.kda.rivals import rivals
from shardwright.kernels.kda.step import kda_step
from shardwright.kernels.launched import cases_of, meta, noted
from shardwright.kernels.passes import timed_pass

INPUT_NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
PASSES = ("fwd", "fwd+bwd")
SPREADS: Mapping[str, float] = {"g": 2.0, "beta": 2.0, "A_log": 0.5, "initial_state": 0.1}
"""Spreads of inputs other than 1: gates from open to saturated, betas from near 0 to near 1."""

SEED = 29
WIDE = {"K": 128, "V": 128}


def bounds(T: int, docs: int) -> tuple[int, ...]:
    """Bounds of ``docs`` documents of uneven lengths, the second of them empty where there are more than two."""
    if docs == 1:
        return (0, T)
    weights = torch.rand(docs, generator=torch.Generator().manual_seed(SEED)) * 15 + 1
    if T < 4096 and docs > 2:
        weights[1] = 0
    cuts = (weights.cumsum(0) / weights.sum() * T).long().tolist()
    return (0, *cuts[:-1], T)


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    T, H, K, V = (shape[name] for name in ("T", "H", "K", "V"))
    HV = shape.get("HV", H)
    sizes: dict[str, tuple[int, ...]] = {
        "q": (1, T, H, K),
        "k": (1, T, H, K),
        "v": (1, T, HV, V),
        "g": (1, T, HV, K),
        "beta": (1, T, HV),
        "A_log": (HV,),
        "dt_bias": (HV, K),
        "initial_state": (shape.get("docs", 1), HV, K, V),
    }
    found = []
    for at, name in enumerate(INPUT_NAMES):
        kind = torch.float32 if name in ("A_log", "dt_bias", "initial_state") else dtype
        draw = normal_on_device if T * HV * K > 1 << 24 else normal
        found.append(draw(sizes[name], kind, device, seed + at).mul_(SPREADS.get(name, 1.0)))
    return tuple(found)


def documents_of(q: Tensor, state: Tensor) -> Sequence[int]:
    """Bounds of the documents that an initial state counts."""
    return bounds(q.shape[1], state.shape[0])


def _suite(gate: str, small: tuple[Shape, ...], large: tuple[Shape, ...], bench: tuple[BenchCase, ...]) -> OpSuite:
    def fused(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, state = tensors[0], tensors[7]
        o, final = op.kda(*tensors, gate=gate, cu_seqlens=documents_of(q, state), output_final_state=True)
        assert final is not None
        return o, final

    def reference(*tensors: Tensor) -> tuple[Tensor, ...]:
        return kda_chunk_reference(*tensors, gate=gate, cu_seqlens=documents_of(tensors[0], tensors[7]))

    def kept(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, state = tensors[0], tensors[7]
        o, final = op.kda(*tensors, gate=gate, cu_seqlens=documents_of(q, state), output_final_state=True, keep=True)
        assert final is not None
        return o, final

    def extras(case: BenchCase, name: str) -> Mapping[str, Run]:
        """The pass whose backward finds what the forward made, as under activation checkpointing."""
        return {"kept": timed_pass(suite, case, kept, name)} if name == "fwd+bwd" else {}

    def compile_cases() -> tuple[LaunchCase, ...]:
        """Every kernel of both passes at the benchmark's widths, with spills where they are the faster choice."""
        learning = [
            meta(tuple(t.shape), t.dtype, learns=True)
            for t in inputs({"T": 256, "H": 32, **WIDE}, torch.bfloat16, "meta", SEED)[:7]
        ]
        found = cases_of(f"kda/{gate}", lambda: op.kda(*learning, gate=gate)[0])
        if gate == "bounded":
            sizes = {"T": 130, "H": 16, "K": 256, "V": 128}
            wide = [
                meta(tuple(t.shape), t.dtype, learns=True)
                for t in inputs(sizes, torch.bfloat16, "meta", SEED)[: len(learning)]
            ]
            sound = ("kda_pairs_kernel", "kda_widths_kernel", "kda_scan_kernel", "kda_reverse_kernel")
            found += tuple(
                case
                for case in cases_of("kda/wide", lambda: op.kda(*wide, gate=gate)[0])
                if case.kernel.fn.__name__ in sound
            )
            with patch.object(device, "capability", lambda tensor: (8, 0)):
                found += tuple(
                    case
                    for case in cases_of("kda/portable", lambda: op.kda(*learning, gate=gate)[0])
                    if case.kernel.fn.__name__ == "kda_keys_kernel"
                )
            few = [meta((1, 8192, 4, *t.shape[3:]), t.dtype, learns=True) for t in learning[:5]]
            gates = [meta((4, *t.shape[1:]), t.dtype, learns=True) for t in learning[5:]]
            found += cases_of("kda/pieces", lambda: op.kda(*few, *gates, gate=gate)[0])
            given = inputs({"T": 1, "H": 32, **WIDE}, torch.bfloat16, "meta", SEED)
            found += cases_of("kda/step", lambda: kda_step(*given, gate=gate))
        return noted(found, spills=SPILLS)

    suite = OpSuite(
        op="kda",
        inputs=inputs,
        input_names=INPUT_NAMES,
        output_names=("o", "final_state"),
        frozen=("A_log", "dt_bias"),
        fused=fused,
        reference=reference,
        cost=cost,
        rivals=rivals(gate, _packed),
        small_shapes=small,
        large_shapes=large,
        bench=bench,
        compile_cases=compile_cases,
        dtypes=(torch.bfloat16,),
        bad_inputs=bad_inputs if gate == "bounded" else None,
        extras=extras,
    )
    return suite


SPILLS: Mapping[str, tuple[int, str]] = {
    "kda_pairs_kernel": (
        192,
        "softplus gate; on one H200, T 8192 and H 32: 0.30 ms with these spills, 0.39 with 32 channels; a second warp "
        "would repeat the products of 16 x 16 blocks",
    ),
    "kda_keys_hopper_kernel": (
        160,
        "255 registers let two programs share a multiprocessor, as their shared memory does; on one H200, T 8192 and H "
        "32: 0.87 ms without a limit, 1.20 with 168 registers (before its tiles were copied ahead)",
    ),
}


def _packed(q: Tensor, state: Tensor) -> tuple[Tensor, Sequence[int]] | None:
    found = documents_of(q, state)
    if len(found) == 2:
        return None
    return torch.tensor(found, dtype=torch.int64, device=q.device), found


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    good = dict(zip(INPUT_NAMES, inputs({"T": 5, "H": 2, "K": 64, "V": 64}, torch.float32, device, SEED), strict=True))

    def call(code: str, name: str, changed: Mapping[str, Tensor | None] | None = None, **settings: Any) -> BadInput:
        given: dict[str, Any] = {**good, **(changed or {})}
        return BadInput(name, code, lambda: op.kda(**given, **settings))

    outside = {"A_log": None, "dt_bias": None}
    return (
        call("head-ratio", "heads-do-not-divide", {name: good[name][:, :, :1].repeat(1, 1, 3, 1) for name in "qk"}),
        call("no-tokens", "no-tokens", {name: good[name][:, :0] for name in ("q", "k", "v", "g", "beta")}),
        call("wrong-shape", "one-decay-for-all-channels", {"g": good["g"][..., :1].contiguous()}),
        call("wrong-shape", "decay-without-channels", {"g": good["g"][..., 0].contiguous()}),
        call("wrong-shape", "state-of-another-count", {"initial_state": good["initial_state"].repeat(2, 1, 1, 1)}),
        call("width-unsupported", "odd-width", {name: good[name][..., :33].contiguous() for name in ("q", "k", "g")}
             | {"dt_bias": good["dt_bias"][:, :33].contiguous(),
                "initial_state": good["initial_state"][:, :, :33].contiguous()}),
        call("dtype-unsupported", "fp16", {name: good[name].half() for name in "qkv"}),
        call("bad-documents", "bounds-that-fall", cu_seqlens=(0, 4, 3, 5)),
        call("bad-documents", "bounds-that-end-early", cu_seqlens=torch.tensor([0, 4])),
        call("bad-documents", "bounds-of-fractions", cu_seqlens=torch.tensor([0.0, 5.0])),
        call("unknown-gate", "unknown-gate", gate="tanh"),
        call("bad-bound", "bound-below-the-lowest", lower_bound=-8.0),
        call("bad-bound", "bound-above-zero", lower_bound=1.0),
        call("gate-incomplete", "gate-without-bias", {"dt_bias": None}),
        call("gate-incomplete", "decay-beside-parameters", gate="given"),
        call("gate-positive", "growing-state", {**outside, "g": good["g"].abs()}, gate="given"),
        call("gate-positive", "decay-is-nan", {**outside, "g": good["g"] * float("nan")}, gate="given"),
    )  # fmt: skip


def _case(name: str, T: int, H: int, docs: int = 1) -> BenchCase:
    return BenchCase(f"kda/{name}", {"T": T, "H": H, **WIDE, "docs": docs}, torch.bfloat16, PASSES)


# With wide keys the gradient of a final state outweighs that of the outputs, and decays within a few tokens: one
# document of 16 heads would be judged by about 16 numbers, whose rounding is a matter of luck. Nine documents are not.
SUITE = _suite(
    "bounded",
    small=({"T": 70, "H": 1, "HV": 2, "K": 64, "V": 64, "docs": 3},),
    large=(
        {"T": 1000, "H": 16, "K": 128, "V": 128, "docs": 7},
        {"T": 320, "H": 8, "HV": 16, "K": 128, "V": 256},
        {"T": 1040, "H": 16, "K": 256, "V": 128, "docs": 9},
    ),
    bench=(
        _case("T8k-H32", 8192, 32),
        _case("T32k-H32", 32768, 32),
        _case("T64k-H32", 65536, 32),
        _case("T8k-H96", 8192, 96),
        _case("T32k-H96", 32768, 96),
        _case("varlen", 65536, 32, docs=32),
    ),
)
SOFTPLUS_SUITE = _suite(
    "softplus",
    small=({"T": 66, "H": 2, "K": 64, "V": 64},),
    large=({"T": 300, "H": 16, "K": 128, "V": 128},),
    bench=(_case("T8k-H32-softplus", 8192, 32), _case("T32k-H32-softplus", 32768, 32)),
)
