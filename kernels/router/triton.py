# mypy: disable-error-code="no-untyped-def"
"""The router in Triton: one warp reads a row of logits once and keeps it in registers to the end.

Experts lie in a [GROUPS, MEMBERS] tile (powers of two; lanes beyond the real sizes can never be chosen).
Candidates are compared as (key, expert): the key is the fp32 value as an integer that orders the same way,
with NaN above everything and -0 equal to 0; of equal keys the lower expert wins. So the choice is exact and
has the same order in every run. Counts are integer atomics, probabilities add up in fixed order.

Legend: T tokens, E experts, K chosen experts, P programs; G groups of M members, E = G · M.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
EPSILON = tl.constexpr(1e-20)
NEVER = tl.constexpr(-2147483648)
"""Key below that of -inf: padding, dropped groups, experts already taken."""
NAN_KEY = tl.constexpr(2147483647)


@triton.jit
def ordered(value):
    """fp32 → int32 that compares the same way; NaN highest, both zeros equal."""
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = tl.where(value == 0.0, 0, key)
    return tl.where(value != value, NAN_KEY, key)


@triton.jit
def best_expert(key, expert):
    """The lowest expert that has the largest key."""
    top = tl.max(tl.max(key, axis=1), axis=0)
    return tl.min(tl.min(tl.where(key == top, expert, 0x7FFFFFFF), axis=1), axis=0)


@triton.jit
def decoded(key):
    """The fp32 value of a key made by ``ordered``; -inf for NEVER."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    return tl.where(key == NEVER, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def row_scores(x, real, SOFTMAX: tl.constexpr):
    """Scores of a row (padding 0), its largest logit, and the sum of what softmax or a share divides by."""
    largest = tl.max(tl.max(x, axis=1), axis=0)
    if SOFTMAX:
        raised = tl.where(real, tl.exp2((x - largest) * LOG2_E), 0.0)
        total = tl.sum(tl.sum(raised, axis=1), axis=0)
        score = raised / total
    else:
        score = tl.where(real, 1.0 / (1.0 + tl.exp2(-x * LOG2_E)), 0.0)
        total = tl.sum(tl.sum(score, axis=1), axis=0) + EPSILON
    return score, largest, total


@triton.jit
def kept_groups(value, group, G: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """1 for each of the KEPT groups of largest value, the lower group first among equals."""
    key = tl.where(group < G, ordered(value), NEVER)
    kept = tl.zeros([GROUPS], dtype=tl.int32)
    for _ in tl.static_range(KEPT):
        top = tl.max(key, axis=0)
        at = tl.min(tl.where(key == top, group, GROUPS), axis=0)
        kept = tl.where(group == at, 1, kept)
        key = tl.where(group == at, NEVER, key)
    return kept


@triton.jit(do_not_specialize=["T"])
def router_fwd_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    partial_ptr,
    scale,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    KEPT: tl.constexpr,
    TOP2: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """``weights [T, K]`` fp32, ``experts [T, K]`` int64, ``counts [E]`` int32 (added to), and one row of
    probability sums in ``partial [P, E]`` fp32 a program."""
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, MEMBERS)
    expert = group[:, None] * M + member[None, :]
    real = (group < G)[:, None] & (member < M)[None, :]
    slot = tl.arange(0, SLOTS)
    probability = tl.zeros([GROUPS, MEMBERS], dtype=tl.float32)
    for token in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        x = tl.load(logits_ptr + row * E + expert, mask=real, other=float("-inf")).to(tl.float32)
        score, largest, total = row_scores(x, real, SOFTMAX)
        if SOFTMAX:
            probability += score
        else:
            probability += score / total
        if BIASED:
            bias = tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
            key = tl.where(real, ordered(score + bias), NEVER)
        else:
            key = tl.where(real, ordered(x), NEVER)
        if KEPT < G:
            if BIASED:
                value_key = key
            else:
                value_key = tl.where(real, ordered(score), NEVER)
            first_key = tl.max(value_key, axis=1)
            value = decoded(first_key)
            if TOP2:
                where_first = tl.min(tl.where(value_key == first_key[:, None], member[None, :], MEMBERS), axis=1)
                rest = tl.where(member[None, :] == where_first[:, None], NEVER, value_key)
                value += decoded(tl.max(rest, axis=1))
            kept = kept_groups(value, group, G, GROUPS, KEPT)
            key = tl.where(kept[:, None] > 0, key, NEVER)
        chosen = tl.zeros([SLOTS], dtype=tl.int32)
        for place in tl.range(0, K):
            at = best_expert(key, expert)
            chosen = tl.where(slot == place, at, chosen)
            key = tl.where(expert == at, NEVER, key)
        used = slot < K
        picked = tl.load(logits_ptr + row * E + chosen, mask=used, other=0.0).to(tl.float32)
        if SOFTMAX:
            weight = tl.exp2((picked - largest) * LOG2_E) / total
        else:
            weight = 1.0 / (1.0 + tl.exp2(-picked * LOG2_E))
        weight = tl.where(used, weight, 0.0)
        if RENORMALISE:
            weight = weight / (tl.sum(weight, axis=0) + EPSILON)
        tl.store(weights_ptr + row * K + slot, weight * scale, mask=used)
        tl.store(experts_ptr + row * K + slot, chosen.to(tl.int64), mask=used)
        tl.atomic_add(counts_ptr + chosen, 1, mask=used, sem="relaxed")
    start = tl.cast(tl.program_id(0), tl.int64) * E
    tl.store(partial_ptr + start + expert, probability, mask=real)


