# mypy: disable-error-code="no-untyped-def"
"""How a consumer of the Hopper product leaves with its sums: bias, rounding, activation, whole rows to memory.

Two accumulators of 64 rows and 128 columns leave in pairs of pieces of 64 columns, so that few registers are needed
beside them. Pieces go through shared memory, where they take the layout in which whole 128-byte rows are stored.
Sums of few rows lie across (``hopper_few``): their pieces are turned on that way.

Legend: I expert width, N columns; ``n0`` and ``n1`` first columns of the two pieces of a pair.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shardwright.kernels.grouped_lora_mlp.hopper_activation import activate


@gluon.constexpr_function
def copy_layout():
    """16 bytes a thread, eight threads a row of 64 values."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _pass(piece, staging):
    """64 rows x 64 columns out of the accumulators, rounded, in the layout in which whole 128-byte rows leave."""
    staging.store(piece.to(staging.dtype))
    return staging.load(copy_layout())


@gluon.jit
def _store(pointer, value, first, last, n, width, layout: gl.constexpr):
    rows = first + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, layout))
    columns = n + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, layout))
    at = pointer + rows.to(gl.int64)[:, None] * width + columns[None, :]
    gl.store(at, value, mask=(rows < last)[:, None] & (columns < width)[None, :])


@gluon.jit
def _halves(run):
    """Columns 0..63 and 64..127 of a run."""
    return run.reshape([64, 2, 64]).permute((0, 2, 1)).split()


@gluon.jit
def _biased(piece, bias_at, n, N, DIM: gl.constexpr):
    """A piece with its 64 columns' bias, columns along ``DIM``: a quarter of a consumer's columns at a time, so that
    few registers hold it."""
    columns = n + gl.arange(0, 64, layout=gl.SliceLayout(1 - DIM, piece.type.layout))
    bias = gl.load(bias_at + columns, mask=columns < N, other=0.0).to(gl.float32)
    return piece + gl.expand_dims(bias, 1 - DIM)


@gluon.jit
def _leave(
    g, u, y_ptr, h_ptr, first, last, n0, n1, n, N, I, FUSE: gl.constexpr, HALVES: gl.constexpr, SAVE: gl.constexpr,
    KIND: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
):  # fmt: skip
    """Two rounded pieces of 64 columns leave as they are (``SAVE``), and as their activation (``FUSE``).

    A gate piece that passes I meets up columns: what it stores there is what their own tile stores, bit for bit.
    """
    wide: gl.constexpr = copy_layout()
    if SAVE:
        _store(y_ptr, g, first, last, n0, N, wide)
        _store(y_ptr, u, first, last, n1, N, wide)
    if FUSE and HALVES:
        h = activate(g.to(gl.float32), u.to(gl.float32), KIND, P0, P1, P2).to(h_ptr.dtype.element_ty)
        _store(h_ptr, h, first, last, n, I, wide)
    if FUSE and not HALVES:
        narrow: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        a, b = g.reshape([g.shape[0], 32, 2]).split()
        h = activate(a.to(gl.float32), b.to(gl.float32), KIND, P0, P1, P2).to(h_ptr.dtype.element_ty)
        _store(h_ptr, gl.convert_layout(h, narrow), first, last, n, I, narrow)
        a, b = u.reshape([u.shape[0], 32, 2]).split()
        h = activate(a.to(gl.float32), b.to(gl.float32), KIND, P0, P1, P2).to(h_ptr.dtype.element_ty)
        _store(h_ptr, gl.convert_layout(h, narrow), first, last, n + 64, I, narrow)


@gluon.jit
def _pair(
    p, q, y_ptr, h_ptr, bias_at, staging, first, last, n0, n1, n, N, I, FUSE: gl.constexpr, HALVES: gl.constexpr,
    SAVE: gl.constexpr, BIAS: gl.constexpr, KIND: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
):  # fmt: skip
    """Two pieces of 64 rows and 64 columns."""
    if BIAS:
        p, q = _biased(p, bias_at, n0, N, 1), _biased(q, bias_at, n1, N, 1)
    g, u = _pass(p, staging), _pass(q, staging)
    _leave(g, u, y_ptr, h_ptr, first, last, n0, n1, n, N, I, FUSE, HALVES, SAVE, KIND, P0, P1, P2)


@gluon.jit
def finish(
    a, b, y_ptr, h_ptr, bias_at, staging, first, last, column, n0, n1, N, I, FUSE: gl.constexpr, HALVES: gl.constexpr,
    SAVE: gl.constexpr, BIAS: gl.constexpr, KIND: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
):  # fmt: skip
    """Leave with the two runs of 128 columns, in pairs of 64: columns of h start at ``column · 128``."""
    a0, a1 = _halves(a)
    b0, b1 = _halves(b)
    n: gl.constexpr = 64 if HALVES else 32
    _pair(
        a0, b0, y_ptr, h_ptr, bias_at, staging, first, last, n0, n1, column * 128, N, I, FUSE, HALVES, SAVE, BIAS, KIND,
        P0, P1, P2,
    )  # fmt: skip
    _pair(
        a1, b1, y_ptr, h_ptr, bias_at, staging, first, last, n0 + 64, n1 + 64, column * 128 + n, N, I, FUSE, HALVES,
        SAVE, BIAS, KIND, P0, P1, P2,
    )  # fmt: skip


@gluon.jit
def _pair_across(
    p, q, y_ptr, h_ptr, bias_at, staging, first, last, n0, n1, n, N, I, FUSE: gl.constexpr, HALVES: gl.constexpr,
    SAVE: gl.constexpr, BIAS: gl.constexpr, KIND: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
):  # fmt: skip
    """Two pieces of 64 columns and few rows, rows last."""
    if BIAS:
        p, q = _biased(p, bias_at, n0, N, 0), _biased(q, bias_at, n1, N, 0)
    g, u = _pass(p.permute((1, 0)), staging), _pass(q.permute((1, 0)), staging)
    _leave(g, u, y_ptr, h_ptr, first, last, n0, n1, n, N, I, FUSE, HALVES, SAVE, KIND, P0, P1, P2)


@gluon.jit
def finish_across(
    a, b, y_ptr, h_ptr, bias_at, staging, first, last, column, n0, n1, N, I, FUSE: gl.constexpr, HALVES: gl.constexpr,
    SAVE: gl.constexpr, BIAS: gl.constexpr, KIND: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
):  # fmt: skip
    """``finish`` for sums that lie across: two runs [128 columns, few rows]."""
    few: gl.constexpr = a.shape[1]
    a0, a1 = a.reshape([2, 64, few]).permute((1, 2, 0)).split()
    b0, b1 = b.reshape([2, 64, few]).permute((1, 2, 0)).split()
    n: gl.constexpr = 64 if HALVES else 32
    _pair_across(
        a0, b0, y_ptr, h_ptr, bias_at, staging, first, last, n0, n1, column * 128, N, I, FUSE, HALVES, SAVE, BIAS, KIND,
        P0, P1, P2,
    )  # fmt: skip
    _pair_across(
        a1, b1, y_ptr, h_ptr, bias_at, staging, first, last, n0 + 64, n1 + 64, column * 128 + n, N, I, FUSE, HALVES,
        SAVE, BIAS, KIND, P0, P1, P2,
    )  # fmt: skip
