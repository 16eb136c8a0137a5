"""What a layer of sparse latent attention demands, and what a fusion that uses it must prove. No torch.

The parts check the rest: ``attention.contract`` the absorbed form, ``indexer.contract`` the scores.

Legend: T queries, S keys, H heads, N width of a key without its rotated part, R rotated width, V width of a value,
C width of the latent, K selected keys.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.dsa.attention.contract import DTYPES, OBLIGATIONS
from shardwright.kernels.guards import TensorLike

NAME = "dsa"
ROLES = {
    "q_nope": "activation [T, H, N]",
    "q_rope": "activation [T, H, R], rotated; optional, with k_rope",
    "latent": "activation [S, C], normed",
    "k_rope": "activation [S, R], rotated; optional, with q_rope",
    "up": "parameter [H · (N + V), C], with or without an adapter",
    "indices": "int32 [T, K] of rows, -1 for nothing; none for dense attention",
    "gate": "activation [T, H, V], optional",
    "sinks": "parameter [H], optional",
    "o": "activation [T, H, V]",
    "lse": "fp32 [T, H], no gradient; none of dense attention",
}

RANKS = {"q_nope": 3, "q_rope": 3, "latent": 2, "k_rope": 2, "up": 2}

__all__ = ["DTYPES", "NAME", "OBLIGATIONS", "ROLES", "check_static"]


def check_static(
    q_nope: TensorLike,
    q_rope: TensorLike | None,
    latent: TensorLike,
    k_rope: TensorLike | None,
    weight: TensorLike,
    gate: TensorLike | None,
    *,
    value: int,
    sinks: bool,
    dense: bool,
) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Raises:
        KernelError: ``rope-unpaired``, ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, or ``dense-sinks``.
    """
    if (q_rope is None) != (k_rope is None):
        what = f"one rotated part without the other: {'q_rope' if k_rope is None else 'k_rope'} alone"
        raise guards.refuse(NAME, "rope-unpaired", what, "pass q_rope and k_rope, or neither")
    given = {"q_nope": q_nope, "q_rope": q_rope, "latent": latent, "k_rope": k_rope, "up": weight}
    named = {role: tensor for role, tensor in given.items() if tensor is not None}
    guards.one_dtype(NAME, {**named, **({} if gate is None else {"gate": gate})}, DTYPES)
    if any(len(tensor.shape) != RANKS[role] for role, tensor in named.items()):
        what = ", ".join(f"{role} {list(tensor.shape)}" for role, tensor in named.items())
        raise guards.refuse(NAME, "wrong-shape", what, "pass [T, H, N], [T, H, R], [S, C], [S, R], [H · (N + V), C]")
    (T, H, N), (S, C) = q_nope.shape, latent.shape
    expected: dict[str, tuple[int, ...]] = {"up": (H * (N + value), C)}
    if k_rope is not None:
        expected |= {"q_rope": (T, H, k_rope.shape[1]), "k_rope": (S, k_rope.shape[1])}
    if gate is not None:
        expected["gate"] = (T, H, value)
    found = {**named, **({} if gate is None else {"gate": gate})}
    for role, shape in expected.items():
        if tuple(found[role].shape) != shape:
            raise guards.refuse(NAME, "wrong-shape", f"{role} is {list(found[role].shape)}", f"pass {list(shape)}")
    if dense and sinks:
        what = "libraries of dense attention take no sinks"
        raise guards.refuse(NAME, "dense-sinks", what, "select keys, or keep this layer's own attention")
