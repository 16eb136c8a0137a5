"""The lightning indexer: choice, scores and their gradient, under the interpreter (own process) and beside it.

Legend: T queries, S keys, N indexer heads, D head width, k chosen keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter")

if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shardwright.kernels.dsa.indexer import alarms, cases, configs, contract, launches, prepare  # noqa: E402
from shardwright.kernels.dsa.indexer.configs import Chunk, chunks  # noqa: E402
from shardwright.kernels.dsa.indexer.cost import cost, pairs  # noqa: E402
from shardwright.kernels.dsa.indexer.op import default_scale, dsa_indexer, indexer_scores  # noqa: E402
from shardwright.kernels.dsa.indexer.reference import (  # noqa: E402
    indexer_reference,
    rotate_reference,
    scores_at_reference,
    scores_reference,
    select_reference,
    visible,
)
from shardwright.kernels.dsa.indexer.shared import NONE, selection_sources  # noqa: E402
from shardwright.kernels.verify import relative_error, verify_case  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402


@outside
def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("../test_dsa_indexer.py")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def problem(T: int, S: int, N: int = 4, D: int = 16, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return normal(T, N, D, seed=seed), normal(S, D, seed=seed + 1), normal(T, N, seed=seed + 2)


def chosen_of(scores: torch.Tensor, top_k: int) -> list[list[int]]:
    """The select kernel alone over given rows of scores, as if row t saw all of them."""
    rows, S = scores.shape
    stride = configs.round_up(S, configs.ALIGN)
    padded = torch.full((rows, stride), float("nan"))
    padded[:, :S] = scores
    found, counts = torch.full((rows, top_k), -7, dtype=torch.int32), alarms.fresh(scores)
    for row in range(rows):
        place = launches.Place(S - 1, None)
        launches.select(padded[row], Chunk(0, 1, stride), place, found[row : row + 1], counts)
    return [list(row) for row in found.tolist()]


def by_hand(row: list[float], k: int) -> list[int]:
    """The k best by comparing (score, index) pairs in plain Python, ascending, -1 behind."""
    best = sorted(sorted(range(len(row)), key=lambda at: (-row[at], at))[:k])
    return best + [-1] * (k - len(best))


@inside
@pytest.mark.parametrize("suite", [cases.SUITE, cases.SCORES_SUITE], ids=["choice", "scores"])
@pytest.mark.parametrize("at", range(len(cases.SMALL)))
def test_error_is_no_larger_than_eagers(suite: cases.OpSuite, at: int) -> None:
    """The set of keys of each query; scores, dq, dk (atomics, and in a fixed order), dw; no queries too."""
    dtypes = (torch.float32, torch.bfloat16)
    found = [r for dtype in dtypes for r in verify_case(suite, cases.SMALL[at], dtype, "cpu")]
    assert len(found) == (2 if suite is cases.SUITE else 8)
    assert [result for result in found if not result.ok] == []


@inside
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "extremes", "wide"])
def test_choice_is_exact_for_given_scores(kind: str) -> None:
    """Against plain Python: ties at the threshold, all equal (B9), infinities, values of every size."""
    rows = normal(2, 90, seed=3)
    if kind == "ties":
        rows = (rows * 2).round()
    if kind == "zeros":
        rows = torch.zeros_like(rows)
        rows[0, ::2] = -0.0
    if kind == "extremes":
        rows[0, 5:9], rows[0, 20], rows[1, 3:80] = float("inf"), float("-inf"), float("-inf")
    if kind == "wide":
        rows = rows * 10.0 ** torch.arange(-38, 37).repeat(2)[:90]
    for k in (1, 7, 63):
        assert chosen_of(rows, k) == [by_hand(row, k) for row in rows.tolist()]


@inside
def test_b9_many_zeros_leave_no_hole() -> None:
    """Scores tie by the hundred at 0: k distinct valid keys, all ones among them, the smallest zeros beside."""
    scores = torch.zeros(1, 300)
    ones = list(range(7, 300, 29))
    scores[0, ones] = 1.0
    (found,) = chosen_of(scores, 64)
    assert len(set(found)) == 64 and min(found) >= 0 and set(ones) <= set(found)
    assert found == by_hand(scores[0].tolist(), 64)


@inside
def test_rows_read_in_pieces_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of rows that do not fit registers, with pieces of 32 and ties across their edges."""
    row = (normal(1, 110, seed=6) * 2).round()
    row[0, 77] = float("inf")
    for columns in (0, 128):
        monkeypatch.setattr(configs, "selecting", lambda longest, c=columns: configs.Selecting(c, 32, 1))
        assert chosen_of(row, 40) == [by_hand(row[0].tolist(), 40)]


