"""What flash-linear-attention's kernels cost, by the shapes that the operators take. Read in fla-core 0.6.0.

Stage by stage as its Triton kernels load and store; flops are the fewest that the computation needs, forward, and with
the stages that backward runs again. Over heads of 128 × 128 the KDA stages move 37.5 tensor-widths forward and 85.5
backward; its published count is 37 and 84, and one H200 counted 11 launches forward and 34 both ways.

Legend: T tokens, H key heads, HV value heads, K, V widths, C tokens of a chunk or channels, J taps, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.gated_delta.cost import cost as heads_cost
from shardwright.kernels.gated_rms_norm.cost import cost as gated_cost
from shardwright.kernels.kda.cost import cost as channels_cost
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.provider_chain import BYTES, Moves, by_kernels, described, moved
from shardwright.search_spaces.provider_delta import short_conv as conv_described
from shardwright.search_spaces.provider_mixing import attention_residual

NAME = "fla"
CHUNK, SUBCHUNK = 64, 16
KDA_LAUNCHES = (11, 23)
"""Forward and backward, counted on one H200 at T 8,192 and H 32; 9 and 12 of them are the stages below,
the others zeros, casts and sums."""
PROGRAMS = 132
"""Programs of a norm's backward grid: one on each multiprocessor of an H200."""


def kda(dtype: str, T: int, H: int, K: int, V: int, HV: int = 0, docs: int = 1) -> OpCost:
    """Decays of channels: norms, running sums, two stages of pairs, w and u, states, results; backward recomputes."""
    HV, b = HV or H, BYTES[dtype]
    ours = channels_cost(T, H, K, V, dtype, HV=HV, docs=docs)
    qk, k, v, f = T * H * K * b, T * HV * K * b, T * HV * V * b, 4 * T * HV * K
    square, states, beta = T * HV * CHUNK * b, (-(-T // CHUNK) + docs - 1) * HV * K * V * b, T * HV * b
    diagonal, square32 = 4 * T * HV * SUBCHUNK, 4 * T * HV * CHUNK
    norms: Moves = [(qk, qk)] * 2
    sums: Moves = [(k, f)]
    state: Moves = [(2 * k + v, states + v)]
    forward: Moves = [*norms, (beta, beta), *sums, (2 * qk + f + beta, diagonal), (2 * qk + f + diagonal, 2 * square)]
    forward += [(qk + v + f + square, 2 * k + v), *state, (qk + v + f + square + states, v)]
    backward: Moves = [*sums, (2 * qk + v + f + square, 3 * k + v), *state]
    backward += [(2 * v + square, v + square32), (3 * k + 2 * v, states + v)]
    backward += [(2 * qk + 4 * v + f + square + 2 * states, 3 * f + v + square32)]
    backward += [(2 * qk + f + 2 * square32 + 3 * f, 3 * f), (f, f), (k + f, k)]
    backward += [(4 * T * H * K + qk, qk)] * 2 + [(beta, beta)]
    return _measured(ours, "kda", forward, backward, KDA_LAUNCHES, saved=2 * square)


def gated_delta(dtype: str, T: int, H: int, K: int, V: int, HV: int = 0, docs: int = 1) -> OpCost:
    """Decays of heads: both norms, running sums, the triangular inverse, w and u, states, results."""
    HV, b = HV or H, BYTES[dtype]
    ours = heads_cost(T, H, K, V, dtype, HV=HV, docs=docs)
    qk, k, v, beta = T * H * K * b, T * HV * K * b, T * HV * V * b, 4 * T * HV
    square, states = T * HV * CHUNK * b, (-(-T // CHUNK) + docs - 1) * HV * K * V * b
    again: Moves = [(qk + v + square, k + v), (qk + k + v, states + v)]
    forward: Moves = [(qk, qk)] * 2 + [(beta, beta), (qk, square), *again, (2 * qk + v + states, v)]
    backward: Moves = [*again, (2 * qk + v, v), (2 * qk + k + 2 * v, states + v)]
    backward += [(2 * qk + k + 3 * v + 2 * states, 3 * k), (2 * qk + 2 * k + 2 * v + square, 2 * k + v)]
    backward += [(2 * k, k), (2 * beta, beta), (beta, beta)] + [(2 * qk, qk)] * 2
    return _measured(ours, "gated_delta", forward, backward, (len(forward), len(backward)), saved=square)


def _measured(
    ours: OpCost, op: str, forward: Moves, backward: Moves, launches: tuple[int, int], *, saved: int
) -> OpCost:
    """Stages with the launches that were counted; flops: the floor's, and the forward's again in backward."""
    assert ours.backward is not None

    def one(moves: Moves, own: PassCost, count: int, flops: int) -> PassCost:
        steps = moved(moves)
        return own.model_copy(
            update={
                "flops": flops,
                "bytes_read": sum(step.read for step in steps),
                "bytes_written": sum(step.written for step in steps),
                "launches": count,
                "workspace_bytes": 0,
            }
        )

    first, back = ours.forward.floor_flops, ours.backward.floor_flops
    update = {
        "op": op,
        "provider": NAME,
        "forward": one(forward, ours.forward, launches[0], first),
        "backward": one(backward, ours.backward, launches[1], first + back),
        "saved_bytes": saved,
    }
    return ours.model_copy(update=update)


def short_conv(dtype: str, T: int, C: int, J: int) -> OpCost:
    """One kernel forward; backward runs it again, then one more, and sums a gradient of the frozen weight."""
    known, b = conv_described("compile", dtype, T, C, J), BYTES[dtype]
    w, taps, shares = T * C * b, C * J * b, 4 * -(-T // CHUNK) * C * J
    forward: Moves = [(w + taps, w)]
    backward: Moves = [(w + taps, w), (3 * w + taps, w + shares), (shares, 4 * C * J), (4 * C * J, taps)]
    assert known.backward is not None
    return by_kernels(
        "short_conv",
        NAME,
        dtype,
        {"T": T, "C": C, "J": J},
        (moved(forward, known.forward.flops), moved(backward, known.backward.flops)),
        floor_bytes=(known.forward.floor_bytes, known.backward.floor_bytes),
        floor_flops=(known.forward.floor_flops, known.backward.floor_flops),
    )


def gated_rms_norm(dtype: str, T: int, H: int, D: int) -> OpCost:
    """One kernel forward; backward one, and a sum and a cast of the weight's gradient though it is frozen."""
    ours, b, rows = gated_cost(T, H, D, dtype), BYTES[dtype], T * H
    n, w, kept, shares = rows * D * b, D * b, 4 * rows, 4 * PROGRAMS * D
    forward: Moves = [(2 * n + w, n + kept)]
    backward: Moves = [(3 * n + w + kept, 2 * n + shares), (shares, 4 * D), (4 * D, w)]
    return described(ours, NAME, forward, backward, kept)


def attention_residuals(dtype: str, T: int, R: int, H: int) -> OpCost:
    """One kernel forward; backward two: rows read twice, and the learned vectors' gradient by an fp32 row a token."""
    known, b = attention_residual("compile", dtype, T, R, H), BYTES[dtype]
    n, small, y, wide = T * R * H * b, 4 * T * R, T * H * b, 4 * T * H
    forward: Moves = [(n, y + 2 * small)]
    backward: Moves = [(2 * n + y + 2 * small, n + wide), (wide, 2 * H * b)]
    return described(known, NAME, forward, backward, 2 * small)
