# mypy: disable-error-code="no-untyped-def"
"""Row metadata of a routing, and the sums that bring rows back to tokens. No atomics: same bits every run.

Rows are sorted by expert, and inside an expert by entry (token · K + slot). Four small launches find each
entry's row: ranks inside a chunk of entries, a scan over chunks, offsets and tiles, places. ``whole_triton`` makes
the last three one.

Legend: T tokens, K experts a token, N = T·K entries, E experts, R rows, H hidden, C chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sorted(key, at, LOG: tl.constexpr):
    """2^LOG keys in rising order; ``at`` are their places. A bitonic network: each step compares with one partner."""
    for stage in tl.static_range(1, LOG + 1):
        for step in tl.static_range(stage):
            apart = 1 << (stage - 1 - step)
            other = tl.gather(key, at ^ apart, 0)
            lower = (at & apart) == 0
            rising = ((at >> stage) & 1) == 0
            key = tl.where(lower == rising, tl.minimum(key, other), tl.maximum(key, other))
    return key


@triton.jit
def _running_maximum(value, at, LOG: tl.constexpr):
    """The largest of the 2^LOG values (none is negative) up to each place ``at``."""
    for step in tl.static_range(LOG):
        value = tl.maximum(value, tl.gather(value, tl.maximum(at - (1 << step), 0), 0))
    return value


@triton.jit(do_not_specialize=["N", "E"])
def rank_kernel(ids_ptr, rank_ptr, histogram_ptr, N, E, LOG: tl.constexpr, BINS: tl.constexpr):
    """``rank [N]``: earlier entries of the same expert in the chunk of 2^LOG; ``histogram [C, BINS]``.

    A chunk's entries are sorted by (expert, entry): an entry's rank is how far it stands behind its expert's first.
    Ids outside 0 .. E-1 fall into bin E, which no expert has.
    """
    CHUNK: tl.constexpr = 1 << LOG
    chunk = tl.program_id(0)
    inside = tl.arange(0, CHUNK)
    at = chunk * CHUNK + inside
    ids = tl.load(ids_ptr + at, mask=at < N, other=-1).to(tl.int32)
    ids = tl.where((ids >= 0) & (ids < E), ids, E)
    tl.store(histogram_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS))
    ordered = _sorted(ids * CHUNK + inside, inside, LOG)
    expert = ordered // CHUNK
    before = tl.gather(expert, tl.maximum(inside - 1, 0), 0)
    first = _running_maximum(tl.where(expert == before, 0, inside), inside, LOG)
    entry = chunk * CHUNK + ordered % CHUNK
    tl.store(rank_ptr + entry, inside - first, mask=entry < N)


@triton.jit(do_not_specialize=["C", "E"])
def scan_kernel(histogram_ptr, counts_ptr, C, E, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace ``histogram [C, BINS]`` by its exclusive sum over chunks; ``counts [E]`` are the totals."""
    bins = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for first in tl.range(0, C, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = histogram_ptr + rows[:, None] * BINS + bins[None, :]
        inside = (rows < C)[:, None]
        here = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(here, 0) - here + total[None, :], mask=inside)
        total += tl.sum(here, axis=0)
    tl.store(counts_ptr + bins, total, mask=bins < E)