@inside
def test_b11_scores_beyond_fp16_and_a_ragged_tail() -> None:
    """Scores below -65,504: only real columns are chosen."""
    q, k, weights = problem(21, 21)
    found = dsa_indexer(q, k, weights - 1e6, top_k=9, scale=1.0)
    assert torch.equal(found, indexer_reference(q.double(), k.double(), weights.double() - 1e6, top_k=9, scale=1.0))
    assert all(max(row) <= t for t, row in enumerate(found.tolist()))


@inside
def test_b14_large_queries_and_keys_keep_their_order() -> None:
    """q, k of 100 · randn, 64 heads: the sum over heads in fp32."""
    q, k, weights = problem(20, 20, N=64)
    q, k = (100 * q).half(), (100 * k).half()
    found = dsa_indexer(q, k, weights, top_k=6)
    assert torch.equal(found, indexer_reference(q.double(), k.double(), weights.double(), top_k=6, scale=1.0))


@inside
@pytest.mark.parametrize("top_k", [1, 5, 64])
def test_early_rows_are_padded_behind(top_k: int) -> None:
    """B7: query t has min(t + 1, k) keys, ascending, then -1; more keys asked for than there are."""
    q, k, weights = problem(10, 10)
    found = dsa_indexer(q, k, weights, top_k=top_k)
    for t, row in enumerate(found.tolist()):
        held = min(t + 1, top_k)
        assert row[:held] == sorted(set(row[:held])) and min(row[:held]) >= 0 and row[held:] == [-1] * (top_k - held)


@inside
def test_packed_sequences_choose_as_alone() -> None:
    """Sequences of 9, 0, 14 and 1 keys in one call equal each in its own; bounds of int32 and int64."""
    q, k, weights = problem(24, 24)
    bounds = torch.tensor([0, 9, 9, 23, 24])
    packed = dsa_indexer(q, k, weights, top_k=5, cu_seqlens=bounds)
    assert torch.equal(packed, dsa_indexer(q, k, weights, top_k=5, cu_seqlens=bounds.int()))
    for first, end in pairwise(bounds.tolist()):
        piece = slice(first, end)
        alone = dsa_indexer(q[piece], k[piece].clone(), weights[piece].clone(), top_k=5) if end > first else None
        if alone is not None:
            assert torch.equal(packed[piece], torch.where(alone < 0, alone, alone + first))


@inside
def test_a_part_of_the_queries_with_all_keys_chooses_as_the_whole() -> None:
    """Context parallelism by gathered keys: rows from 11 on alone, with their tables and sequences."""
    q, k, weights = problem(23, 23)
    angles = normal(23, 4, seed=9)
    rest = {"cos": angles.cos(), "sin": angles.sin(), "cu_seqlens": torch.tensor([0, 5, 23])}
    whole = dsa_indexer(q, k, weights, top_k=6, **rest)
    part = dsa_indexer(q[11:].clone(), k, weights[11:].clone(), top_k=6, query_start=11, **rest)
    assert torch.equal(part, whole[11:])


@inside
@pytest.mark.parametrize("layout", ["half-split", "interleaved"])
def test_rotation_inside_equals_rotation_before(layout: str) -> None:
    """Both layouts: the choice, and scores with gradients against fp64 through a rotation in plain torch."""
    q, k, weights = problem(12, 12)
    angles = normal(12, 4, seed=9)
    cos, sin = angles.cos(), angles.sin()
    found = dsa_indexer(q, k, weights, top_k=4, cos=cos, sin=sin, layout=layout)
    wide = [x.double().requires_grad_() for x in (q, k, weights)]
    turned = [rotate_reference(x, cos, sin, layout) for x in wide[:2]]
    assert torch.equal(found, indexer_reference(*(x.detach() for x in (*turned, wide[2])), top_k=4, scale=1.0))
    leaves = [x.clone().requires_grad_() for x in (q, k, weights)]
    scores = indexer_scores(*leaves, found, cos=cos, sin=sin, layout=layout)
    exact = scores_at_reference(*turned, wide[2], found, default_scale(q))
    g = normal(12, 4, seed=4)
    pairs_of = zip(torch.autograd.grad(scores, leaves, g), torch.autograd.grad(exact, wide, g.double()), strict=True)
    assert all(relative_error(a, b) < 1e-6 for a, b in [(scores, exact), *pairs_of])


