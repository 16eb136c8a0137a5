# mypy: disable-error-code="no-untyped-def, assignment"
"""Depthwise causal convolution over J taps with SiLU, forward and backward; documents apart, first and last states.

``z_t = Σ_d w_d x_(t-J+1+d)`` and ``y = z σ(z)``; before a document's first token stand the J - 1 inputs of its initial
state, or zeros. Sums are fp32 and one rounding ends them.

A program walks down one piece of a document for one block of channels. A lane owns its channels, so the rows that a sum
needs are its own registers: the last J - 1 inputs, and in the backward the last J - 1 gradients of z. Each row of x and
dy is read once, each z is computed once, and the rows of the next step are on their way while this one computes: in
registers (STAGES 1), or STAGES - 1 steps ahead in shared memory. In the backward the step at token u makes the gradient
of token t = u - J + 1: dx_t = Σ_s w_(J-1-s) dz_(t+s), and adds x_t dz_(t+J-1-d) to the gradient of tap d. A piece goes
J - 1 tokens into its successor.

Legend: C channels, J taps, BC channels of a program, PIECE tokens of a piece, NT pieces, ROWS tokens of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(table_ptr, C: tl.constexpr, BC: tl.constexpr):
    """Channels and piece of this program: ``cols``, which of them exist, number, first token, begin and end of its
    document, the document."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    piece = tl.program_id(0) // blocks
    cols = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    start = tl.load(table_ptr + 4 * piece)
    begin = tl.load(table_ptr + 4 * piece + 1)
    end = tl.load(table_ptr + 4 * piece + 2)
    doc = tl.load(table_ptr + 4 * piece + 3).to(tl.int64)
    return cols, cols < C, piece.to(tl.int64), start, begin, end, doc


@triton.jit
def read(ptr, first, stop, cols, there, C: tl.constexpr, ROWS: tl.constexpr):
    """The rows ``first`` to ``first + ROWS - 1`` as they lie in memory; zeros from ``stop`` on."""
    rows = ()
    base = ptr + tl.cast(first, tl.int64) * C
    for r in tl.static_range(ROWS):
        inside = there & (first + r < stop)
        rows = rows + (tl.load(base + r * C + cols, mask=inside, other=0.0),)  # noqa: RUF005 - triton has no star here
    return rows


@triton.jit
def before(
    x_ptr, initial_ptr, start, begin, end, doc, cols, there, C: tl.constexpr, J: tl.constexpr,
    WITH_INITIAL: tl.constexpr,
):  # fmt: skip
    """The J - 1 inputs before token ``start``, fp32, oldest first: of the document, else of its initial state."""
    window = ()
    for i in tl.static_range(J - 1):
        token = start - (J - 1) + i
        own = there & (token >= begin) & (token < end)
        x = tl.load(x_ptr + token.to(tl.int64) * C + cols, mask=own, other=0.0).to(tl.float32)
        if WITH_INITIAL:
            at = (doc * C + cols) * (J - 1) + (token - begin + J - 1)
            x += tl.load(initial_ptr + at, mask=there & (token < begin), other=0.0).to(tl.float32)
        window = window + (x,)  # noqa: RUF005
    return window


@triton.jit
def taps(w_ptr, cols, there, J: tl.constexpr):
    """The J taps of each channel, fp32."""
    found = ()
    for d in tl.static_range(J):
        found = found + (tl.load(w_ptr + cols * J + d, mask=there, other=0.0).to(tl.float32),)  # noqa: RUF005
    return found


@triton.jit
def weighed(window, x, w, J: tl.constexpr):
    """``z`` of a token from the J - 1 inputs before it and its own."""
    z = x * w[J - 1]
    for d in tl.static_range(J - 1):
        z += window[d] * w[d]
    return z


@triton.jit
def sigmoid(z, EXACT: tl.constexpr):
    """``σ(z)``; unless ``EXACT`` by two special functions and no division, within a few units of fp32's last place."""
    if EXACT:
        return tl.sigmoid(z)
    else:
        root = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
        return root * root


@triton.jit
def sum_gradient(dy, z, SILU: tl.constexpr, EXACT: tl.constexpr):
    """Gradient of z."""
    if SILU:
        gate = sigmoid(z, EXACT)
        return dy * (gate + z * gate * (1.0 - gate))
    else:
        return dy


