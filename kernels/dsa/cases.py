"""How a layer of sparse attention is verified and timed, and how gated dense attention is.

Three suites of one operator: indexer and attention on absorbed inputs, beside dense attention at the same T; the front
door with its up-projection; and the front door without a selection.

Legend: T queries and keys, H heads, N indexer heads, D indexer width, K selected keys, V width of the latent, R
rotated width; of the front door P width of a key without its rotated part, U width of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, OpSuite, Run, Shape
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.dsa.attention import inputs as attention
from shardwright.kernels.dsa.attention.op import dsa_attention
from shardwright.kernels.dsa.attention.reference import dsa_attention_reference
from shardwright.kernels.dsa.attention.visibility import bounds_of
from shardwright.kernels.dsa.cost import cost
from shardwright.kernels.dsa.dense import gated_mla_attention, sigmoid_gate
from shardwright.kernels.dsa.indexer import rivals
from shardwright.kernels.dsa.indexer.cases import CHOSEN, draw, inputs, top_k
from shardwright.kernels.dsa.indexer.op import default_scale, dsa_indexer
from shardwright.kernels.dsa.indexer.reference import indexer_reference
from shardwright.kernels.dsa.indexer.rivals import SOFTMAX_WIDTH
from shardwright.kernels.dsa.op import latent_attention
from shardwright.kernels.dsa.reference import latent_attention_reference
from shardwright.kernels.dsa.up_projection import UpProjection
from shardwright.kernels.launched import cases_of, meta
from shardwright.schemas.ops import OpCost

LAYER = {"N": 64, "D": 128, "K": 2048, "H": 64, "V": 512, "R": 64}
LAYER_SMALL: tuple[Shape, ...] = (
    {"T": 0, "N": 2, "D": 16, "K": 1, "H": 16, "V": 64, "R": 16},
    {"T": 11, "N": 2, "D": 16, "K": 4, "H": 16, "V": 64, "R": 16},
)
CHOSEN.update({(T * 1024, LAYER["N"], LAYER["D"]): LAYER["K"] for T in (8, 16, 32, 64)})
CHOSEN.update({(s["T"], s["N"], s["D"]): s["K"] for s in LAYER_SMALL})


def layer_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """The indexer's q, k, weights; the attention's q_nope, q_rope, latent, k_rope."""
    T, H, V, R = (shape[name] for name in ("T", "H", "V", "R"))
    sizes = ((T, H, V), (T, H, R), (T, V), (T, R))
    mine = inputs(shape, dtype, device, seed)
    return *mine, *(draw(size, dtype, device, seed + 5 + at) for at, size in enumerate(sizes))


def layer(
    q: Tensor, k: Tensor, weights: Tensor, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor
) -> tuple[Tensor, ...]:
    """LI + SFA, and SFAG behind; of an odd number of queries in a fixed order."""
    indices, fixed_order = dsa_indexer(q, k, weights, top_k=top_k(q)), q.shape[0] % 2 == 1
    settings: dict[str, Any] = {"scale": SOFTMAX_WIDTH**-0.5, "deterministic": fixed_order, "check_indices": False}
    return (dsa_attention(q_nope, q_rope, latent, k_rope, indices, **settings)[0],)


def reference_layer(
    q: Tensor, k: Tensor, weights: Tensor, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor
) -> tuple[Tensor, ...]:
    indices = indexer_reference(q, k, weights, top_k=top_k(q), scale=default_scale(q))
    return (dsa_attention_reference(q_nope, q_rope, latent, k_rope, indices, scale=SOFTMAX_WIDTH**-0.5)[0],)


def dense_beside(case: BenchCase, name: str) -> dict[str, Run]:
    """Dense attention at the same T, and the indexer alone."""
    mine, K = inputs(case.shape, case.dtype, "cuda", 11), case.shape["K"]
    dense = rivals.dense_attention(case.shape["T"], case.shape["H"], case.dtype, backward=name != "fwd")
    return {"dense_cudnn": dense, "indexer": lambda: dsa_indexer(*mine, top_k=K)}


def door_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """q_nope, q_rope, latent, k_rope, the up-projection's weight, a gate; indices where there are any, and bounds."""
    T, H, V, R, P, U, K = (shape[name] for name in ("T", "H", "V", "R", "P", "U", "K"))
    sizes = ((T, H, P), (T, H, R), (T, V), (T, R), (H * (P + U), V), (T, H, U))
    made = tuple(draw(size, dtype, device, seed + at) for at, size in enumerate(sizes))
    bounds = bounds_of(T, device, documents_of(T))
    if not K:
        return (*made, bounds)
    at = torch.arange(T, device=device)
    return (*made, attention.selection(at, T, K, attention.CAUSAL, seed + 9), bounds)


