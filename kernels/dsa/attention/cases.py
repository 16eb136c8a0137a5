"""How sparse attention is verified, timed and compiled.

Four suites of one operator: the latent form with fp32 atomics; the same for its backward's time, which has no rival;
the latent form gated, with sinks and in fixed order; and the grouped form over blocks of keys. ``kind`` of a shape
says how its selection is drawn (``inputs``).

Legend: T queries, S keys, H query heads, G key heads, V width of the latent (of q, k, v in the grouped form), R
rotated width, K entries, B keys of an entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, OpSuite, Shape
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.dsa.attention import rivals
from shardwright.kernels.dsa.attention.cost import cost, pairs
from shardwright.kernels.dsa.attention.inputs import (
    BLOCK_OF,
    HOLES,
    SHARED,
    gated_inputs,
    grouped_inputs,
    latent_inputs,
)
from shardwright.kernels.dsa.attention.op import dsa_attention, sparse_gqa_attention
from shardwright.kernels.dsa.attention.reference import dsa_attention_reference, sparse_gqa_attention_reference
from shardwright.kernels.dsa.attention.visibility import bounds_of
from shardwright.kernels.launched import cases_of, meta, noted

SPILLS = {
    "hopper_forward_kernel": (512, "gate and rest of the output beside the accumulator, once a program"),
    "hopper_backward_kernel": (
        1536,
        "two groups of 255 registers are the whole register file; with smaller tiles the atomics are in the way more",
    ),
}


def _shown(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """o and lse, with 0 for the lse of a query without keys: infinities have no distance."""
    o, lse = pair
    return o, torch.where(lse == float("-inf"), 0.0, lse)


def _scale(width: int) -> float:
    return float(width) ** -0.5


def fused(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    """As the layers call it: an indexer's selection needs no check."""
    settings: dict[str, Any] = {"scale": _scale(q_nope.shape[2] + q_rope.shape[2]), "check_indices": False}
    return _shown(dsa_attention(q_nope, q_rope, latent, k_rope, indices, deterministic=False, **settings))