@triton.jit
def short_conv_fwd_kernel(
    x_ptr, w_ptr, initial_ptr, table_ptr, y_ptr, final_ptr,
    C: tl.constexpr, J: tl.constexpr, BC: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    SILU: tl.constexpr, WITH_INITIAL: tl.constexpr, WITH_FINAL: tl.constexpr,
):  # fmt: skip
    """``y [tokens, C]`` of one piece and block of channels; in a document's last piece ``final [N, C, J - 1]``."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    cols, there, _, start, begin, end, doc = place(table_ptr, C, BC)
    stop = tl.minimum(start + PIECE, end)
    w = taps(w_ptr, cols, there, J)
    window = before(x_ptr, initial_ptr, start, begin, end, doc, cols, there, C, J, WITH_INITIAL)
    if STAGES == 1:
        rows = read(x_ptr, start, stop, cols, there, C, ROWS)
    for first in tl.range(start, stop, ROWS, num_stages=STAGES):
        if STAGES == 1:
            following = read(x_ptr, first + ROWS, stop, cols, there, C, ROWS)
        else:
            rows = read(x_ptr, first, stop, cols, there, C, ROWS)
        out = y_ptr + tl.cast(first, tl.int64) * C
        for r in tl.static_range(ROWS):
            x = rows[r].to(tl.float32)
            z = weighed(window, x, w, J)
            if SILU:
                z = z * sigmoid(z, EXACT)
            tl.store(out + r * C + cols, z.to(y_ptr.dtype.element_ty), mask=there & (first + r < stop))
            window = window[1:] + (x,)  # noqa: RUF005
        if STAGES == 1:
            rows = following
    if WITH_FINAL:  # noqa: SIM102 - one is known to the compiler, the other is not
        if stop == end:
            last = before(x_ptr, initial_ptr, end, begin, end, doc, cols, there, C, J, WITH_INITIAL)
            for i in tl.static_range(J - 1):
                at = (doc * C + cols) * (J - 1) + i
                tl.store(final_ptr + at, last[i].to(final_ptr.dtype.element_ty), mask=there)


@triton.jit
def short_conv_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, initial_ptr, dfinal_ptr, table_ptr, dx_ptr, dw_ptr, dinitial_ptr,
    C: tl.constexpr, J: tl.constexpr, BC: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    SILU: tl.constexpr, WITH_INITIAL: tl.constexpr, WITH_FINAL: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr,
):  # fmt: skip
    """``dx [tokens, C]`` of one piece and block of channels; its shares of dw ``[NT, J, C]``, fp32; in a document's
    first piece ``dinitial [N, C, J - 1]``. ``dfinal [N, C, J - 1]`` enters at the tokens that it was taken from."""
    tl.static_assert(PIECE % ROWS == 0, "a step that passes a piece's end would count inputs of the next")
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    cols, there, piece, start, begin, end, doc = place(table_ptr, C, BC)
    stop = tl.minimum(start + PIECE, end)
    reach = tl.minimum(stop + J - 1, end)
    w = taps(w_ptr, cols, there, J)
    xs = before(x_ptr, initial_ptr, start, begin, end, doc, cols, there, C, J, WITH_INITIAL)
    none = tl.zeros((BC,), tl.float32)
    dzs = ()
    dw = ()
    for _ in tl.static_range(J - 1):
        dzs = dzs + (none,)  # noqa: RUF005
    if WEIGHT_GRADIENT:
        for _ in tl.static_range(J):
            dw = dw + (none,)  # noqa: RUF005
    rows = read(x_ptr, start, reach, cols, there, C, J - 1)
    drows = read(dy_ptr, start, reach, cols, there, C, J - 1)
    if STAGES == 1:
        x_rows = read(x_ptr, start + J - 1, reach, cols, there, C, ROWS)
        dy_rows = read(dy_ptr, start + J - 1, reach, cols, there, C, ROWS)
    for i in tl.static_range(J - 1):
        x = rows[i].to(tl.float32)
        dz = sum_gradient(drows[i].to(tl.float32), weighed(xs, x, w, J), SILU, EXACT)
        if WITH_INITIAL:
            first_piece = there & (start == begin)
            at = (doc * C + cols) * (J - 1) + i
            dx = weighed_back(dzs, dz, w, J)
            if WITH_FINAL:
                late = (doc * C + cols) * (J - 1) + (start + i - end)
                dx += tl.load(dfinal_ptr + late, mask=first_piece & (start + i >= end), other=0.0).to(tl.float32)
            tl.store(dinitial_ptr + at, dx.to(dinitial_ptr.dtype.element_ty), mask=first_piece)
            if WEIGHT_GRADIENT:
                dw = shared(dw, tl.where(first_piece, xs[0], 0.0), dzs, dz, J)
        xs = xs[1:] + (x,)  # noqa: RUF005
        dzs = dzs[1:] + (dz,)  # noqa: RUF005
    for first in tl.range(start + J - 1, stop + J - 1, ROWS, num_stages=STAGES):
        if STAGES == 1:
            x_next = read(x_ptr, first + ROWS, reach, cols, there, C, ROWS)
            dy_next = read(dy_ptr, first + ROWS, reach, cols, there, C, ROWS)
        else:
            x_rows = read(x_ptr, first, reach, cols, there, C, ROWS)
            dy_rows = read(dy_ptr, first, reach, cols, there, C, ROWS)
        out = dx_ptr + tl.cast(first - (J - 1), tl.int64) * C
        made = ()
        for r in tl.static_range(ROWS):
            x = x_rows[r].to(tl.float32)
            dz = sum_gradient(dy_rows[r].to(tl.float32), weighed(xs, x, w, J), SILU, EXACT)
            made = made + (weighed_back(dzs, dz, w, J),)  # noqa: RUF005
            if WEIGHT_GRADIENT:
                dw = shared(dw, xs[0], dzs, dz, J)
            xs = xs[1:] + (x,)  # noqa: RUF005
            dzs = dzs[1:] + (dz,)  # noqa: RUF005
        if WITH_FINAL:  # noqa: SIM102
            if first + ROWS > end:
                made = with_final(made, dfinal_ptr, first - end, doc, cols, there, C, J, ROWS)
        for r in tl.static_range(ROWS):
            inside = there & (first - (J - 1) + r < stop)
            tl.store(out + r * C + cols, made[r].to(dx_ptr.dtype.element_ty), mask=inside)
        if STAGES == 1:
            x_rows = x_next
            dy_rows = dy_next
    if WEIGHT_GRADIENT:
        for d in tl.static_range(J):
            tl.store(dw_ptr + (piece * J + d) * C + cols, dw[d], mask=there)


@triton.jit
def weighed_back(dzs, dz, w, J: tl.constexpr):
    """Gradient of the input J - 1 tokens back, from the J - 1 gradients of z before this token's and its own."""
    dx = dz * w[0]
    for s in tl.static_range(J - 1):
        dx += dzs[s] * w[J - 1 - s]
    return dx


