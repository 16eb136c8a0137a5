# mypy: disable-error-code="no-untyped-def"
"""dq, dk and dg inside one chunk on Hopper: what ``kda_keys_kernel`` computes, with every layout chosen by hand.

A program takes 32 key channels of a chunk in four warps of 16 tokens each. Everything by element lives in the layout
of the products' results, so that a value is exponentiated, scaled and rounded once, where it is used. Tiles that
several warps read come by asynchronous copies which are all under way before the first is needed.

Pairs are taken by blocks of 16 tokens. With ``o_b`` the running sum of log2-decays before block b, a pair of row i in
block b and column j in block c <= b decays by::

    exp2(total_i - total_j) = exp2(total_i - o_b) · exp2(o_b - o_c) · exp2(o_c - total_j)

The middle factor does not depend on the tokens: it scales sums, not operands, and as a product of steps from block to
block it never exceeds 1. So each operand is made once for all blocks: two exponentials an element. The last factor
grows, to 2 ** 115 at most for a gate of at least -5 a token; it and the first are shifted by half of that. Where
the gate has no bound, a chunk with a block that decays further takes the running sum at a block's end in place of
``o_c``, so that no exponent is positive, and its diagonal blocks by halves of 8, 4, 2 and 1 tokens.

A pair enters the gradient of the running sum at its row and at its column as the product of the same rounded factors;
suffix sums are exact products with ones, of three 16-bit parts. So pairs that do not span a token cancel.

Legend: C tokens of a chunk, R of a block, B = C / R; H key heads, HV value heads, K key width, V value width.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

LOG2E = gl.constexpr(1.4426950408889634)
HALF_SPAN = gl.constexpr(57.70780163555854)
"""Half of the largest span of a block at -5 a token, in log2 units."""
GIVEN = gl.constexpr(0)
BOUNDED = gl.constexpr(1)
R = gl.constexpr(16)


@gluon.constexpr_function
def rows_layout():
    """Results ``[C, columns]``: a block of 16 tokens a warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def blocks_layout():
    """The same registers as ``[B, R, columns]``."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def shared_layout(width):
    """Rows of ``width`` 16-bit values, of which eight neighbours are read without conflict."""
    phases = max(1, 64 // width)
    return gl.SwizzledSharedLayout(vec=8, per_phase=phases, max_phase=8 // phases, order=[1, 0])


@gluon.constexpr_function
def copy_layout(width):
    """16 bytes a thread."""
    lanes = min(width // 8, 16)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def sigmoid(z):
    """By two special functions and no division, within a few units of fp32's last place."""
    root = gl.rsqrt(1.0 + gl.exp2(z * -LOG2E))
    return root * root


@gluon.jit
def in_blocks(x, B: gl.constexpr, BK: gl.constexpr):
    """``[C, BK]`` as ``[B, R, BK]``."""
    return gl.convert_layout(gl.reshape(x, [B, R, BK]), blocks_layout(), assert_trivial=True)


@gluon.jit
def in_rows(x, B: gl.constexpr, BK: gl.constexpr):
    """``[B, R, BK]`` as ``[C, BK]``."""
    return gl.convert_layout(gl.reshape(x, [B * R, BK]), rows_layout(), assert_trivial=True)


@gluon.jit
def spread(x, B: gl.constexpr, BK: gl.constexpr):
    """``[B, BK]``, or ``[1, BK]`` for all blocks, on each row of a block: ``[C, BK]``."""
    return in_rows(gl.zeros([B, R, BK], gl.float32, layout=blocks_layout()) + x[:, None, :], B, BK)


@gluon.jit
def running_sum(total_ptr, line, K: gl.constexpr, BK: gl.constexpr):
    """Running sums of log2-decays at the tokens ``line [B or 1, 1]``: ``[B or 1, BK]``; 0 before the first."""
    c = gl.arange(0, BK, layout=gl.SliceLayout(0, gl.SliceLayout(1, blocks_layout())))[None, :]
    return gl.load(total_ptr + line * K + c, mask=(line >= 0) & (c >= 0), other=0.0)


