"""What the whole MoE layer demands beyond its parts, and what a fusion that uses it must prove. No torch.

Legend: T tokens, K experts a token, E experts, H hidden.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.grouped_lora_mlp import contract as grouped
from shardwright.kernels.guards import TensorLike
from shardwright.kernels.permute import contract as permute

NAME = "moe_layer"
DTYPES = grouped.DTYPES

ROLES = {
    "x": "activation [T, H]",
    "ids": permute.ROLES["ids"],
    "weights": permute.ROLES["weights"],
    **{role: grouped.ROLES[role] for role in ("gate_up", "down", "lora_a", "lora_b")},
    "y": "activation [T, H]",
}

OBLIGATIONS = grouped.OBLIGATIONS
"""Only for ep = 1: with more ranks the exchange lies between the parts, which are then used one by one."""


def check_routing(x: TensorLike, ids: TensorLike, weights: TensorLike, experts: int, *, interpreted: bool) -> None:
    """``ids`` and ``weights`` are ``[T, K]`` for x's T tokens, on x's device.

    Raises:
        KernelError: as in ``permute.contract``; ``wrong-shape`` or ``device-mixed``.
    """
    permute.check_ids(NAME, ids, experts, interpreted=interpreted)
    permute.check_weights(NAME, weights, tuple(ids.shape))
    if ids.shape[0] != x.shape[0]:
        what = f"x has {x.shape[0]} tokens, ids {ids.shape[0]}"
        raise guards.refuse(NAME, "wrong-shape", what, "pass one row of ids a token")
    guards.one_device(NAME, {"x": x, "ids": ids, "weights": weights}, interpreted=interpreted)
