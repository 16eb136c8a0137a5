"""Permute and combine against their references.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="is already inside")
def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("../test_permute.py")


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()
    from shardwright.kernels.permute import cases
    from shardwright.kernels.permute.op import combine, gather_rows, route
    from shardwright.kernels.permute.reference import combine_reference, gather_rows_reference, route_reference
    from shardwright.kernels.permute.tiles import make_tiles
    from shardwright.kernels.verify import verify_case, verify_repeats


@inside
def test_error_is_no_larger_than_eagers() -> None:
    """Skewed, hot, empty, sentinel and token-less routings in bf16: rows, sums, counts and gradients."""
    few = [shape for shape in cases.SUITE.small_shapes if shape["E"] < 100]
    results = [r for shape in few for r in verify_case(cases.SUITE, shape, torch.bfloat16, "cpu")]
    results.append(verify_repeats(cases.SUITE, few[0], torch.bfloat16, "cpu"))
    assert len(results) == 6 * len(few) + 1
    assert [result for result in results if not result.ok] == []


@inside
@pytest.mark.parametrize(("T", "K", "E"), [(700, 3, 5), (90, 16, 896), (1, 1, 1), (0, 2, 4)])
def test_route_is_the_stable_sort(T: int, K: int, E: int) -> None:
    """Several chunks, E not a power of two, sentinels, no tokens; tiles cover each row once."""
    ids = torch.randint(-1, E + 1, (T, K), generator=torch.Generator().manual_seed(1))
    found, (counts, entry, place) = route(ids, E), route_reference(ids, E)
    rows = int(counts.sum())
    assert torch.equal(found.counts.long(), counts) and torch.equal(found.place.long(), place)
    assert torch.equal(found.entry[:rows].long(), entry[:rows])
    expert, first, last = (t[: int(found.tiles.count)].tolist() for t in found.tiles.lists())
    covered = [row for a, b in zip(first, last, strict=True) for row in range(a, b)]
    assert covered == list(range(rows)) and max([b - a for a, b in zip(first, last, strict=True)], default=0) <= 192
    owner = torch.repeat_interleave(torch.arange(E), counts).tolist()
    assert all(owner[a] == e == owner[b - 1] for e, a, b in zip(expert, first, last, strict=True) if a < b)
    sizes = [b - a for a, b in zip(first, last, strict=True)]
    assert sum(-(-size // 64) for size in sizes) == int((-(-counts // 64)).sum())
    assert len(sizes) == int((-(-counts // 192)).sum())


@inside
@pytest.mark.parametrize(("tile_rows", "step"), [(192, 64), (128, 64), (160, 32), (96, 32), (64, 64), (80, 16)])
def test_tiles_hold_whole_steps(tile_rows: int, step: int) -> None:
    """At every count around whole tiles and steps: the fewest tiles, none too long, the first the longest, and at most
    one step that is part empty."""
    counts = sorted({max(0, n * unit + d) for unit in (tile_rows, step) for n in range(5) for d in (-1, 0, 1)})
    tiles = make_tiles(torch.tensor(counts, dtype=torch.int32), sum(counts), tile_rows=tile_rows)
    expert, first, last = (t[: int(tiles.count)].tolist() for t in tiles.lists())
    begin = 0
    for e, count in enumerate(counts):
        cuts = [(a, b) for owner, a, b in zip(expert, first, last, strict=True) if owner == e]
        sizes = [b - a for a, b in cuts]
        assert [row for a, b in cuts for row in range(a, b)] == list(range(begin, begin + count))
        assert len(sizes) == -(-count // tile_rows) and max(sizes, default=0) <= tile_rows
        assert all(size % step == 0 for size in sizes[:-1])
        steps = [-(-size // step) for size in sizes]
        assert steps == sorted(steps, reverse=True) and max(steps, default=0) - min(steps, default=0) <= 1
        begin += count


@inside
def test_sentinel_rows_never_matter() -> None:
    """16 slots, half of them sentinels, their rows NaN: output and all gradients stay finite and right."""
    ids = torch.randint(0, 6, (9, 16), generator=torch.Generator().manual_seed(2))
    ids[:, 8:] = -1
    routing = route(ids, 6)
    y = torch.randn(routing.rows, 40, generator=torch.Generator().manual_seed(3))
    y[int(routing.counts.sum()) :] = float("nan")
    weights = torch.rand(9, 16, generator=torch.Generator().manual_seed(4))
    leaves = [t.clone().requires_grad_() for t in (y, weights)]
    exact = [t.double().requires_grad_() for t in (y.nan_to_num(), weights)]
    out, truth = combine(leaves[0], routing, leaves[1]), combine_reference(exact[0], routing.place.long(), exact[1])
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    found, right = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(truth, exact, dout.double())
    for a, b in zip((out, *found), (truth, *right), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@inside
def test_gather_and_its_gradient() -> None:
    ids = torch.randint(-1, 5, (33, 3), generator=torch.Generator().manual_seed(7))
    routing = route(ids, 5)
    x = torch.randn(33, 40, generator=torch.Generator().manual_seed(8))
    near, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    rows, truth = gather_rows(near, routing), gather_rows_reference(exact, routing.place.long(), routing.rows)
    assert torch.equal(rows.double(), truth)
    d = torch.randn(rows.shape, generator=torch.Generator().manual_seed(9))
    (dx,), (right,) = torch.autograd.grad(rows, near, d), torch.autograd.grad(truth, exact, d.double())
    torch.testing.assert_close(dx.double(), right, rtol=1e-6, atol=1e-6)
