# mypy: disable-error-code="no-untyped-def"
"""What is inside a chunk of KDA, before its state is known: pairs, inverse, w, u, decayed q and k.

A chunk's pairs (i, j) are a triangle of blocks of B = 16 tokens. A block row is products of two factors, both relative
to the running sum at the token before the row's first: ``exp2(total_i - origin)`` for rows and
``exp2(origin - total_j)`` for columns of earlier blocks. Every exponent is at most 0 whatever the gate does, and the
origin lies in the past of every row, so that later tokens cannot change a bit. A column's factor is made once, relative
to the end of its own block, and shrinks from block row to block row by the decay of a whole block. Blocks on the
diagonal take the same origin where the gate is bounded: one factor may grow there, to 2 ** 58 at most. Otherwise their
pairs are computed by levels: nodes of 16, 8, 4 and 2 tokens, rows in the right half, columns in the left, relative to
the last token of the left half.

``(I + A)⁻¹`` is made block by block: the diagonal ones grow from one token to 16, and what is left of them follows
row by row, ``X_rc = -X_rr Σ A_rm X_mc``. No power of A is formed: entries stay as small as those of the inverse.

One warp makes the pairs and the inverse of a chunk: 16 x 16 blocks are one matrix instruction wide, no warp waits for
another, and copies to shared memory run ahead of the products. What follows from the inverse is a kernel of its own, at
the speed of memory, which a backward runs again.

Legend: C tokens of a chunk, B of a block, H key heads, HV value heads, G = HV / H, K key width, V value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.kda.triton import HALF_SPAN, NORM_EPS, load_beta, load_rows


@triton.jit
def with_more(found, new):
    """A tuple of tensors and one more."""
    return found + (new,)  # noqa: RUF005  (triton has no starred tuples)


@triton.jit
def with_one(found, at: tl.constexpr, new, count: tl.constexpr):
    """``count`` tensors, the one at a place exchanged."""
    out = ()
    for n in tl.static_range(count):
        if n == at:
            out = with_more(out, new)
        else:
            out = with_more(out, found[n])
    return out


@triton.jit
def zeros(count: tl.constexpr, shape: tl.constexpr):
    """``count`` tensors of zeros, fp32."""
    out = ()
    for _ in tl.static_range(count):
        out = with_more(out, tl.zeros(shape, tl.float32))
    return out


@triton.constexpr_function
def place(r, c):
    """Where block (r, c) of a triangle stands among its blocks, row by row."""
    return r * (r + 1) // 2 + c


@triton.jit
def block_rows(ptr, r: tl.constexpr, count, stride, cols, B: tl.constexpr):
    """``[B, cols]`` of block r of a chunk's rows, fp32; 0 for rows past the end."""
    rows = tl.arange(0, B)
    at = rows[:, None] * stride + cols[None, :]
    return tl.load(ptr + r * B * stride + at, mask=(r * B + rows < count)[:, None], other=0.0).to(tl.float32)