@gluon.jit
def step_between(total_ptr, before, after, K: gl.constexpr, BK: gl.constexpr):
    """Decay from the start of one block to that of a later one ``[1, BK]``."""
    span = running_sum(total_ptr, after * R - 1, K, BK) - running_sum(total_ptr, before * R - 1, K, BK)
    return gl.exp2(gl.minimum(span, 0.0))


@gluon.jit
def fetch(target, ptr, stride, rest, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Starts the copy of ``[ROWS, WIDTH]`` values of rows ``stride`` apart; zeros from row ``rest`` on."""
    layout: gl.constexpr = copy_layout(WIDTH)
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    async_copy.async_copy_global_to_shared(target, ptr + i * stride + j, mask=(i < rest) & (j >= 0))


@gluon.jit
def pairs_with(tile, block: gl.constexpr, mild, COLUMN: gl.constexpr, BLOCKED: gl.constexpr, C: gl.constexpr):
    """Gradients ``[C, R]`` of all rows' pairs with the columns of a block; with COLUMN of all columns' with its rows.

    ``tile`` is lower triangular. The block's pairs with itself are left out unless ``mild``.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, rows_layout(), 2)
    if COLUMN:
        found = tile.permute((1, 0)).slice(block * R, R, 1).load(layout)
    else:
        found = tile.slice(block * R, R, 1).load(layout)
    if not BLOCKED:
        i = gl.arange(0, C, layout=gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, R, layout=gl.SliceLayout(0, layout))[None, :]
        apart = i < (block + mild) * R if COLUMN else i >= (block + 1 - mild) * R
        found = gl.where(apart & (j >= 0), found, 0.0).to(found.dtype)
    return found


@gluon.jit
def thirds(x):
    """Three 16-bit numbers whose sum is ``x``."""
    first = x.to(gl.bfloat16)
    rest = x - first.to(gl.float32)
    second = rest.to(gl.bfloat16)
    return first, second, (rest - second.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def suffix_sums(x, C: gl.constexpr, BK: gl.constexpr):
    """Sums over this row and all later ones ``[C, BK]``."""
    left: gl.constexpr = gl.DotOperandLayout(0, rows_layout(), 2)
    right: gl.constexpr = gl.DotOperandLayout(1, rows_layout(), 2)
    i = gl.arange(0, C, layout=gl.SliceLayout(1, left))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, left))[None, :]
    ones = gl.where(i <= j, 1.0, 0.0).to(gl.bfloat16)
    first, second, third = thirds(x)
    kept: gl.constexpr = shared_layout(BK)
    found = gl.zeros([C, BK], gl.float32, layout=rows_layout())
    found = mma_v2(ones, gl.allocate_shared_memory(gl.bfloat16, [C, BK], kept, third).load(right), found)
    found = mma_v2(ones, gl.allocate_shared_memory(gl.bfloat16, [C, BK], kept, second).load(right), found)
    return mma_v2(ones, gl.allocate_shared_memory(gl.bfloat16, [C, BK], kept, first).load(right), found)


@gluon.jit
def log2_softplus(z):
    """``log2(e) · softplus(z)``."""
    e = gl.exp2(-gl.abs(z) * LOG2E)
    small = e * (LOG2E - e * (0.5 * LOG2E))
    return gl.maximum(z, 0.0) * LOG2E + gl.where(e < 1e-3, small, gl.log2(1.0 + e))


