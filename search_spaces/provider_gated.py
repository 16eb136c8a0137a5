"""What gated latent attention costs eagerly, compiled and with our gate: attention of all keys or of chosen ones.

Legend: T tokens, H heads, A and B widths of a head's plain key and value, R key width that heads share, V latent width,
N indexer heads, D indexer width, K selected keys (0: all), b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.dsa.cost import cost as dsa_cost
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.provider_chain import BYTES, Moves
from shardwright.search_spaces.provider_dsa import dsa
from shardwright.search_spaces.provider_mixing import mla

OURS = "shardwright"


def mla_gated(
    provider: str, dtype: str, T: int, H: int, A: int, B: int, R: int, V: int, N: int, D: int, K: int
) -> OpCost:
    """Attention, then ``o · σ(gate)`` of ``[T, H, B]``.

    The gate: eagerly a cast, a sigmoid in fp32, a cast back and a product, backward two products, the sigmoid's
    gradient and its casts; compiled or ours one kernel each way. Dense attention is a library's in every case. Over
    chosen keys the up-projection is counted on no side.
    """
    if not K:
        base = mla("compile" if provider == "compile" else "eager", dtype, T, H, A, B, R, V)
    elif provider == OURS:
        base = dsa_cost(T, H, dtype, N=N, D=D, K=K, V=V, R=R)
    else:
        base = dsa(provider, dtype, T, H, N, D, K, V, R)
    assert base.backward is not None
    forward, backward = gate_moves(provider, dtype, T * H * B)
    n = T * H * B * BYTES[dtype]
    return base.model_copy(
        update={
            "op": "mla_gated",
            "provider": provider,
            "shape": {"T": T, "H": H, "A": A, "B": B, "R": R, "V": V, "N": N, "D": D, "K": K},
            "forward": behind(base.forward, forward, 3 * n),
            "backward": behind(base.backward, backward, 5 * n),
            "saved_bytes": base.saved_bytes + (2 * n if provider != "eager" else 2 * n + T * H * B * 4),
        }
    )


def gate_moves(provider: str, dtype: str, values: int) -> tuple[Moves, Moves]:
    """Kernels of the gate over so many values, forward and backward."""
    n, f = values * BYTES[dtype], values * 4
    if provider != "eager":
        return [(2 * n, n)], [(3 * n, 2 * n)]
    up, down = ([(n, f)], [(f, n)]) if n != f else ([], [])
    forward = [*up, (f, f), *down, (2 * n, n)]
    backward = [(2 * n, n), (2 * n, n), *up, (2 * f, f), *down]
    return forward, backward


def behind(one: PassCost, moves: Moves, floor_bytes: int) -> PassCost:
    """A pass with further kernels behind it."""
    more = {
        "bytes_read": one.bytes_read + sum(read for read, _ in moves),
        "bytes_written": one.bytes_written + sum(written for _, written in moves),
        "launches": one.launches + len(moves),
        "floor_bytes": one.floor_bytes + floor_bytes,
    }
    return one.model_copy(update=more)
