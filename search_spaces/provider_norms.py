"""What eager torch and torch.compile cost for the norms inside attention: gated, latent, of queries and keys.

Legend: T tokens, H/Q/K heads, D head width, W rotary or joint width, n values, R rows, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.gated_rms_norm.cost import cost as gated_cost
from shardwright.kernels.latent_norm.cost import cost as latent_cost
from shardwright.kernels.qk_norm_rope.cost import cost as qk_cost
from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Moves, described


def gated_rms_norm(provider: str, dtype: str, T: int, H: int, D: int) -> OpCost:
    """``w · x / rms(x) · act(gate)`` over ``[T, H, D]``, fp32 inside."""
    ours, b, R = gated_cost(T, H, D, dtype), BYTES[dtype], T * H
    n, f = R * D, 4 * R * D
    widen, narrow = ([(n * b, f)], [(f, n * b)]) if b != 4 else ([], [])
    if provider == "eager":
        norm = [(f, f), (f, 4 * R), (4 * R, 4 * R), (4 * R, 4 * R), (f + 4 * R, f), (f, f)]
        forward = [*widen, *norm, (D * b, 4 * D), *widen, (f, f), (2 * f, f), *narrow]
        gates = [(2 * f, f), (2 * f, f), (2 * f, f), *narrow]
        rows = [(4 * R, 4 * R)] * 3 + [(4 * R, f), (f, f), (f, f), (2 * f, f)]
        backward = [*widen, *gates, (f, f), (f + 4 * R, f), (2 * f, f), (f, 4 * R), *rows, (2 * f, f), *narrow]
        saved = 4 * f + 4 * R
    else:
        forward, backward, saved = [(2 * n * b + D * b, n * b)], [(3 * n * b + D * b, 2 * n * b)], 4 * R
    return described(ours, provider, forward, backward, saved)


def latent_norm(provider: str, dtype: str, T: int, W: int, H: int) -> OpCost:
    """Split of ``[T, W]`` and RMSNorm of its first H columns; the rest stays a view."""
    ours, b = latent_cost(T, W, H, dtype), BYTES[dtype]
    n, f, whole = T * H, 4 * T * H, T * W * b
    widen, narrow = ([(n * b, f)], [(f, n * b)]) if b != 4 else ([], [])
    if provider == "eager":
        norm = [(f, f), (f, 4 * T), (4 * T, 4 * T), (4 * T, 4 * T), (f + 4 * T, f)]
        forward = [*widen, *norm, *narrow, (n * b, n * b)]
        scale = [(n * b, n * b), *widen, (f + 4 * T, f), (2 * f, f), (f, 4 * T)]
        rows = [(4 * T, 4 * T)] * 3 + [(4 * T, f), (f, f), (f, f), (2 * f, f), (2 * f, f)]
        backward = [*scale, *rows, *narrow, (whole, whole)]
        saved = f + 4 * T
    else:
        forward, saved = [(n * b + H * b, n * b)], 4 * T
        backward = [(whole + n * b + H * b, whole)]
    return described(ours, provider, forward, backward, saved)


def qk_norm_rope(provider: str, dtype: str, T: int, Q: int, K: int, D: int, W: int) -> OpCost:
    """Norm over each head of q and k, and their rotation by halves."""
    ours, b = qk_cost(T, Q, K, D, W, dtype), BYTES[dtype]
    forward: Moves = []
    backward: Moves = []
    saved, table = 0, 2 * T * W * b
    for heads in (Q, K):
        R = T * heads
        n, f, turning = R * D, 4 * R * D, R * W * b
        widen, narrow = ([(n * b, f)], [(f, n * b)]) if b != 4 else ([], [])
        if provider == "eager":
            norm = [(f, f), (f, 4 * R), (4 * R, 4 * R), (4 * R, 4 * R), (f + 4 * R, f)]
            turn = [(turning // 2, turning // 2), (turning, turning), (turning + table, turning)]
            turn += [(turning + table, turning), (2 * turning, turning)]
            cat = [(n * b, n * b)] if W < D else []
            forward += [*widen, *norm, *narrow, (n * b, n * b), *turn, *cat]
            scale = [(n * b, n * b), *widen, (f + 4 * R, f), (2 * f, f), (f, 4 * R)]
            rows = [(4 * R, 4 * R)] * 3 + [(4 * R, f), (f, f), (f, f), (2 * f, f), (2 * f, f)]
            half = turning // 2
            back = [(turning + table, turning), (half, half), (half, turning), (half, turning), (2 * turning, turning)]
            back += [(turning + table, turning), (2 * turning, turning)]
            backward += [*cat, *back, *scale, *rows, *narrow]
            saved += f + 4 * R
        else:
            forward += [(n * b + table, n * b)]
            backward += [(2 * n * b + table, n * b)]
            saved += 4 * R
    return described(ours, provider, forward, backward, saved)