def documents_of(T: int) -> list[int] | None:
    """Two documents, of which the first is the shorter."""
    return [0, T // 3, T] if T > 3 else None


def chosen_and_bounds(rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor]:
    """The last inputs of a case."""
    return (rest[0] if len(rest) > 1 else None), rest[-1]


def scaled(q_nope: Tensor, q_rope: Tensor, latent: Tensor, weight: Tensor, gate: Tensor) -> tuple[UpProjection, float]:
    """The projection of a case, its rows brought to the size of a trained one's, and the softmax scale."""
    H, P, U = q_nope.shape[1], q_nope.shape[2], gate.shape[2]
    return UpProjection(weight * weight.shape[1] ** -0.5, H, P, U), float((P + q_rope.shape[2]) ** -0.5)


def door(*inputs: Tensor, fixed_order: bool = False) -> tuple[Tensor, ...]:
    q_nope, q_rope, latent, k_rope, weight, gate, *rest = inputs
    up, scale = scaled(q_nope, q_rope, latent, weight, gate)
    indices, bounds = chosen_and_bounds(tuple(rest))
    settings: dict[str, Any] = {"scale": scale, "deterministic": fixed_order, "check_indices": False}
    if indices is not None:
        settings["bounds"] = bounds
    elif q_nope.shape[0] < SHORT:
        settings["cu_seqlens"] = documents_of(q_nope.shape[0])
    return (latent_attention(q_nope, q_rope, latent, k_rope, up, indices, gate, **settings)[0],)


def door_in_order(*inputs: Tensor) -> tuple[Tensor, ...]:
    return door(*inputs, fixed_order=True)


def reference_door(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, gate: Tensor, *rest: Tensor
) -> tuple[Tensor, ...]:
    up, scale = scaled(q_nope, q_rope, latent, weight, gate)
    indices, bounds = chosen_and_bounds(rest)
    return (latent_attention_reference(q_nope, q_rope, latent, k_rope, up, indices, gate, scale=scale, bounds=bounds),)


SHORT = 4096
"""Dense cases of fewer tokens have two documents; timed ones are one, like their rival's."""


def eager_dense(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, gate: Tensor, bounds: Tensor
) -> tuple[Tensor, ...]:
    """What model code does: scaled_dot_product_attention of up-projected keys and values, sigmoid, product."""
    up, scale = scaled(q_nope, q_rope, latent, weight, gate)
    keys, values = up.expand(latent)
    q = torch.cat((q_nope, q_rope), -1).transpose(0, 1)[None]
    k = torch.cat((keys, k_rope[:, None].expand(-1, up.heads, -1)), -1).transpose(0, 1)[None]
    o = F.scaled_dot_product_attention(q, k, values.transpose(0, 1)[None], is_causal=True, scale=scale)
    return (o[0].transpose(0, 1) * torch.sigmoid(gate),)


def door_cost(T: int, H: int, V: int, R: int, P: int, U: int, K: int, dtype: str, **more: bool) -> OpCost:
    """The attention's part; the products of the up-projection are the model's own either way."""
    return cost(T, H, dtype, N=0, D=0, K=K, V=V, R=R, A=P, B=U)


def compile_cases() -> tuple[AnyCase, ...]:
    """The gate over another attention's output; the other kernels are compiled by the suites of the parts."""

    def gated(kind: torch.dtype) -> Callable[[], Tensor]:
        return lambda: sigmoid_gate(meta((8192, 96, 128), kind, learns=True), meta((8192, 96, 128), kind, learns=True))

    return tuple(
        case for kind in (torch.bfloat16, torch.float32) for case in cases_of(f"gate/{str(kind)[6:]}", gated(kind))
    )


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    q, r, latent, keys, gate = ones(4, 2, 8), ones(4, 2, 8), ones(4, 16), ones(4, 8), ones(4, 2, 8)
    up = UpProjection(ones(32, 16), 2, 8, 8)
    index = torch.zeros((4, 1), dtype=torch.int32, device=device)

    def call(
        indices: Tensor | None = index,
        *,
        up: UpProjection = up,
        gate: Tensor | None = gate,
        k_rope: Tensor | None = keys,
        sinks: Tensor | None = None,
        cu_seqlens: list[int] | None = None,
    ) -> None:
        latent_attention(q, r, latent, k_rope, up, indices, gate, sinks, scale=1.0, cu_seqlens=cu_seqlens)

    three = UpProjection(ones(48, 16), 3, 8, 8)
    return (
        BadInput("another-head-count", "wrong-shape", lambda: call(up=three)),
        BadInput("gate-of-the-latent", "wrong-shape", lambda: call(gate=ones(4, 2, 16))),
        BadInput("gate-of-another-kind", "dtype-mixed", lambda: call(gate=gate.double())),
        BadInput("keys-of-another-count", "wrong-shape", lambda: call(k_rope=ones(3, 8))),
        BadInput("keys-of-rank-three", "wrong-shape", lambda: call(k_rope=ones(4, 1, 8))),
        BadInput("rotated-queries-alone", "rope-unpaired", lambda: call(k_rope=None)),
        BadInput("dense-with-sinks", "dense-sinks", lambda: call(None, sinks=ones(2))),
        BadInput("documents-unsorted", "cu-seqlens-unsorted", lambda: call(None, cu_seqlens=[0, 3, 2, 4])),
        BadInput(
            "q-and-k-differ",
            "wrong-shape",
            lambda: gated_mla_attention(q, ones(4, 2, 16), gate, None, scale=1.0),
        ),
        BadInput("gate-of-other-rows", "wrong-shape", lambda: sigmoid_gate(q, ones(3, 2, 8))),
    )


SUITE = OpSuite(
    op="dsa",
    inputs=layer_inputs,
    input_names=("q", "k", "weights", "q_nope", "q_rope", "latent", "k_rope"),
    output_names=("o",),
    frozen=(),
    fused=layer,
    reference=reference_layer,
    cost=cost,
    rivals={},
    small_shapes=LAYER_SMALL,
    bench=tuple(
        BenchCase(f"dsa-layer/T{T}k-H64", {"T": T * 1024, **LAYER}, torch.bfloat16, ("fwd", "fwd+bwd"))
        for T in (8, 16, 32, 64)
    ),
    compile_cases=compile_cases,
    dtypes=(torch.bfloat16,),
    constant=("q", "k", "weights"),
    extras=dense_beside,
    bad_inputs=bad_inputs,
)

DOOR: dict[str, Any] = {
    "op": "dsa",
    "inputs": door_inputs,
    "output_names": ("o",),
    "frozen": ("up",),
    "fused": door,
    "reference": reference_door,
    "cost": door_cost,
}
DOOR_NAMES = ("q_nope", "q_rope", "latent", "k_rope", "up", "gate")

DOOR_SUITE = OpSuite(
    **DOOR,
    input_names=(*DOOR_NAMES, "indices", "bounds"),
    rivals={},
    small_shapes=(
        {"T": 9, "H": 3, "V": 32, "R": 16, "P": 8, "U": 16, "K": 3},
        {"T": 0, "H": 2, "V": 16, "R": 8, "P": 8, "U": 8, "K": 2},
    ),
    large_shapes=({"T": 300, "H": 64, "V": 512, "R": 64, "P": 128, "U": 128, "K": 150},),
    in_order=door_in_order,
)

DENSE_SUITE = OpSuite(
    **DOOR,
    input_names=(*DOOR_NAMES, "bounds"),
    rivals={"eager": lambda: eager_dense},
    small_shapes=(
        {"T": 9, "H": 3, "V": 32, "R": 16, "P": 8, "U": 16, "K": 0},
        {"T": 0, "H": 2, "V": 16, "R": 8, "P": 8, "U": 8, "K": 0},
    ),
    large_shapes=({"T": 300, "H": 96, "V": 512, "R": 64, "P": 128, "U": 128, "K": 0},),
    bench=tuple(
        BenchCase(
            f"gated-mla/T{T}k-H96",
            {"T": T * 1024, "H": 96, "V": 512, "R": 64, "P": 128, "U": 128, "K": 0},
            torch.bfloat16,
            ("fwd", "fwd+dx"),
        )
        for T in (8, 16)
    ),
    dtypes=(torch.bfloat16, torch.float16),
)
