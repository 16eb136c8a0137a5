"""What eager torch and torch.compile cost for a rotation of queries and keys.

Legend: T tokens, Q and K heads, D head width, W rotary width, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.qk_norm_rope.cost import cost as qk_cost
from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Moves, described


def turns(T: int, heads: int, D: int, W: int, b: int) -> tuple[Moves, Moves]:
    """``x·cos + [−x₂, x₁]·sin`` of the first W of D dimensions as families spell it, forward and backward."""
    turning, table = T * heads * W * b, 2 * T * W * b
    half, whole = turning // 2, T * heads * D * b
    joined: Moves = [(whole, whole)] if W < D else []
    forward = [(half, half), (turning, turning), (turning + table, turning)]
    forward += [(turning + table, turning), (2 * turning, turning), *joined]
    backward = [(turning + table, turning), (half, half), (half, turning), (half, turning), (2 * turning, turning)]
    backward += [(turning + table, turning), (2 * turning, turning)]
    return forward, [*joined, *backward]


def neighbours(T: int, heads: int, W: int, b: int) -> tuple[Moves, Moves]:
    """``[a·cos − b·sin, b·cos + a·sin]`` of even and odd dimensions: four products, two sums, one join.

    Backward: two pieces of the gradient, four products, two sums, and the two strided halves written into zeros.
    """
    half, table = T * heads * W * b // 2, T * W * b // 2
    products: Moves = [(half + table, half)] * 4 + [(2 * half, half)] * 2
    scattered: Moves = [(half, 2 * half)] * 2 + [(4 * half, 2 * half)]
    return [*products, (2 * half, 2 * half)], [*products, *scattered]


def rotation(provider: str, dtype: str, shape: dict[str, int], forward: Moves, backward: Moves) -> OpCost:
    """A rotation by its kernels. Its floor is in place: the rotated dimensions in and out, half of each table."""
    T, Q, K, D, W, pairing = (shape[name] for name in ("T", "Q", "K", "D", "W", "pairing"))
    ours = qk_cost(T, Q, K, D, W, dtype, pairing=pairing, norm=0)
    floor = (2 * T * (Q + K) + T) * W * BYTES[dtype]
    cost = described(ours, provider, forward, backward, 0)
    assert cost.backward is not None
    first, back = (one.model_copy(update={"floor_bytes": floor}) for one in (cost.forward, cost.backward))
    return cost.model_copy(update={"op": "rope", "shape": shape, "forward": first, "backward": back})


def rope(provider: str, dtype: str, T: int, Q: int, K: int, D: int, W: int, pairing: int = 0) -> OpCost:
    """Rotation of q and k, or of one tensor where K is 0.

    Args:
        pairing: position in the operator's ``PAIRINGS``: 0 rotates dimension j with j + W/2, others neighbours.
    """
    b = BYTES[dtype]
    forward: Moves = []
    backward: Moves = []
    for heads in (h for h in (Q, K) if h):
        if provider == "eager":
            found = neighbours(T, heads, W, b) if pairing else turns(T, heads, D, W, b)
        else:
            n, tables = T * heads * D * b, 2 * T * W * b
            found = [(n + tables, n)], [(n + tables, n)]
        forward += found[0]
        backward += found[1]
    shape = {"T": T, "Q": Q, "K": K, "D": D, "W": W, "pairing": pairing}
    return rotation(provider, dtype, shape, forward, backward)