@triton.jit(do_not_specialize=["P", "T"])
def router_mean_kernel(partial_ptr, mean_ptr, P, T, E, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    """``mean [E]``: the sum over ``partial [P, E]`` in a fixed order, over T."""
    columns = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = columns < E
    total = tl.zeros([BLOCK_P, BLOCK_E], dtype=tl.float32)
    for first in tl.range(0, P, BLOCK_P):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + rows[:, None] * E + columns[None, :], mask=mask, other=0.0)
    tl.store(mean_ptr + columns, tl.sum(total, axis=0) / T, mask=inside)


@triton.jit(do_not_specialize=["T"])
def router_bwd_kernel(
    logits_ptr,
    experts_ptr,
    dweights_ptr,
    dmean_ptr,
    dlogits_ptr,
    scale,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALISE: tl.constexpr,
    MEAN_GRADIENT: tl.constexpr,
):
    """``dlogits [T, E]`` from the gradients of the weights ``[T, K]`` and of the mean probability ``[E]``.

    With v the chosen scores and S their sum: dv = scale · (dw - Σ dw·v / S) / S where weights are
    renormalised, else scale · dw. Softmax: dx = p · (dp - Σ dp·p). Sigmoid: dx = ds · s · (1 - s).
    """
    expert = tl.arange(0, COLUMNS)[None, :]
    real = expert < E
    slot = tl.arange(0, SLOTS)
    used = slot < K
    if MEAN_GRADIENT:
        dmean = tl.load(dmean_ptr + expert, mask=real, other=0.0) / T
    for token in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        x = tl.load(logits_ptr + row * E + expert, mask=real, other=float("-inf")).to(tl.float32)
        score, _, total = row_scores(x, real, SOFTMAX)
        chosen = tl.load(experts_ptr + row * K + slot, mask=used, other=-1).to(tl.int32)
        dweight = tl.load(dweights_ptr + row * K + slot, mask=used, other=0.0) * scale
        dscore = tl.zeros([1, COLUMNS], dtype=tl.float32)
        taken = tl.zeros([1, COLUMNS], dtype=tl.int32)
        for place in tl.range(0, K):
            here = expert == tl.sum(tl.where(slot == place, chosen, 0), axis=0)
            dscore = tl.where(here, tl.sum(tl.where(slot == place, dweight, 0.0), axis=0), dscore)
            taken = tl.where(here, 1, taken)
        if RENORMALISE:
            held = tl.where(taken > 0, score, 0.0)
            whole = tl.sum(tl.sum(held, axis=1), axis=0) + EPSILON
            along = tl.sum(tl.sum(dscore * held, axis=1), axis=0) / whole
            dscore = tl.where(taken > 0, (dscore - along) / whole, 0.0)
        if MEAN_GRADIENT:
            if SOFTMAX:
                dscore += dmean
            else:
                dscore += (dmean - tl.sum(tl.sum(dmean * score, axis=1), axis=0) / total) / total
        if SOFTMAX:
            dx = score * (dscore - tl.sum(tl.sum(dscore * score, axis=1), axis=0))
        else:
            dx = dscore * score * (1.0 - score)
        tl.store(dlogits_ptr + row * E + expert, dx.to(dlogits_ptr.dtype.element_ty), mask=real)