@triton.jit
def shared(dw, x, dzs, dz, J: tl.constexpr):
    """Sums of the taps' gradients with those of the input ``x``, J - 1 tokens back."""
    found = (dw[0] + x * dz,)
    for d in tl.static_range(1, J):
        found = found + (dw[d] + x * dzs[J - 1 - d],)  # noqa: RUF005
    return found


@triton.jit
def with_final(
    made, dfinal_ptr, past, doc, cols, there, C: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Gradients of a step's inputs with those of the document's last inputs; ``past`` tokens lie between the
    document's end and the step's first token."""
    found = ()
    for r in tl.static_range(ROWS):
        at = (doc * C + cols) * (J - 1) + (past + r)
        inside = there & (past + r >= 0) & (past + r < J - 1)
        found = found + (made[r] + tl.load(dfinal_ptr + at, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005
    return found


@triton.jit
def short_conv_taps_kernel(
    shares_ptr, dw_ptr, NT, C: tl.constexpr, J: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``dw [C, J]``: the pieces' shares ``[NT, J, C]`` of one tap and block of channels, summed in a fixed order."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    tap = tl.program_id(0) // blocks
    cols = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    there = cols < C
    total = tl.zeros((BN, BC), tl.float32)
    for first in range(0, NT, BN):
        pieces = first + tl.arange(0, BN)
        at = (pieces.to(tl.int64) * J + tap)[:, None] * C + cols[None, :]
        total += tl.load(shares_ptr + at, mask=(pieces < NT)[:, None] & there[None, :], other=0.0)
    tl.store(dw_ptr + cols * J + tap, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), mask=there)