def test_layouts_rotate_by_the_formula() -> None:
    """One row by hand: pairs (i, i + R/2), and (2i, 2i + 1); the rest unchanged."""
    x, angle = torch.arange(1.0, 7.0)[None], torch.tensor([[0.3, 1.1]])
    c, s = angle.cos()[0].tolist(), angle.sin()[0].tolist()
    half = rotate_reference(x, angle.cos(), angle.sin(), "half-split")[0].tolist()
    assert half == pytest.approx([c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + s[0], 4 * c[1] + 2 * s[1], 5, 6])
    next_to = rotate_reference(x, angle.cos(), angle.sin(), "interleaved")[0].tolist()
    assert next_to == pytest.approx([c[0] - 2 * s[0], 2 * c[0] + s[0], 3 * c[1] - 4 * s[1], 4 * c[1] + 3 * s[1], 5, 6])


@inside
def test_b2_empty_slots_read_and_write_nothing() -> None:
    """Keys before and behind are NaN; -1 anywhere in a row (B5), a row of -1 alone (B3): zeros, guards untouched."""
    q, k, weights = problem(6, 6)
    room = torch.full((10, 16), float("nan"))
    room[2:8] = k
    indices = torch.tensor([[-1, 0, -1], [1, -1, 0], [-1] * 3, [2, 3, 0], [4, -1, -1], [-1, -1, 5]], dtype=torch.int32)
    leaves = [q.requires_grad_(), room[2:8].requires_grad_(), weights.requires_grad_()]
    scores = indexer_scores(*leaves, indices)
    assert scores[indices < 0].eq(0).all()
    dq, dk, dw = torch.autograd.grad(scores.sum(), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(scores_at_reference(*wide, indices, default_scale(q)).sum(), wide)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip((dq, dk, dw), exact, strict=True))
    assert dq[2].eq(0).all() and dw[2].eq(0).all() and room[:2].isnan().all() and room[8:].isnan().all()


@inside
@pytest.mark.parametrize("deterministic", [False, True])
def test_b4_queries_that_share_all_keys(deterministic: bool) -> None:
    """Every query takes keys 0..7: dk is a sum over all of them."""
    q, k, weights = problem(40, 40)
    indices = torch.arange(8, dtype=torch.int32).repeat(40, 1)
    leaves = [x.requires_grad_() for x in (q, k, weights)]
    scores = indexer_scores(*leaves, indices, deterministic=deterministic)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = scores_at_reference(*wide, indices, default_scale(q))
    g = normal(40, 8, seed=7)
    found, truth = torch.autograd.grad(scores, leaves, g), torch.autograd.grad(exact, wide, g.double())
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(found, truth, strict=True))
    assert found[1][8:].eq(0).all()


@inside
def test_fp8_scores_are_near_and_stated() -> None:
    """An approximation: scores of e4m3 values, chosen exactly for these; most keys are those of exact scores."""
    q, k, weights = problem(30, 30, N=8, D=32)
    low = prepare.quantise(q, k, weights)
    rebuilt = low.q.float(), low.k.float() * low.k_scale[:, None], low.weights
    exact = scores_reference(q, k, weights, 1.0)
    assert relative_error(scores_reference(*rebuilt, 1.0), exact) < 0.04
    found = dsa_indexer(q, k, weights, top_k=8, precision="fp8")
    seen = visible(30, 30, 0, None, "cpu")
    own = cases.members(select_reference(scores_reference(*(x.double() for x in rebuilt), 1.0), seen, 8), 30)
    assert (cases.members(found, 30) != own).sum() <= 2
    same = (cases.members(found, 30) * cases.members(select_reference(exact, seen, 8), 30)).sum()
    assert same / (found >= 0).sum() > 0.9