@triton.jit
def block_inverse(a, B: tl.constexpr, PREC: tl.constexpr):
    """``(I + a)⁻¹`` of a strictly lower triangular ``a [B, B]``, fp32, B = 16."""
    i = tl.arange(0, B)[:, None]
    j = tl.arange(0, B)[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where((i ^ j) == 1, a, 0.0)
    for level in tl.static_range(1, 4):
        x -= tl.dot(x, tl.dot(tl.where(((i ^ j) >> level) == 1, a, 0.0), x, input_precision=PREC), input_precision=PREC)
    return x


@triton.jit
def pairs_by_levels(q_ptr, k_ptr, total_ptr, r: tl.constexpr, count, stride, K: tl.constexpr, BK: tl.constexpr,
                    B: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr, narrow: tl.constexpr):  # fmt: skip
    """Pairs of k and of q in block r on the diagonal, ``[B, B]``, whatever the decays."""
    rows = tl.arange(0, B)
    i = rows[:, None]
    j = rows[None, :]
    a = zeros(4, (B, B))
    p = zeros(4, (B, B))
    own = tl.zeros((B,), tl.float32)
    for kb in tl.range(K // BK, num_stages=STAGES):
        cols = kb * BK + tl.arange(0, BK)
        base = total_ptr + r * B * K + cols[None, :]
        k = block_rows(k_ptr, r, count, stride, cols, B)
        q = block_rows(q_ptr, r, count, stride, cols, B)
        own += tl.sum(q * k, 1)
        total = tl.load(base + i * K)
        for level in tl.static_range(4):
            origin = (rows >> (4 - level) << (4 - level)) + (8 >> level) - 1
            factor = tl.exp2(-tl.abs(total - tl.load(base + origin[:, None] * K)))
            kf = (k * factor).to(narrow)
            qf = (q * factor).to(narrow)
            a = with_one(a, level, tl.dot(kf, tl.trans(kf), a[level], input_precision=PREC), 4)
            p = with_one(p, level, tl.dot(qf, tl.trans(kf), p[level], input_precision=PREC), 4)
    all_a = tl.zeros((B, B), tl.float32)
    all_p = tl.where(i == j, own[:, None], 0.0)
    for level in tl.static_range(4):
        mask = ((i ^ j) >> (3 - level)) == 1
        all_a += tl.where(mask, a[level], 0.0)
        all_p += tl.where(mask, p[level], 0.0)
    return all_a, all_p


@triton.jit
def kda_pairs_kernel(
    q_ptr, k_ptr, beta_ptr, total_ptr, table_ptr, p_ptr, inverse_ptr, norms_ptr, scale, HV, G,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BLOCKED: tl.constexpr, SIGMOID: tl.constexpr,
    PREC: tl.constexpr, SOLVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: the reads P, the inverse, and the norms.

    Writes p, its columns without the factors of k, and the inverse ``[.., C, C]`` in q's dtype, and the factors 1/norm
    of q and k ``[.., 2, C]`` in fp32.
    """
    hv = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    tile = chunk * HV + hv
    H = HV // G
    start = tl.load(table_ptr + 2 * chunk)
    count = tl.load(table_ptr + 2 * chunk + 1) - start
    first = start.to(tl.int64)
    q_ptr += (first * H + hv // G) * K
    k_ptr += (first * H + hv // G) * K
    beta_ptr += first * HV + hv
    total_ptr += tile * C * K
    p_ptr += tile * C * C
    inverse_ptr += tile * C * C
    norms_ptr += tile * 2 * C
    narrow: tl.constexpr = p_ptr.dtype.element_ty
    B: tl.constexpr = 16
    N: tl.constexpr = C // B
    BLOCKS: tl.constexpr = N * (N + 1) // 2
    rows = tl.arange(0, B)
    i = rows[:, None]
    j = rows[None, :]

    a = zeros(BLOCKS, (B, B))
    p = zeros(BLOCKS, (B, B))
    k_squares = zeros(N, (B,))
    q_squares = zeros(N, (B,))
    for kb in tl.range(K // BK, num_stages=STAGES):
        cols = kb * BK + tl.arange(0, BK)
        origin = tl.zeros((BK,), tl.float32)
        past = ()
        for r in tl.static_range(N):
            k = block_rows(k_ptr, r, count, H * K, cols, B)
            q = block_rows(q_ptr, r, count, H * K, cols, B)
            k_squares = with_one(k_squares, r, k_squares[r] + tl.sum(k * k, 1), N)
            q_squares = with_one(q_squares, r, q_squares[r] + tl.sum(q * q, 1), N)
            span = tl.load(total_ptr + ((r * B + i) * K + cols[None, :])) - origin[None, :]
            if r > 0:
                above = tl.exp2(span)
                kf = (k * above).to(narrow)
                qf = (q * above).to(narrow)
                for c in tl.static_range(r):
                    f = tl.trans(past[c].to(narrow))
                    a = with_one(a, place(r, c), tl.dot(kf, f, a[place(r, c)], input_precision=PREC), BLOCKS)
                    p = with_one(p, place(r, c), tl.dot(qf, f, p[place(r, c)], input_precision=PREC), BLOCKS)
            if BLOCKED:
                above = tl.exp2(span + HALF_SPAN)
                f = tl.trans((k * tl.exp2(-span - HALF_SPAN)).to(narrow))
                kf = (k * above).to(narrow)
                qf = (q * above).to(narrow)
                a = with_one(a, place(r, r), tl.dot(kf, f, a[place(r, r)], input_precision=PREC), BLOCKS)
                p = with_one(p, place(r, r), tl.dot(qf, f, p[place(r, r)], input_precision=PREC), BLOCKS)
            if r < N - 1:
                end = tl.load(total_ptr + (r * B + B - 1) * K + cols)
                whole = (end - origin)[None, :]
                further = ()
                for c in tl.static_range(r):
                    further = with_more(further, past[c] * tl.exp2(whole))
                past = with_more(further, k * tl.exp2(whole - span))
                origin = end

    k_norms = ()
    q_norms = ()
    for r in tl.static_range(N):
        k_norms = with_more(k_norms, 1.0 / tl.sqrt(k_squares[r] + NORM_EPS))
        q_norms = with_more(q_norms, scale / tl.sqrt(q_squares[r] + NORM_EPS))
        tl.store(norms_ptr + r * B + rows, q_norms[r])
        tl.store(norms_ptr + C + r * B + rows, k_norms[r])
        at = r * B * C + (i * C + j)
        for c in tl.static_range(r):
            tl.store(p_ptr + (at + c * B), (p[place(r, c)] * q_norms[r][:, None]).to(narrow))
    x = ()
    for r in tl.static_range(N):
        pairs = a[place(r, r)]
        reads = p[place(r, r)]
        if not BLOCKED:
            pairs, reads = pairs_by_levels(q_ptr, k_ptr, total_ptr, r, count, H * K, K, BK, B, PREC, STAGES, narrow)
        at = r * B * C + (i * C + j)
        reads = reads * q_norms[r][:, None]
        tl.store(p_ptr + (at + r * B), tl.where(i >= j, reads, 0.0).to(narrow))
        beta = load_beta(beta_ptr, r * B + rows, r * B + rows < count, 0, HV, SIGMOID)
        left = (beta * k_norms[r])[:, None]
        corner = block_inverse(tl.where(i > j, pairs * left * k_norms[r][None, :], 0.0), B, SOLVE)
        for c in tl.static_range(r):
            some = tl.zeros((B, B), tl.float32)
            for m in tl.static_range(c, r):
                between = a[place(r, m)] * left * k_norms[m][None, :]
                some = tl.dot(between, x[place(m, c)], some, input_precision=SOLVE)
            x = with_more(x, -tl.dot(corner, some, input_precision=SOLVE))
        x = with_more(x, corner)
        for c in tl.static_range(r + 1):
            tl.store(inverse_ptr + (at + c * B), x[place(r, c)].to(narrow))
        for c in tl.static_range(r + 1, N):
            tl.store(p_ptr + (at + c * B), tl.zeros((B, B), narrow))
            tl.store(inverse_ptr + (at + c * B), tl.zeros((B, B), narrow))


@triton.jit
def kda_widths_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, total_ptr, table_ptr, inverse_ptr, norms_ptr, w_ptr, u_ptr, qe_ptr, ke_ptr, HV, G,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SIGMOID: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: what follows from its inverse and norms, ``w``, decayed q and k ``[.., C, K]`` and
    ``u [.., C, V]`` in q's dtype.

    ``beta v`` enters u with what it loses by rounding: where decays are strong u is little else, and every result and
    gradient has its error. The factors 1/norm of keys are in w and u, not in decayed k, P's columns or what the state
    gets: a key that nothing has decayed yet is then exact, and equal keys are rounded alike.
    """
    hv = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    tile = chunk * HV + hv
    head = hv // G
    H = HV // G
    start = tl.load(table_ptr + 2 * chunk)
    end = tl.load(table_ptr + 2 * chunk + 1)
    rows = tl.arange(0, C)
    valid = start + rows < end
    tokens = (start + rows).to(tl.int64)
    narrow = w_ptr.dtype.element_ty
    i = rows[:, None]
    beta = load_beta(beta_ptr, tokens, valid, hv, HV, SIGMOID)
    inverse = tl.load(inverse_ptr + tile * C * C + i * C + rows[None, :])
    q_norm = tl.load(norms_ptr + tile * 2 * C + rows)
    k_norm = tl.load(norms_ptr + tile * 2 * C + C + rows)
    for vb in range(V // BV):
        cols = vb * BV + tl.arange(0, BV)
        v = load_rows(v_ptr, tokens, valid, hv, HV, cols, V)
        v *= beta[:, None]
        rounded = v.to(narrow)
        u = tl.dot(inverse, rounded, input_precision=PREC)
        u = tl.dot(inverse, (v - rounded.to(tl.float32)).to(narrow), u, input_precision=PREC) * k_norm[:, None]
        tl.store(u_ptr + (tile * C + i) * V + cols[None, :], u.to(narrow))
    for kb in range(K // BK):
        cols = kb * BK + tl.arange(0, BK)
        at = (tile * C + i) * K + cols[None, :]
        total = tl.load(total_ptr + at)
        whole = tl.load(total_ptr + (tile * C + C - 1) * K + cols)
        k = load_rows(k_ptr, tokens, valid, head, H, cols, K)
        q = load_rows(q_ptr, tokens, valid, head, H, cols, K) * q_norm[:, None]
        e = tl.exp2(total)
        tl.store(ke_ptr + at, (k * tl.exp2(whole[None, :] - total)).to(narrow))
        tl.store(qe_ptr + at, (q * e).to(narrow))
        w = tl.dot(inverse, (k * e * (beta * k_norm)[:, None]).to(narrow), input_precision=PREC)
        tl.store(w_ptr + at, (w * k_norm[:, None]).to(narrow))