@gluon.jit
def kda_keys_hopper_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, a_log_ptr, bias_ptr, total_ptr, table_ptr, do_ptr,
    norms_ptr, new_ptr, x_ptr, states_ptr, dstates_ptr, dp_ptr, da_ptr, along_ptr, shares_ptr,
    dq_ptr, dk_ptr, dg_ptr, dspeed_ptr, dbias_ptr,
    lower, scale, HV, G,
    K: gl.constexpr, V: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, C: gl.constexpr,
    GATE: gl.constexpr, BLOCKED: gl.constexpr, SIGMOID: gl.constexpr,
):  # fmt: skip
    """One block of key channels of one chunk of one value head; arguments and results as ``kda_keys_kernel``."""
    B: gl.constexpr = C // R
    ROWS: gl.constexpr = rows_layout()
    BLOCKS: gl.constexpr = blocks_layout()
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ROWS, 2)
    narrow: gl.constexpr = q_ptr.dtype.element_ty
    kb = gl.program_id(0)
    hv = gl.program_id(1)
    chunk = gl.program_id(2).to(gl.int64)
    tile = chunk * HV + hv
    H = HV // G
    start = gl.load(table_ptr + 2 * chunk)
    rest = gl.load(table_ptr + 2 * chunk + 1) - start
    start = start.to(gl.int64)
    total_ptr += tile * C * K + kb * BK
    own = (start * HV + hv) * K + kb * BK
    shared_head = (start * H + hv // G) * K + kb * BK

    s_dp = gl.allocate_shared_memory(narrow, [C, C], shared_layout(C))
    s_da = gl.allocate_shared_memory(narrow, [C, C], shared_layout(C))
    s_lost = gl.allocate_shared_memory(narrow, [C, C], shared_layout(C))
    da_ptr += tile * 2 * C * C
    fetch(s_dp, dp_ptr + tile * C * C, C, C, C, C)
    fetch(s_da, da_ptr, C, C, C, C)
    fetch(s_lost, da_ptr + C * C, C, C, C, C)
    async_copy.commit_group()
    s_do = gl.allocate_shared_memory(narrow, [C, V], shared_layout(V))
    s_x = gl.allocate_shared_memory(narrow, [C, V], shared_layout(V))
    s_new = gl.allocate_shared_memory(narrow, [C, V], shared_layout(V))
    s_state = gl.allocate_shared_memory(narrow, [BK, V], shared_layout(V))
    s_dstate = gl.allocate_shared_memory(narrow, [BK, V], shared_layout(V))
    fetch(s_state, states_ptr + (tile * K + kb * BK) * V, V, BK, BK, V)
    fetch(s_dstate, dstates_ptr + (tile * K + kb * BK) * V, V, BK, BK, V)
    fetch(s_do, do_ptr + (start * HV + hv) * V, HV * V, rest, C, V)
    fetch(s_x, x_ptr + tile * C * V, V, C, C, V)
    fetch(s_new, new_ptr + tile * C * V, V, C, C, V)
    async_copy.commit_group()

    i = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
    c = gl.arange(0, BK, layout=gl.SliceLayout(0, ROWS))
    row = i[:, None]
    col = c[None, :]
    there = (row < rest) & (col >= 0)
    beta = gl.load(beta_ptr + start * HV + hv + i * HV, mask=i < rest, other=0.0).to(gl.float32)
    if SIGMOID:
        beta = sigmoid(beta)
    else:
        beta = gl.where(gl.abs(beta) < 1e-20, 1e-20, beta)
    beta = gl.where(i < rest, beta, 0.0)[:, None]
    q_norm = gl.load(norms_ptr + tile * 2 * C + i)[:, None]
    k_norm = gl.load(norms_ptr + tile * 2 * C + C + i)[:, None]
    at = shared_head + row * (H * K) + col
    q = gl.load(q_ptr + at, mask=there, other=0.0).to(gl.float32) * q_norm
    k = gl.load(k_ptr + at, mask=there, other=0.0).to(gl.float32) * k_norm
    total = gl.load(total_ptr + row * K + col)

    block = gl.arange(0, B, layout=gl.SliceLayout(1, gl.SliceLayout(1, BLOCKS)))[:, None]
    origin = running_sum(total_ptr, block * R - 1, K, BK)
    span = in_blocks(total, B, BK) - origin[:, None, :]
    if BLOCKED:
        mild = gl.to_tensor(1)
        above = in_rows(gl.exp2(span + HALF_SPAN), B, BK)
        below = in_rows(gl.exp2(-HALF_SPAN - span), B, BK)
    else:
        end = running_sum(total_ptr, block * R + R - 1, K, BK)
        mild = (gl.min(gl.min(end - origin, 1), 0) > -2 * HALF_SPAN).to(gl.int32)
        shift = gl.where(mild == 1, HALF_SPAN, 0.0)
        above = in_rows(gl.exp2(span + shift), B, BK)
        base = gl.where(mild == 1, origin, end)
        below = in_rows(gl.exp2(base[:, None, :] - shift - in_blocks(total, B, BK)), B, BK)
    s_q = gl.allocate_shared_memory(narrow, [C, BK], shared_layout(BK), (q * above).to(narrow))
    s_b = gl.allocate_shared_memory(narrow, [C, BK], shared_layout(BK), (k * beta * above).to(narrow))
    s_k = gl.allocate_shared_memory(narrow, [C, BK], shared_layout(BK), (k * below).to(narrow))

    none = gl.zeros([C, BK], gl.float32, layout=ROWS)
    p = none
    a = none
    s = none
    async_copy.wait_group(1)
    gl.thread_barrier()
    for other in gl.static_range(B):
        if other > 0:
            step = step_between(total_ptr, other - mild, other + 1 - mild, K, BK)
            step = spread(gl.where(block > other - mild, step, 1.0), B, BK)
            p *= step
            a *= step
        factor = s_k.slice(other * R, R).load(RIGHT)
        p = mma_v2(pairs_with(s_dp, other, mild, False, BLOCKED, C), factor, p)
        a = mma_v2(pairs_with(s_da, other, mild, False, BLOCKED, C), factor, a)
        a = mma_v2(pairs_with(s_lost, other, mild, False, BLOCKED, C), factor, a)
    for other in gl.static_range(B - 1, -1, -1):
        if other < B - 1:
            step = step_between(total_ptr, other, other + 1, K, BK)
            s *= spread(gl.where(block < other + mild, step, 1.0), B, BK)
        s = mma_v2(pairs_with(s_dp, other, mild, True, BLOCKED, C), s_q.slice(other * R, R).load(RIGHT), s)
        factor = s_b.slice(other * R, R).load(RIGHT)
        s = mma_v2(pairs_with(s_da, other, mild, True, BLOCKED, C), factor, s)
        s = mma_v2(pairs_with(s_lost, other, mild, True, BLOCKED, C), factor, s)
    dtotal = s_q.load(ROWS).to(gl.float32) * p + s_b.load(ROWS).to(gl.float32) * a - s_k.load(ROWS).to(gl.float32) * s
    along_ptr += tile * 3 * C
    own_pair = gl.load(along_ptr + 2 * C + i)[:, None]
    dq = p * above + k * own_pair
    a *= above
    share = gl.sum(k * a, 1)
    dk = a * beta + s * below + q * own_pair
    if not BLOCKED:
        dp_ptr += tile * C * C
        if mild == 0:
            PAIRS: gl.constexpr = gl.DotOperandLayout(0, BLOCKS, 2)
            FACTORS: gl.constexpr = gl.DotOperandLayout(1, BLOCKS, 2)
            first = gl.arange(0, B, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))[:, None, None] * R
            r = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))[None, :, None]
            l = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))[None, None, :]
            inside = gl.where(r > l, (first + r) * C + first + l, (first + l) * C + first + r)
            dp = gl.load(dp_ptr + inside)
            da = gl.load(da_ptr + inside)
            zeros = gl.zeros([B, R, BK], gl.float32, layout=BLOCKS)
            for level in range(4):
                half = 8 >> level
                right = (row & half) != 0
                middle = (row & (-2 * half)) + half - 1
                weight = gl.where(right, beta, 1.0)
                f = gl.exp2(-gl.abs(total - gl.load(total_ptr + middle * K + col)))
                pf = (gl.where(right, q, k) * f).to(narrow)
                af = (k * weight * f).to(narrow)
                s_q.store(pf)
                s_b.store(af)
                joined = ((r ^ l) & (-half)) == half
                p = mma_v2(gl.where(joined, dp, 0.0).to(narrow), s_q.reshape([B, R, BK]).load(FACTORS), zeros)
                a = mma_v2(gl.where(joined, da, 0.0).to(narrow), s_b.reshape([B, R, BK]).load(FACTORS), zeros)
                p = in_rows(p, B, BK)
                a = in_rows(a, B, BK)
                both = pf.to(gl.float32) * p + af.to(gl.float32) * a
                dtotal += gl.where(right, both, -both)
                p *= f
                a *= f
                dq += gl.where(right, p, 0.0)
                share += gl.sum(gl.where(right, k * a, 0.0), 1)
                dk += gl.where(right, 0.0, p) + a * weight

    at = own + row * (HV * K) + col
    if GATE != GIVEN:
        raw = gl.load(g_ptr + at, mask=there, other=0.0)
    whole = gl.load(total_ptr + (C - 1) * K + c)
    p = none
    a = none
    s = none
    async_copy.wait_group(0)
    gl.thread_barrier()
    for vb in gl.static_range(V // BV):
        state = s_state.slice(vb * BV, BV, 1).permute((1, 0)).load(RIGHT)
        dstate = s_dstate.slice(vb * BV, BV, 1).permute((1, 0)).load(RIGHT)
        p = mma_v2(s_do.slice(vb * BV, BV, 1).load(LEFT), state, p)
        a = mma_v2(s_x.slice(vb * BV, BV, 1).load(LEFT), state, a)
        s = mma_v2(s_new.slice(vb * BV, BV, 1).load(LEFT), dstate, s)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dlast = gl.sum(s_state.load(WIDE).to(gl.float32) * s_dstate.load(WIDE).to(gl.float32), 1)
    e = gl.exp2(total)
    p *= e
    a *= -e
    share += gl.sum(k * a, 1)
    gl.store(shares_ptr + (tile * (K // BK + 1) + 1 + kb) * C + i, share)
    a *= beta
    s *= gl.exp2(whole[None, :] - total) / k_norm
    dlast = gl.convert_layout(dlast, gl.SliceLayout(0, ROWS)) * gl.exp2(whole) + gl.sum(k * s, 0)
    dtotal += q * p + k * (a - s)
    q_along = gl.load(along_ptr + i)[:, None] / (scale * scale)
    k_along = gl.load(along_ptr + C + i)[:, None]
    dq = (dq + p - q * q_along) * q_norm
    dk = (dk + a + s - k * k_along) * k_norm
    gl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=there)
    gl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=there)

    dg = gl.where(there, suffix_sums(dtotal, C, BK) + dlast[None, :], 0.0)
    if GATE != GIVEN:
        speed = gl.exp2(gl.load(a_log_ptr + hv).to(gl.float32) * LOG2E)
        biased = raw.to(gl.float32) + gl.load(bias_ptr + hv * K + kb * BK + c).to(gl.float32)[None, :]
        if GATE == BOUNDED:
            z = speed * biased
            gate = sigmoid(z)
            dg *= gate * (1.0 - gate) * lower
            dspeed = gl.sum(gl.sum(dg * z, 1), 0)
            dg *= speed
        else:
            dspeed = gl.sum(gl.sum(dg * log2_softplus(biased), 1), 0) * (-speed / LOG2E)
            dg *= -speed * sigmoid(biased)
        gl.store(dbias_ptr + tile * K + kb * BK + c, gl.sum(dg, 0))
        gl.store(dspeed_ptr + tile * (K // BK) + kb, dspeed)
    gl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=there)