def reference(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    scale = _scale(q_nope.shape[2] + q_rope.shape[2])
    return _shown(dsa_attention_reference(q_nope, q_rope, latent, k_rope, indices, scale=scale))


def eager(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    return (rivals.eager(q_nope, q_rope, latent, k_rope, indices, _scale(q_nope.shape[2] + q_rope.shape[2])),)


def fused_gated(*inputs: Tensor) -> tuple[Tensor, ...]:
    scale = _scale(inputs[0].shape[2] + inputs[1].shape[2])
    return _shown(dsa_attention(*inputs, scale=scale, deterministic=True, check_indices=False))


def reference_gated(*inputs: Tensor) -> tuple[Tensor, ...]:
    return _shown(dsa_attention_reference(*inputs, scale=_scale(inputs[0].shape[2] + inputs[1].shape[2])))


def fused_grouped(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, gate: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
    settings: dict[str, Any] = {"scale": _scale(q.shape[2]), "block_size": BLOCK_OF[indices.shape[2]], "bounds": bounds}
    return _shown(sparse_gqa_attention(q, k, v, indices, gate, deterministic=False, check_indices=False, **settings))


def reference_grouped(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, gate: Tensor, bounds: Tensor
) -> tuple[Tensor, ...]:
    settings: dict[str, Any] = {"scale": _scale(q.shape[2]), "block_size": BLOCK_OF[indices.shape[2]], "bounds": bounds}
    return _shown(sparse_gqa_attention_reference(q, k, v, indices, gate, **settings))


def facts(case: BenchCase) -> dict[str, float]:
    """Pairs of query and key: what both passes' products run over."""
    return {"pairs": float(pairs(case.shape["T"], case.shape["S"], case.shape["K"]))}


def full(T: int, H: int) -> Shape:
    """The shape of DeepSeek-V3.2 and GLM-5: latent 512, rotated 64, top-2048."""
    return {"T": T, "H": H, "S": T, "K": 2048, "V": 512, "R": 64}


def bench(prefix: str, passes: tuple[str, ...]) -> tuple[BenchCase, ...]:
    return tuple(
        BenchCase(f"{prefix}/T{T // 1024}k-H{H}", full(T, H), torch.bfloat16, passes)
        for H in (64, 128)
        for T in (8192, 32_768)
    )


def compile_cases() -> tuple[AnyCase, ...]:
    """Training and inference at the model's sizes: Hopper's kernels and, in fixed order or few heads, the portable."""

    def call(H: int, *, learns: bool = True, gated: bool = False, deterministic: bool = False, block: int = 1) -> Any:
        T, K = 8192, 2048 // block
        sizes = ((T, H, 512), (T, H, 64), (T, 512), (T, 64))
        qn, qr, kn, kr = (meta(size, learns=learns) for size in sizes)
        gate, sinks = (meta((T, H, 512), learns=learns), meta((H,), learns=learns)) if gated else (None, None)
        bounds = meta((T, 2), torch.int32) if block > 1 else None
        settings: dict[str, Any] = {"scale": 0.1, "deterministic": deterministic, "check_indices": False}
        settings |= {"block_size": block, "bounds": bounds}
        return dsa_attention(qn, qr, kn, kr, meta((T, K), torch.int32), gate, sinks, **settings)

    found = (
        *cases_of("train", lambda: call(64)),
        *cases_of("inference", lambda: call(128, learns=False)),
        *cases_of("gated", lambda: call(64, gated=True)),
        *cases_of("ordered", lambda: call(64, deterministic=True)),
        *cases_of("few-heads", lambda: call(16)),
        *cases_of("blocks", lambda: call(16, block=64)),
    )
    distinct = [case for at, case in enumerate(found) if not any(case.same_as(other) for other in found[:at])]
    return noted(distinct, spills=SPILLS)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    T, H, S, V, R = 4, 2, 6, 16, 8
    q, r = torch.ones((T, H, V), device=device), torch.ones((T, H, R), device=device)
    k, kr = torch.ones((S, V), device=device), torch.ones((S, R), device=device)
    at = torch.tensor([[0, 1, -1]] * T, dtype=torch.int32, device=device)
    bounds = bounds_of(T, device, first_query=0, keys=S)

    def call(
        index: Tensor = at, *, q: Tensor = q, r: Tensor | None = r, k: Tensor = k, kr: Tensor | None = kr, **more: Any
    ) -> None:
        from shardwright.kernels.dsa.attention.selection import raise_pending

        dsa_attention(q, r, k, kr, index, **{"scale": 1.0, **more})
        raise_pending(wait=True)

    def changed(row: int, column: int, value: int) -> Tensor:
        found = at.clone()
        found[row, column] = value
        return found

    def threefold(tensor: Tensor) -> Tensor:
        return tensor[:, None].repeat(1, 3, 1)

    def narrow(tensor: Tensor) -> Tensor:
        return tensor[..., :6].contiguous()

    return (
        BadInput("index-past-the-keys", "index-out-of-range", lambda: call(changed(2, 1, S))),
        BadInput("index-below-minus-one", "index-out-of-range", lambda: call(changed(2, 1, -2))),
        BadInput("block-past-the-keys", "index-out-of-range", lambda: call(block_size=8, bounds=bounds)),
        BadInput("index-twice", "index-duplicated", lambda: call(changed(3, 2, 0))),
        BadInput("index-in-the-future", "index-not-visible", lambda: call(bounds=bounds)),
        BadInput("index-of-int64", "dtype-unsupported", lambda: call(at.long())),
        BadInput("index-of-another-count", "wrong-shape", lambda: call(at[:2])),
        BadInput("three-key-heads", "heads-unsupported", lambda: call(threefold(at), k=threefold(k), kr=threefold(kr))),
        BadInput("widths-differ", "wrong-shape", lambda: call(k=k[:, :8].contiguous())),
        BadInput("width-of-no-vector", "width-unsupported", lambda: call(q=narrow(q), k=narrow(k))),
        BadInput("rotated-queries-alone", "rope-unpaired", lambda: call(kr=None)),
        BadInput("rotated-keys-alone", "rope-unpaired", lambda: call(r=None)),
        BadInput("rotated-width-of-zero", "wrong-shape", lambda: call(r=r[..., :0], kr=kr[..., :0])),
        BadInput("block-of-three", "block-size-unsupported", lambda: call(block_size=3)),
        BadInput("too-many-selected", "too-many-selected", lambda: call(at.repeat(1, 6000))),
        BadInput("scale-is-nan", "bad-scale", lambda: call(scale=float("nan"))),
        BadInput("gate-of-another-shape", "wrong-shape", lambda: call(gate=q[:2].contiguous())),
        BadInput("sinks-of-another-count", "wrong-shape", lambda: call(sinks=torch.ones(3, device=device))),
        BadInput("bounds-of-another-count", "wrong-shape", lambda: call(bounds=bounds[:2])),
        BadInput("documents-unsorted", "cu-seqlens-unsorted", lambda: bounds_of(T, device, [0, 3, 2, 4])),
        BadInput("documents-too-short", "cu-seqlens-unsorted", lambda: bounds_of(T, device, [0, 3])),
    )  # fmt: skip


LATENT_NAMES = ("q_nope", "q_rope", "latent", "k_rope", "indices")


def _suite(**parts: Any) -> OpSuite:
    common: dict[str, Any] = {
        "op": "dsa_attention",
        "inputs": latent_inputs,
        "input_names": LATENT_NAMES,
        "output_names": ("o", "lse"),
        "frozen": (),
        "fused": fused,
        "reference": reference,
        "cost": cost,
        "rivals": {},
    }
    return OpSuite(**{**common, **parts})


ONE_QUERY: Shape = {"T": 1, "H": 64, "S": 300, "K": 200, "V": 512, "R": 64}
"""Each key gets one addition: even atomics give the same bits twice."""

SUITE = _suite(
    rivals={"eager": lambda: eager},
    small_shapes=(
        {"T": 7, "H": 5, "S": 9, "K": 4, "V": 32, "R": 16, "kind": HOLES},
        {"T": 0, "H": 2, "S": 3, "K": 2, "V": 16, "R": 8},
        {"T": 3, "H": 18, "S": 5, "K": 70, "V": 24, "R": 8},
        {"T": 5, "H": 2, "S": 6, "K": 3, "V": 16, "R": 8, "kind": SHARED},
        {"T": 4, "H": 4, "S": 9, "K": 5, "V": 32, "R": 16},
    ),
    large_shapes=(
        {"T": 300, "H": 64, "S": 300, "K": 150, "V": 512, "R": 64, "kind": HOLES},
        {"T": 192, "H": 128, "S": 500, "K": 256, "V": 512, "R": 64},
        {"T": 160, "H": 64, "S": 160, "K": 65, "V": 512, "R": 64, "kind": SHARED},
        {"T": 40, "H": 96, "S": 90, "K": 63, "V": 512, "R": 64},
        ONE_QUERY,
    ),
    bench=bench("dsa", ("fwd",)),
    compile_cases=compile_cases,
    bad_inputs=bad_inputs,
    facts=facts,
)

BACKWARD_SUITE = _suite(
    small_shapes=(
        {"T": 4, "H": 4, "S": 9, "K": 5, "V": 32, "R": 16},
        {"T": 0, "H": 2, "S": 3, "K": 2, "V": 16, "R": 8},
    ),
    large_shapes=(ONE_QUERY,),
    bench=bench("dsa", ("bwd",)),
    facts=facts,
)

GATED_SUITE = _suite(
    inputs=gated_inputs,
    input_names=(*LATENT_NAMES, "gate", "sinks"),
    fused=fused_gated,
    reference=reference_gated,
    small_shapes=(
        {"T": 6, "H": 3, "S": 7, "K": 4, "V": 32, "R": 16, "kind": HOLES},
        {"T": 0, "H": 2, "S": 3, "K": 2, "V": 16, "R": 8},
    ),
    large_shapes=(
        {"T": 200, "H": 64, "S": 300, "K": 150, "V": 512, "R": 64, "kind": HOLES},
        {"T": 160, "H": 64, "S": 160, "K": 64, "V": 512, "R": 64, "kind": SHARED},
    ),
    bench=(BenchCase("dsa-ordered/T8k-H64", full(8192, 64), torch.bfloat16, ("fwd", "bwd")),),
    facts=facts,
)

GROUPED_SUITE = _suite(
    inputs=grouped_inputs,
    input_names=("q", "k", "v", "indices", "gate", "bounds"),
    constant=(),
    fused=fused_grouped,
    reference=reference_grouped,
    small_shapes=(
        {"T": 5, "H": 4, "S": 40, "K": 2, "V": 16, "R": 0, "G": 2, "B": 16},
        {"T": 4, "H": 6, "S": 30, "K": 3, "V": 16, "R": 0, "G": 2, "B": 8},
        {"T": 5, "H": 4, "S": 8, "K": 6, "V": 16, "R": 0, "G": 2},
        {"T": 0, "H": 2, "S": 30, "K": 2, "V": 16, "R": 0, "G": 1, "B": 16},
    ),
    large_shapes=(
        {"T": 300, "H": 64, "S": 1100, "K": 5, "V": 128, "R": 0, "G": 4, "B": 64},
        {"T": 300, "H": 32, "S": 700, "K": 4, "V": 128, "R": 0, "G": 2, "B": 32},
    ),
    bench=(
        BenchCase(
            "dsa-gqa/T8k-H32-G2",
            {"T": 8192, "H": 32, "S": 8192, "K": 32, "V": 128, "R": 0, "G": 2, "B": 64},
            torch.bfloat16,
            ("fwd", "bwd"),
        ),
    ),
)
