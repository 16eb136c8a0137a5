"""What eager torch and torch.compile cost for linear attention as the families write it: chunks of 64 tokens, in fp32.

Legend: T tokens, H key heads, HV value heads, K, V widths, C tokens of a chunk, J taps, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.gated_delta.cost import cost as heads_cost
from shardwright.kernels.kda.cost import cost as channels_cost
from shardwright.kernels.short_conv.cost import cost as conv_cost
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.provider_chain import BYTES, Moves, by_kernels, moved, steps_of
from shardwright.search_spaces.provider_norms import gated_rms_norm

CHUNK = 64
BACKWARD = 2
"""Launches and bytes of autograd's backward over the forward's; assumed."""

CHUNK_LAUNCHES = {"eager": (20, 10), "compile": (9, 6)}
"""Kernels of one step of the chunks' loop, (decay of channels, of heads). Eager: read in transformers 5.24; compiled:
assumed."""
ROW_LAUNCHES = {"eager": 5, "compile": 2}
"""Kernels of one row of the triangular inverse that the channels' form builds row by row."""


def delta_rule(provider: str, dtype: str, T: int, H: int, HV: int, K: int, V: int, channels: int = 1) -> OpCost:
    """The gated delta rule of q, k ``[T, H, K]`` and v ``[T, HV, V]``, decays given.

    With a decay for each channel eager torch holds ``[chunks, C, C, K]`` numbers and passes over them fifteen times;
    with one a head ``[chunks, C, C]``, and a triangular solve in place of the rows. Products in fp32 are counted at the
    rate of ``dtype``: a lower bound.

    Args:
        channels: 1 where each key channel decays by itself (KDA), 0 for one decay a head (Gated DeltaNet).
    """
    ours = (channels_cost if channels else heads_cost)(T, H, K, V, dtype, HV=HV)
    assert ours.backward is not None
    b, chunks = BYTES[dtype], -(-T // CHUNK)
    rows = chunks * CHUNK * HV
    given, v, o = 2 * T * H * K * b, T * HV * V * b, T * HV * V * b
    f, wide, square, state = 4 * rows * K, 4 * rows * V, 4 * rows * CHUNK, 4 * chunks * HV * K * V
    pairs = square * K
    eager = provider == "eager"
    steps: Moves = [(given, 2 * f), (v, wide)]
    steps += [(f, f)] * (6 if eager else 0) + [(f, f)] * 3 + [(wide, wide)]
    if channels:
        steps += [(f, f), (f, pairs)]
        steps += [(pairs, pairs)] * 2 + [(2 * f, pairs), (2 * pairs, pairs), (pairs, square)] if eager else []
        steps += [] if eager else [(pairs + 2 * f, square)]
        steps += _inverse(square, ROW_LAUNCHES[provider])
        steps += (
            [(square + wide, wide), (f, f), (2 * f, f), (square + f, f)] if eager else [(square + wide + f, wide + f)]
        )
        loop = [(f, pairs), (2 * pairs, pairs), (pairs, square)] if eager else [(pairs + 2 * f, square)]
    else:
        steps += [(square, square)] * 3 + [(2 * f, square)] * 2 if eager else [(2 * f, square)] * 2
        steps += [(square, square)] * (2 if eager else 1) + [(f, f)] * 3
        steps += [(square + wide, wide), (square + f, f)]
        loop = []
    loop += [(2 * f + 2 * state, wide), (square + 2 * wide, wide), (f + wide + state, state)]
    per_chunk = CHUNK_LAUNCHES[provider][0 if channels else 1]
    ended: Moves = [(wide, wide)] * (2 if eager else 0) + [(wide, o)]
    launches = len(steps) + len(ended) + per_chunk * chunks
    whole = moved([*steps, *loop, *ended])
    read, written = sum(step.read for step in whole), sum(step.written for step in whole)

    def one(times: int, own: PassCost) -> PassCost:
        return own.model_copy(
            update={
                "flops": max(own.floor_flops, own.flops),
                "bytes_read": times * read,
                "bytes_written": times * written,
                "launches": times * launches,
                "workspace_bytes": 2 * pairs if channels else 2 * square,
            }
        )

    update = {
        "op": "delta_rule",
        "provider": provider,
        "shape": {"T": T, "H": H, "HV": HV, "K": K, "V": V, "channels": channels},
        "forward": one(1, ours.forward),
        "backward": one(BACKWARD, ours.backward),
        "saved_bytes": 3 * f + 2 * wide + (2 * pairs if channels else 2 * square) + state,
    }
    return ours.model_copy(update=update)


def _inverse(square: int, launches: int) -> Moves:
    """Rows 1 to 63 of a chunk's inverse: row i copies, multiplies and sums the i × i numbers before it."""
    moves: Moves = []
    for row in range(1, CHUNK):
        block = square * row * row // (CHUNK * CHUNK)
        moves += [(3 * block, 2 * block), *[(0, 0)] * (launches - 1)]
    return moves


def short_conv(provider: str, dtype: str, T: int, C: int, J: int) -> OpCost:
    """Causal depthwise convolution and SiLU over ``[T, C]``, which torch's convolution wants channels first."""
    ours, b = conv_cost(T, C, J, dtype, weight_gradient=False), BYTES[dtype]
    w, taps = T * C * b, C * J * b
    turned: Moves = [(w, w)] * (2 if provider == "eager" else 1)
    forward: Moves = [*turned, (w + taps, w), (w, w)]
    backward: Moves = [*turned, (2 * w, w), (w + taps, w)]
    flops = ours.forward.flops
    assert ours.backward is not None
    return by_kernels(
        "short_conv",
        provider,
        dtype,
        {"T": T, "C": C, "J": J},
        (moved(forward, flops), moved(backward, 2 * flops)),
        floor_bytes=(2 * w + taps, ours.backward.floor_bytes - C * J * (4 - b)),
        floor_flops=(flops, 2 * flops),
        saved=2 * w,
    )


def delta_rule_layer(
    provider: str, dtype: str, T: int, H: int, HV: int, K: int, V: int, J: int, channels: int = 1
) -> OpCost:
    """Convolutions, gates, recurrence and gated norm of a layer, from its projections' results to what its last reads.

    The parts as they are described alone, and four passes over decays in fp32 (eager). Its floor reads the streams,
    decays, betas and the gate once and writes the result once.
    """
    b, width = BYTES[dtype], 2 * H * K + HV * V
    parts = (
        short_conv(provider, dtype, T, width, J),
        delta_rule(provider, dtype, T, H, HV, K, V, channels),
        gated_rms_norm(provider, dtype, T, HV, V),
    )
    given = T * HV * (K if channels else 1)
    gates = moved([(4 * given, 4 * given)] * 4 if provider == "eager" else [(b * given, 4 * given)])
    forward, backward = [*gates], [*gates]
    flops = [0, 0]
    for part in parts:
        assert part.backward is not None
        forward += steps_of(part.forward)
        backward += steps_of(part.backward)
        flops[0] += part.forward.floor_flops
        flops[1] += part.backward.floor_flops
    read, out = (T * width + given + T * HV + T * HV * V) * b, T * HV * V * b
    return by_kernels(
        "delta_rule_layer",
        provider,
        dtype,
        {"T": T, "H": H, "HV": HV, "K": K, "V": V, "J": J, "channels": channels},
        (forward, backward),
        floor_bytes=(read + out, 2 * read + out),
        floor_flops=(flops[0], flops[1]),
        saved=sum(part.saved_bytes for part in parts),
    )
