"""What eager torch and torch.compile cost for norms: of hidden states, and inside attention with what stands beside.

Legend: T tokens, H/Q/K heads, D head width, W rotary or joint width, n values, R rows, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.gated_rms_norm.cost import cost as gated_cost
from shardwright.kernels.latent_norm.cost import cost as latent_cost
from shardwright.kernels.qk_norm_rope.cost import cost as qk_cost
from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Chain, Moves, described
from shardwright.search_spaces.provider_rope import turns


def rms_norm(provider: str, dtype: str, T: int, H: int) -> OpCost:
    """``y = w · x / sqrt(mean(x²) + eps)`` over ``x [T, H]``, statistics in fp32."""
    b, n = BYTES[dtype], T * H
    cast_in, cast_out = ([(n * b, n * 4)], [(n * 4, n * b)]) if b != 4 else ([], [])
    if provider == "eager":
        square_mean = [(n * 4, n * 4), (n * 4, T * 4), (T * 4, T * 4), (T * 4, T * 4)]
        forward = [*cast_in, *square_mean, (n * 4 + T * 4, n * 4), *cast_out, (n * b, n * b)]
        scale_back = [(n * b, n * b), *cast_in, (n * 4 + T * 4, n * 4), (2 * n * 4, n * 4), (n * 4, T * 4)]
        square_back = [(T * 4, T * 4), (T * 4, T * 4), (T * 4, n * 4), (n * 4, n * 4), (2 * n * 4, n * 4)]
        backward = [*scale_back, *square_back, (2 * n * 4, n * 4), *cast_out]
        saved = (n * 4 if b != 4 else 0) + T * 4
    else:
        forward, backward, saved = [(n * b + H * b, n * b)], [(2 * n * b + H * b, n * b)], T * 4
    return OpCost(
        op="rms_norm",
        provider=provider,
        dtype=dtype,
        shape={"T": T, "H": H},
        forward=Chain(tuple(forward), 4 * n).as_pass(2 * n * b + H * b, 4 * n),
        backward=Chain(tuple(backward), 8 * n).as_pass(3 * n * b + H * b, 8 * n),
        saved_bytes=saved,
    )


def add_rms_norm(provider: str, dtype: str, T: int, H: int) -> OpCost:
    """``r = x + residual``, ``y = rms_norm(r)``: returns both."""
    b, n = BYTES[dtype], T * H
    norm = rms_norm(provider, dtype, T, H)
    assert norm.backward is not None
    if provider == "eager":
        forward = norm.forward.model_copy(
            update={
                "bytes_read": norm.forward.bytes_read + 2 * n * b,
                "bytes_written": norm.forward.bytes_written + n * b,
                "launches": norm.forward.launches + 1,
            }
        )
        backward = norm.backward.model_copy(
            update={
                "bytes_read": norm.backward.bytes_read + 2 * n * b,
                "bytes_written": norm.backward.bytes_written + n * b,
                "launches": norm.backward.launches + 1,
            }
        )
    else:
        forward = Chain(((2 * n * b + H * b, 2 * n * b),), 5 * n).as_pass(0)
        backward = Chain(((3 * n * b + H * b, n * b),), 9 * n).as_pass(0)
    floors = {"floor_bytes": 4 * n * b + H * b, "floor_flops": 5 * n}
    return OpCost(
        op="add_rms_norm",
        provider=provider,
        dtype=dtype,
        shape={"T": T, "H": H},
        forward=forward.model_copy(update={**floors, "flops": 5 * n}),
        backward=backward.model_copy(update={**floors, "flops": 9 * n, "floor_flops": 9 * n}),
        saved_bytes=norm.saved_bytes,
    )


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
        n, f = R * D, 4 * R * D
        widen, narrow = ([(n * b, f)], [(f, n * b)]) if b != 4 else ([], [])
        if provider == "eager":
            norm = [(f, f), (f, 4 * R), (4 * R, 4 * R), (4 * R, 4 * R), (f + 4 * R, f)]
            turn, back = turns(T, heads, D, W, b)
            forward += [*widen, *norm, *narrow, (n * b, n * b), *turn]
            scale = [(n * b, n * b), *widen, (f + 4 * R, f), (2 * f, f), (f, 4 * R)]
            rows = [(4 * R, 4 * R)] * 3 + [(4 * R, f), (f, f), (f, f), (2 * f, f), (2 * f, f)]
            backward += [*back, *scale, *rows, *narrow]
            saved += f + 4 * R
        else:
            forward += [(n * b + table, n * b)]
            backward += [(2 * n * b + table, n * b)]
            saved += 4 * R
    return described(ours, provider, forward, backward, saved)
