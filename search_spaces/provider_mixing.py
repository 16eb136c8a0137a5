"""What activations, and regions that mix tokens or rows, cost eagerly, compiled and otherwise written.

Legend: T tokens, N heads, D plain key width, R rotated key width, V value width, L latent width, b bytes per value.
"""

from __future__ import annotations

from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Chain, Moves, Step, by_kernels, moved, product

ATTENTION_BACKWARD = 5, 2
"""Flops of attention's backward over its forward: five products of the forward's two."""


SCORE_PASSES = 6, 2
"""Passes over a written-out matrix of scores, eager and compiled: product, scale, mask, fp32 softmax, cast, product."""


def _attention(T: int, N: int, key: int, value: int, kv_heads: int, pairs: int, b: int) -> tuple[Step, list[Step]]:
    """One fused attention, forward, and its backward: row sums of ``dO · O``, then one kernel."""
    q, k, v, o = T * N * key * b, T * kv_heads * key * b, T * kv_heads * value * b, T * N * value * b
    flops, (times, over) = 2 * pairs * N * (key + value), ATTENTION_BACKWARD
    rows = 4 * T * N
    back = [Step(2 * o, rows), Step(q + k + v + o + 2 * rows, q + k + v, flops * times // over)]
    return Step(q + k + v, o + rows, flops), back


def mla(
    provider: str, dtype: str, T: int, N: int, D: int, V: int, R: int, L: int, causal: int = 1, spelled: int = 0
) -> OpCost:
    """Attention over a latent: expanded to heads (eager, compiled), or ``absorbed`` into queries and results.

    Attention is counted at the rate of a large product, of which it reaches about half: a lower bound for both.

    Args:
        causal: 1 where the kernel skips what a token may not see; 0 under a mask over all pairs.
        spelled: 1 where the family itself writes the absorbed form, with a matrix of all pairs for each head.
    """
    b, pairs = BYTES[dtype], T * (T + 1) // 2 if causal else T * T
    weight, latent, shared, q, o = N * (D + V) * L * b, T * L * b, T * R * b, T * N * (D + R) * b, T * N * V * b
    expansion, inside = 2 * T * L * N * (D + V), 2 * pairs * N
    key = T * N * (D + R) * b
    if provider == "absorbed" or spelled:
        wide = T * N * L * b
        attend, back = _attention(T, N, L + R, L, 1, pairs, b)
        scores: Moves = []
        if provider != "absorbed":
            passes = SCORE_PASSES[0 if provider == "eager" else 1]
            scores = [(T * T * N * b, T * T * N * b)] * passes
        into = Step(T * N * D * b + N * D * L * b, wide, 2 * T * N * D * L)
        out = Step(wide + N * V * L * b, o, 2 * T * N * V * L)
        joined = Step(wide + T * N * R * b, wide + T * N * R * b)
        forward = [into, joined, attend, *moved(scores), out]
        backward = [Step(o + N * V * L * b, wide, out.flops), *back, *moved(scores), joined]
        backward += [Step(wide + N * D * L * b, T * N * D * b, into.flops)]
    else:
        attend, back = _attention(T, N, D + R, V, N, pairs, b)
        joined = Step(T * N * D * b + shared, key)
        forward = [product(T, L, N * (D + V), b), joined, attend]
        sums: Moves = [(T * N * R * b, shared)]
        cut: Moves = [(key - T * N * R * b + o, T * N * (D + V) * b)]
        backward = [*back, *moved(sums), *moved(cut), product(T, N * (D + V), L, b)]
    least = min(expansion + inside * (D + R + V), expansion + inside * (2 * L + R))
    floor = q + latent + shared + weight + o
    times, over = ATTENTION_BACKWARD
    attended = least - expansion
    return by_kernels(
        "mla",
        provider,
        dtype,
        {"T": T, "N": N, "D": D, "V": V, "R": R, "L": L, "causal": causal, "spelled": spelled},
        (forward, backward),
        floor_bytes=(floor, 2 * (q + latent + shared) + weight + o),
        floor_flops=(least, expansion + attended * times // over),
        saved=o + 4 * T * N + (0 if provider == "absorbed" else key + T * N * V * b),
    )


def attention_residual(provider: str, dtype: str, T: int, R: int, H: int) -> OpCost:
    """Weights of R rows by their normalised product with one vector, and the rows' mix under them, in fp32.

    Compiled: one kernel for the rows' sums, one for softmax and mix; backward likewise.
    """
    b = BYTES[dtype]
    n, f, small, y = T * R * H * b, 4 * T * R * H, 4 * T * R, T * H * b
    wide = 4 * T * H
    if provider == "eager":
        narrow, vector = b != 4, 4 * H
        forward: Moves = [(n, f)] if narrow else []
        forward += [(f, f), (f, small), (small, small), (small, small)]
        forward += [(H * b, vector), (H * b, vector)] if narrow else []
        forward += [(2 * vector, vector), (f + vector, small), (2 * small, small), (small, small), (f + small, f)]
        forward += [(f, wide), (wide, y)] if narrow else [(f, wide)]
        backward: Moves = [(y, wide)] if narrow else []
        backward += [(wide + small, f), (f + wide, f), (f, small), *[(2 * small, small)] * 3, (small + vector, f)]
        backward += [(2 * f, f), (small, small), (small, small), (2 * small, small), (small, f), (f, f), (f, f)]
        backward += [(2 * f, f), (2 * f, f)] + ([(f, n)] if narrow else [])
    else:
        forward, backward = [(n, 2 * small), (n + 2 * small, y)], [(n + y + small, small), (n + y + 3 * small, n)]
    flops = 8 * T * R * H
    return by_kernels(
        "attention_residual",
        provider,
        dtype,
        {"T": T, "R": R, "H": H},
        (moved(forward, flops), moved(backward, 2 * flops)),
        floor_bytes=(n + y, 2 * n + y),
        floor_flops=(flops, 2 * flops),
        saved=f + 2 * small,
    )


def residual_rows(provider: str, dtype: str, T: int, R: int, H: int, S: int, apart: int = 0) -> OpCost:
    """What a layer that is given R rows does with them beside its two mixes: puts them side by side for each, unless
    they stay ``apart``, and adds to the last one twice, or once where it takes a snapshot (S = 1), whose second mix
    reads a row more.

    Backward: gradients that a row gets from both mixes are summed, and a snapshot's with those of other layers.
    """
    b = BYTES[dtype]
    y, n = T * H * b, T * R * H * b
    joined: Moves = [] if apart else [(n, n), (n + S * y, n + S * y)]
    forward: Moves = [*joined, *[(2 * y, y)] * (2 - S)]
    backward: Moves = [(2 * y, y)] * (2 * R)
    return by_kernels(
        "residual_rows",
        provider,
        dtype,
        {"T": T, "R": R, "H": H, "S": S, "apart": apart},
        (moved(forward, T * H), moved(backward, T * H)),
        floor_bytes=(3 * y, y),
        floor_flops=(T * H, T * H),
    )


def situ(provider: str, dtype: str, T: int, I: int) -> OpCost:
    """``β tanh(g/β) σ(g) · λ tanh(u/λ)`` over ``[T, I]``, in fp32 between the casts."""
    b, n = BYTES[dtype], T * I
    f = 4 * n
    if provider == "eager":
        widen, narrow = ([(n * b, f)], [(f, n * b)]) if b != 4 else ([], [])
        unary, binary = (f, f), (2 * f, f)
        forward = [*widen * 2, *[unary] * 7, *[binary] * 2, *narrow]
        backward = [*widen, *[binary] * 8, *[unary] * 4, *narrow * 2]
        saved = 2 * n * b + 6 * f
    else:
        forward, backward, saved = [(2 * n * b, n * b)], [(3 * n * b, 2 * n * b)], 2 * n * b
    return by_kernels(
        "situ",
        provider,
        dtype,
        {"T": T, "I": I},
        (moved(forward, 9 * n), moved(backward, 18 * n)),
        floor_bytes=(3 * n * b, 5 * n * b),
        floor_flops=(9 * n, 18 * n),
        saved=saved,
    )


def swiglu(provider: str, dtype: str, T: int, I: int) -> OpCost:
    """``silu(gate) · up`` over ``[T, I]``."""
    b, n = BYTES[dtype], T * I
    if provider == "eager":
        forward = [(n * b, n * b), (2 * n * b, n * b)]
        backward = [(2 * n * b, n * b), (2 * n * b, n * b), (2 * n * b, n * b)]
        saved = n * b
    else:
        forward, backward, saved = [(2 * n * b, n * b)], [(3 * n * b, 2 * n * b)], 0
    return OpCost(
        op="swiglu",
        provider=provider,
        dtype=dtype,
        shape={"T": T, "I": I},
        forward=Chain(tuple(forward), 5 * n).as_pass(3 * n * b, 5 * n),
        backward=Chain(tuple(backward), 10 * n).as_pass(5 * n * b, 10 * n),
        saved_bytes=saved,
    )


def activation(provider: str, dtype: str, T: int, I: int, A: int, S: int, wide: int = 0) -> OpCost:
    """A gate function over ``[T, I]``: eager as S kernels, compiled as one.

    Args:
        A: operands: 2 with a gate, 1 without.
        S: operations as the family spells them.
        wide: 1 where they run in fp32.
    """
    b, n = BYTES[dtype], T * I
    inner = n * (4 if wide else b)
    if provider == "eager":
        forward: Moves = [(inner, inner)] * (S - 1) + [(A * inner, inner)]
        backward: Moves = [(2 * inner, inner)] * (S + A - 1)
    else:
        forward, backward = [(A * n * b, n * b)], [((A + 1) * n * b, A * n * b)]
    flops = (A + 2) * n
    return by_kernels(
        "activation",
        provider,
        dtype,
        {"T": T, "I": I, "A": A, "S": S, "wide": wide},
        (moved(forward, flops), moved(backward, 2 * flops)),
        floor_bytes=((A + 1) * n * b, (2 * A + 1) * n * b),
        floor_flops=(flops, 2 * flops),
        saved=A * n * b,
    )