@inside
def test_a_nan_row_is_loud_and_leaves_others_alone() -> None:
    """NaN ranks highest in its own row; the error names it."""
    q, k, weights = problem(14, 14)
    clean = dsa_indexer(q, k, weights, top_k=4)
    q[9, 0, 3] = float("nan")
    with pytest.raises(KernelError, match="1 rows of scores hold NaN") as caught:
        dsa_indexer(q, k, weights, top_k=4)
    assert caught.value.code == "kernel/nan-scores"
    counts, out = alarms.fresh(q), clean.clone()
    out = launches.choose(q, k, weights, 4, launches.Place(0, None), counts, False, 1.0)
    others = [t for t in range(14) if t != 9]
    assert torch.equal(out[others], clean[others]) and out[9].tolist() == [0, 1, 2, 3]
    assert counts.tolist() == [1, 0, 0]


@inside
def test_traced_and_plain_calls_agree() -> None:
    """Through torch.library (a dispatch mode is on): the same bits, gradients and rotation included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        seen: set[str] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen.add(str(func))
            return func(*args, **(kwargs or {}))

    q, k, weights = problem(9, 9)
    angles = normal(9, 8, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, weights)]

    def run() -> list[torch.Tensor]:
        turn = {"cos": angles.cos(), "sin": angles.sin()}
        found = dsa_indexer(*leaves, top_k=3, **turn)
        scores = indexer_scores(*leaves, found, **turn, deterministic=True)
        return [found, scores, *torch.autograd.grad(scores.square().sum(), leaves)]

    plain = run()
    with Watch() as watch:
        traced = run()
    assert any("dsa_indexer_choice" in name for name in watch.seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


@given(T=st.integers(1, 1 << 17), start=st.integers(0, 1 << 18))
@settings(max_examples=25, deadline=None)
def test_chunks_cover_every_query_within_the_workspace(T: int, start: int) -> None:
    """No gap, no overlap, every row long enough, 256 MiB at most where one row is not longer alone."""
    plan = chunks(T, start)
    assert plan[0].first == 0 and plan[-1].first + plan[-1].rows == T
    for before, after in pairwise(plan):
        assert after.first == before.first + before.rows
    for c in plan:
        assert c.stride >= start + c.first + c.rows and c.stride % configs.ALIGN == 0
        assert 4 * c.rows * c.stride <= configs.SCORE_BYTES or c.rows == 1


def test_workspace_does_not_grow_with_the_square() -> None:
    """Peak of workspace and indices: linear in T · k beyond the first 256 MiB."""
    peaks = {T: cost(T, 64, 128, 2048, "bfloat16").forward.workspace_bytes for T in (8192, 32_768, 1 << 20)}
    assert all(peak <= configs.SCORE_BYTES for peak in peaks.values())
    assert pairs(8192, 2048) == (8192 * 8193 // 2 - 2048 * 2049 // 2, 2048 * 2049 // 2 + 6144 * 2048)
    assert pairs(100, 2048) == (0, 5050)


def test_reference_agrees_with_plain_python() -> None:
    scores = (normal(6, 6, seed=8) * 2).round()
    scores[4, 2] = float("nan")
    found = select_reference(scores, visible(6, 6, 0, None, "cpu"), 3).tolist()
    for t, row in enumerate(scores.tolist()):
        keyed = [float("inf") if value != value else value for value in row[: t + 1]]
        assert found[t] == by_hand(keyed, 3)


def test_shared_layers_take_the_selection_of_the_full_layer_before() -> None:
    """GLM-5: a shared layer runs no indexer."""
    types = ("full", "shared", "shared", "full", "shared")
    assert selection_sources(types) == (0, 0, 0, 3, 3)
    assert selection_sources(("full",) * 3) == (0, 1, 2)
    assert selection_sources(("none", "full", "shared")) == (NONE, 1, 1)
    with pytest.raises(KernelError, match="layer 1 shares a selection") as caught:
        selection_sources(("none", "shared"))
    assert caught.value.code == "kernel/shared-without-full"
    with pytest.raises(KernelError, match="'half'") as caught:
        selection_sources(("half",))
    assert caught.value.code == "kernel/unknown-indexer-type"


def test_fp32_products_are_refused_on_a_device() -> None:
    """Matrix units round fp32: typed, before any launch; fp32 weights are fine."""
    q = torch.zeros(2, 1, 16)
    with pytest.raises(KernelError, match="float32") as caught:
        contract.check({"q": q}, interpreted=False)
    assert caught.value.code == "kernel/dtype-unsupported"


def test_the_choice_of_a_meta_tensor_has_its_shape() -> None:
    q, k, weights = (x.to("meta", torch.bfloat16) for x in problem(7, 7))
    assert dsa_indexer(q, k, weights, top_k=3).shape == (7, 3)