@triton.jit
def write_tiles(
    count, offset, offsets_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, E, TILE: tl.constexpr, STEP: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """``offsets [E+1]`` and the tile list: expert, first row, row after the last; ``tiles [1]`` counts them.

    An expert's rows are cut into the fewest tiles of at most ``TILE`` rows, each of whole steps of ``STEP`` rows but
    the last, and as equal as that allows: products pad a tile to whole steps, so no more than one is part empty.
    """
    bins = tl.arange(0, BINS)
    tl.store(offsets_ptr + bins, offset, mask=bins < E)
    tl.store(offsets_ptr + bins + 1, offset + count, mask=bins < E)
    tiles, steps = (count + TILE - 1) // TILE, (count + STEP - 1) // STEP
    at = tl.cumsum(tiles, 0) - tiles
    share = steps // tl.maximum(tiles, 1)
    longer = steps - tiles * share
    tl.store(tiles_ptr, tl.sum(tiles, 0))
    for tile in tl.range(0, tl.max(tiles, 0)):
        live = tile < tiles
        first = (tile * share + tl.minimum(tile, longer)) * STEP
        last = tl.minimum(first + (share + (tile < longer).to(tl.int32)) * STEP, count)
        tl.store(expert_ptr + at + tile, bins, mask=live)
        tl.store(first_ptr + at + tile, offset + first, mask=live)
        tl.store(last_ptr + at + tile, offset + last, mask=live)


@triton.jit(do_not_specialize=["R", "E"])
def tile_kernel(
    counts_ptr, offsets_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, R, E, TILE: tl.constexpr, STEP: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """``write_tiles`` from ``counts [E]``, which are cut where they pass the R rows that there are.

    A negative count is none. So no count that a caller got wrong reads rows, or writes tiles, past their end.
    """
    bins = tl.arange(0, BINS)
    count = tl.load(counts_ptr + bins, mask=bins < E, other=0)
    count = tl.minimum(tl.maximum(count, 0), R).to(tl.int64)
    end = tl.cumsum(count, 0)
    offset = tl.minimum(end - count, R).to(tl.int32)
    count = tl.minimum(end, R).to(tl.int32) - offset
    write_tiles(count, offset, offsets_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, E, TILE, STEP, BINS)


@triton.jit(do_not_specialize=["E"])
def pad_kernel(counts_ptr, padded_ptr, E, MULTIPLE: tl.constexpr, BLOCK: tl.constexpr):
    """``padded [E]``: each count rounded up to whole multiples; no rows stay no rows."""
    expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    tl.store(padded_ptr + expert, (count + MULTIPLE - 1) // MULTIPLE * MULTIPLE, mask=expert < E)


@triton.jit(do_not_specialize=["N", "E"])
def place_kernel(
    ids_ptr,
    rank_ptr,
    histogram_ptr,
    offsets_ptr,
    entry_ptr,
    place_ptr,
    N,
    E,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    """``place [N]``: each entry's row, -1 where it is not routed; ``entry [R]``: its inverse."""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + at, mask=at < N, other=-1).to(tl.int32)
    routed = (ids >= 0) & (ids < E)
    row = tl.load(offsets_ptr + ids, mask=routed, other=0) + tl.load(rank_ptr + at, mask=at < N, other=0)
    row += tl.load(histogram_ptr + chunk * BINS + ids, mask=routed, other=0)
    tl.store(entry_ptr + row, at, mask=routed)
    tl.store(place_ptr + at, tl.where(routed, row, -1), mask=at < N)


@triton.jit(do_not_specialize=["T"])
def gather_rows_kernel(x_ptr, place_ptr, out_ptr, T, H, K: tl.constexpr, COLUMNS: tl.constexpr):
    """``out[place[t, k]] = x[t]``: one program a token reads its row once and writes it K times."""
    token = tl.cast(tl.program_id(0), tl.int64)
    for first in tl.range(0, H, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + token * H + columns, mask=columns < H, other=0.0)
        for slot in tl.static_range(K):
            row = tl.load(place_ptr + token * K + slot).to(tl.int64)
            tl.store(out_ptr + row * H + columns, x, mask=(columns < H) & (row >= 0))


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y_ptr, place_ptr, weights_ptr, out_ptr, part_ptr, dweights_ptr, T, H, K: tl.constexpr, SLOTS: tl.constexpr,
    WEIGHTED: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``out[t]``: the sum over k of ``weights[t, k] · y[place[t, k]]`` in fp32, in slot order, rounded once.

    With ``PARTS`` also ``dweights[t, k] = part[place[t, k]]`` (0 where there is no row): what a backward that sums
    rows' gradients to tokens knows of its routing weights' gradient.
    """
    token = tl.cast(tl.program_id(0), tl.int64)
    if PARTS:
        slots = tl.arange(0, SLOTS)
        rows = tl.load(place_ptr + token * K + slots, mask=slots < K, other=-1).to(tl.int64)
        part = tl.load(part_ptr + rows, mask=rows >= 0, other=0.0)
        tl.store(dweights_ptr + token * K + slots, part.to(dweights_ptr.dtype.element_ty), mask=slots < K)
    for first in tl.range(0, H, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        for slot in tl.static_range(K):
            row = tl.load(place_ptr + token * K + slot).to(tl.int64)
            y = tl.load(y_ptr + row * H + columns, mask=(columns < H) & (row >= 0), other=0.0).to(tl.float32)
            if WEIGHTED:
                y *= tl.load(weights_ptr + token * K + slot, mask=row >= 0, other=0.0).to(tl.float32)
            total += y
        tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit(do_not_specialize=["T"])
def combine_bwd_kernel(
    dout_ptr, y_ptr, place_ptr, weights_ptr, dy_ptr, dweights_ptr, T, H, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """``dy[place[t, k]] = weights[t, k] · dout[t]`` and ``dweights[t, k] = dout[t] · y[place[t, k]]``."""
    token = tl.cast(tl.program_id(0), tl.int64)
    for slot in tl.static_range(K):
        row = tl.load(place_ptr + token * K + slot).to(tl.int64)
        weight = tl.load(weights_ptr + token * K + slot).to(tl.float32)
        product = tl.zeros([COLUMNS], tl.float32)
        for first in tl.range(0, H, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            live = (columns < H) & (row >= 0)
            dout = tl.load(dout_ptr + token * H + columns, mask=live, other=0.0).to(tl.float32)
            product += dout * tl.load(y_ptr + row * H + columns, mask=live, other=0.0).to(tl.float32)
            tl.store(dy_ptr + row * H + columns, (weight * dout).to(dy_ptr.dtype.element_ty), mask=live)
        total = tl.sum(product, axis=0).to(dweights_ptr.dtype.element_ty)
        tl.store(dweights_ptr + token * K + slot, total)
