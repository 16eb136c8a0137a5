"""Sparse attention: outputs, gradients, selections, blocks, documents; interpreted (own process).

Where each reported case (B2, B3, …) went wrong elsewhere is in its test's name and words.

Legend: T queries, S keys, H heads, G key heads, V latent width, R rotated width, K entries, B keys of an entry.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter")

if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from shardwright.kernels.dsa.attention import cases, configs, launches, registered  # noqa: E402
from shardwright.kernels.dsa.attention.backward_triton import permute_kernel  # noqa: E402
from shardwright.kernels.dsa.attention.compute import compute_backward, compute_forward  # noqa: E402
from shardwright.kernels.dsa.attention.configs import RUN_BYTES  # noqa: E402
from shardwright.kernels.dsa.attention.cost import pairs  # noqa: E402
from shardwright.kernels.dsa.attention.op import dsa_attention, sparse_gqa_attention  # noqa: E402
from shardwright.kernels.dsa.attention.problem import Problem  # noqa: E402
from shardwright.kernels.dsa.attention.reference import (  # noqa: E402
    dsa_attention_reference,
    sparse_gqa_attention_reference,
)
from shardwright.kernels.dsa.attention.visibility import bounds_of  # noqa: E402
from shardwright.kernels.launched import meta, recorded  # noqa: E402
from shardwright.kernels.verify import poisoned_memory, relative_error, verify_case, verify_repeats  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402

T, H, S, V, R = 6, 2, 9, 16, 8


@outside
def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("../test_dsa_attention.py")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def latents(T: int = T, H: int = H, S: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = ((T, H, V), (T, H, R), (S, V), (S, R))
    return [normal(*size, seed=at, dtype=dtype).requires_grad_() for at, size in enumerate(sizes)]


def picked(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def gradients(
    call: Callable[..., tuple[Tensor, Tensor]], leaves: list[Tensor], *rest: Any, **more: Any
) -> list[Tensor]:
    """o, lse, and the gradients of the leaves for a fixed gradient of o."""
    o, lse = call(*leaves, *rest, **more)
    found = torch.autograd.grad(o, leaves, normal(*o.shape, seed=77).to(o))
    return [o.detach(), lse.detach(), *found]


def widened(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


SCALE = 0.3


def agree(leaves: list[Tensor], index: Tensor, bound: float = 2e-6, **more: Any) -> list[Tensor]:
    """Fused and fp64 reference are near in everything; returns the fused values."""
    found = gradients(dsa_attention, leaves, index, scale=SCALE, **more)
    exact = gradients(dsa_attention_reference, widened(leaves), index, scale=SCALE, **more)
    for value, truth in zip(found, exact, strict=True):
        assert value.isfinite().sum() == truth.isfinite().sum()
        assert relative_error(value.nan_to_num(0, 0, 0), truth.nan_to_num(0, 0, 0)) < bound
    return found


@inside
@pytest.mark.parametrize("name", ["SUITE", "GATED_SUITE", "GROUPED_SUITE"])
def test_error_is_no_larger_than_eagers(name: str) -> None:
    """All outputs and gradients in poisoned memory, and the same bits twice."""
    suite = getattr(cases, name)
    found = [r for shape in suite.small_shapes for r in verify_case(suite, shape, torch.bfloat16, "cpu")]
    found += verify_case(suite, suite.small_shapes[-1], torch.float16, "cpu")
    found += verify_case(suite, suite.small_shapes[0], torch.float32, "cpu")
    found.append(verify_repeats(suite, suite.small_shapes[-1], torch.bfloat16, "cpu"))
    assert [result for result in found if not result.ok] == []


@inside
def test_b2_masked_slots_read_nothing_of_the_memory_before_the_keys() -> None:
    """-1 padded rows; key 0, which a clamped -1 would read, holds NaN and nobody selects it."""
    leaves = latents()
    with torch.no_grad():
        leaves[2][0], leaves[3][0] = float("nan"), float("nan")
    index = picked([[1 + t % 3, -1, 5, -1] for t in range(T)])
    with poisoned_memory():
        o, lse, *found = gradients(dsa_attention, leaves, index, scale=SCALE)
    assert o.isfinite().all() and lse.isfinite().all() and all(g.isfinite().all() for g in found)
    for gradient in found[2:]:
        assert gradient[[0, 4, 6, 7, 8]].abs().sum() == 0 and gradient[5].abs().sum() > 0


@inside
@pytest.mark.parametrize("sinks", [False, True])
def test_b3_a_row_without_keys(sinks: bool) -> None:
    index = picked([[-1, -1, -1] if t in (0, 4) else [t, 0, -1] if t else [0, -1, -1] for t in range(T)])
    sink = normal(H, seed=9) if sinks else None
    o, lse, dq, dqr, _, _ = agree(latents(), index, sinks=sink)
    for t in (0, 4):
        assert o[t].abs().sum() == dq[t].abs().sum() == dqr[t].abs().sum() == 0
        assert bool((lse[t] == float("-inf")).all()) if sink is None else torch.allclose(lse[t], sink)


@inside
@pytest.mark.parametrize("deterministic", [False, True])
def test_b4_queries_share_all_keys(deterministic: bool) -> None:
    """Distinct selections hide lost additions: here all queries select keys 0..4."""
    index = picked([[3, 0, 4, 1, 2]] * T)
    found = gradients(dsa_attention, latents(), index, scale=SCALE, deterministic=deterministic)
    exact = gradients(dsa_attention_reference, widened(latents()), index, scale=SCALE)
    for value, truth in zip(found[2:], exact[2:], strict=True):
        assert F.cosine_similarity(value.double().flatten(), truth.flatten(), dim=0) > 0.999999


@inside
def test_b5_validity_is_the_value_of_an_entry_not_its_column() -> None:
    """More columns than keys, and keys only in columns past S."""
    index = torch.full((T, 24), -1, dtype=torch.int32)
    index[:, 15], index[:, 22] = torch.arange(T), 8
    agree(latents(), index)


@inside
@pytest.mark.parametrize("K", [65, 63, 1])
def test_b7_sizes_beside_the_tile(K: int) -> None:
    T, S = 2, 70
    index = torch.stack([torch.randperm(S, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)]).int()
    found = gradients(dsa_attention, latents(T, H, S), index, scale=SCALE)
    exact = gradients(dsa_attention_reference, widened(latents(T, H, S)), index, scale=SCALE)
    for value, truth in zip(found, exact, strict=True):
        assert float((value - truth).norm()) < 2e-6 * float(truth.norm()) + 1e-5  # of one key dq is zero


@inside
@pytest.mark.parametrize("gate_kind", ["", "head", "value"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_layer_that_rotates_nothing(gate_kind: str, deterministic: bool) -> None:
    """No rotated parts: outputs and every gradient are those of the plain columns alone, holes and early rows too."""
    leaves = [latents()[0], latents()[2]]
    index = picked([[t, -1, 8] if t else [0, -1, -1] for t in range(T)])
    shapes = {"": [], "head": [(T, H)], "value": [(T, H, V)]}[gate_kind]
    leaves += [normal(*shape, seed=9).requires_grad_() for shape in shapes]

    def call(function: Any, q: Tensor, latent: Tensor, *gate: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        return function(q, None, latent, None, index, *gate, scale=SCALE, **more)

    found = gradients(lambda *x: call(dsa_attention, *x, deterministic=deterministic), leaves)
    exact = gradients(lambda *x: call(dsa_attention_reference, *x), widened(leaves))
    assert max(relative_error(a, b) for a, b in zip(found, exact, strict=True)) < 2e-6
    rows = latents()
    rotated = [torch.zeros_like(rows[1]), torch.zeros_like(rows[3])]
    padded = dsa_attention(leaves[0], rotated[0], leaves[1], rotated[1], index, *leaves[2:], scale=SCALE)
    torch.testing.assert_close(padded[0].detach(), found[0], rtol=1e-6, atol=1e-6)


@inside
@pytest.mark.parametrize("sink", [2e38, float("inf")])
def test_b7_a_sink_that_owns_all_mass(sink: float) -> None:
    sinks = torch.full((H,), sink).requires_grad_()
    leaves = latents()
    o, lse = dsa_attention(*leaves, picked([[0, 1]] * T), sinks=sinks, scale=SCALE)
    found = torch.autograd.grad(o, [*leaves, sinks], torch.ones_like(o))
    assert o.abs().sum() == 0 and lse.isfinite().all() and all(bool(g.isfinite().all()) for g in found)


@inside
def test_b8_the_denominator_holds_the_sink() -> None:
    """Outputs and all gradients, the sink's own too, with a sink as large as the scores."""
    leaves, sinks = latents(), normal(H, seed=5).requires_grad_()
    index = picked([[t, 8, -1] for t in range(T)])

    def call(function: Any, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        return function(*leaves[:4], index, None, leaves[4], scale=SCALE)

    found = gradients(lambda *x: call(dsa_attention, *x), [*leaves, sinks])
    exact = gradients(lambda *x: call(dsa_attention_reference, *x), widened([*leaves, sinks]))
    assert exact[-1].norm() > 1e-3
    assert max(relative_error(a, b) for a, b in zip(found, exact, strict=True)) < 2e-6


@inside
def test_b13_large_logits_keep_dq() -> None:
    """One key has nearly all the share: dS is what is left of dP - Σ o·dO, which rounding of o alone would drown."""
    index = picked([[t, 7, 8, 1] if t != 1 else [0, 7, 8, 1] for t in range(T)])
    _, rotated, *keys = [leaf.detach().bfloat16().requires_grad_() for leaf in latents()]
    q = keys[0].detach()[index[:, 0].long()][:, None] * torch.tensor([2.0, 2.5])[:, None]
    leaves = [q.bfloat16().requires_grad_(), rotated, *keys]
    o, _, dq, *_ = gradients(dsa_attention, leaves, index, scale=SCALE)
    exact = gradients(dsa_attention_reference, widened(leaves), index, scale=SCALE)[2]
    eager = gradients(dsa_attention_reference, leaves, index, scale=SCALE)[2]
    assert relative_error(dq, exact) < 1.25 * relative_error(eager, exact)
    parts = (leaves[0], leaves[1], leaves[2][:, None], leaves[3][:, None], None, index[:, None])
    p = Problem(*parts, None, None, None, SCALE, 1)
    dy = normal(*o.shape, seed=77).bfloat16()
    with torch.no_grad():
        kept = launches.forward(p, True)
        blunt = launches.backward(p, dy, kept.lse, kept.o, torch.zeros_like(kept.low), False).qn
    assert relative_error(blunt, exact) > 2 * relative_error(dq, exact)


@inside
@pytest.mark.parametrize("B", [8, 16, 32, 64])
def test_b15_block_gradients_equal_those_of_a_dense_mask(B: int) -> None:
    """Forward and backward tiles differ; the judge is torch's own attention with a mask, two documents."""
    T, S, G, D = 4, 70, 2, 16
    q, k, v = (normal(*s, seed=at).requires_grad_() for at, s in enumerate(((T, 4, D), (S, G, D), (S, G, D))))
    bounds = bounds_of(T, "cpu", [0, 40, S], first_query=S - T)
    blocks = -(-S // B)
    index = torch.stack([torch.randperm(blocks, generator=torch.Generator().manual_seed(t))[:2] for t in range(T * G)])
    index = index.reshape(T, G, -1).to(torch.int32)
    index[:, :, 0] = (S - 1) // B  # the query's own block
    index[index[:, :, 1:].eq(index[:, :, :1]).nonzero(as_tuple=True)[:2]] = torch.tensor([(S - 1) // B, 0]).int()
    found = gradients(sparse_gqa_attention, [q, k, v], index, scale=SCALE, block_size=B, bounds=bounds)
    at = torch.arange(S)
    chosen = (index[..., None] == at // B).any(2)
    mask = chosen & (at >= bounds[:, None, :1]) & (at < bounds[:, None, 1:])

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        o = F.scaled_dot_product_attention(*heads, attn_mask=mask.repeat_interleave(2, 1).transpose(0, 1), scale=SCALE)
        return o.transpose(0, 1), o

    exact = gradients(dense, widened([q, k, v]))
    for at_, (value, truth) in enumerate(zip(found, exact, strict=True)):
        assert at_ == 1 or relative_error(value, truth) < 2e-6


@outside
@pytest.mark.parametrize("grouped", [False, True])
def test_the_reference_is_attention_under_a_mask(grouped: bool) -> None:
    """An independent judge for what judges: torch's dense attention, gated by hand; lse by logsumexp."""
    T, S, G, D = 11, 13, 2 if grouped else 1, 12
    q, gate = normal(T, 4, D, dtype=torch.float64), normal(T, 4, D, seed=1, dtype=torch.float64)
    k, v = normal(S, G, D, seed=2, dtype=torch.float64), normal(S, G, D, seed=3, dtype=torch.float64)
    v = v if grouped else k[..., :8]
    gate = gate if grouped else gate[..., :8]
    index = torch.stack([torch.randperm(S, generator=torch.Generator().manual_seed(t))[:5] for t in range(T * G)])
    index = index.reshape(T, G, 5).to(torch.int32)
    index[2, 0, 3] = -1
    if grouped:
        o, lse = sparse_gqa_attention_reference(q, k, v, index, gate, scale=SCALE)
    else:
        o, lse = dsa_attention_reference(
            q[..., :8], q[..., 8:], k[:, 0, :8], k[:, 0, 8:], index[:, 0], gate, scale=SCALE
        )
    mask = (index[..., None] == torch.arange(S)).any(2).repeat_interleave(4 // G, 1)
    scores = torch.einsum("thd,shd->ths", q, k.repeat_interleave(4 // G, 1)) * SCALE
    scores = scores.masked_fill(~mask, float("-inf"))
    expected = torch.einsum("ths,shd->thd", scores.softmax(-1), v.repeat_interleave(4 // G, 1)) * torch.sigmoid(gate)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@inside
def test_packed_documents_equal_documents_alone() -> None:
    """Absolute indices inside each document: outputs and gradients of each are those of a call of its own."""
    cut, leaves = 4, latents(9, 2, 9)
    index = picked([[t, 0, -1] if t < cut else [t, cut, -1] for t in range(9)])
    index[0, 1], index[cut, 1] = -1, -1
    bounds = bounds_of(9, "cpu", [0, cut, 9])
    whole = gradients(dsa_attention, leaves, index, scale=SCALE, bounds=bounds)
    for first, last in ((0, cut), (cut, 9)):
        own = [leaf.detach()[first:last].clone().requires_grad_() for leaf in leaves]
        rows = torch.where(index[first:last] < 0, -1, index[first:last] - first)
        o, _ = dsa_attention(*own, rows, scale=SCALE)
        found = torch.autograd.grad(o, own, normal(9, 2, V, seed=77)[first:last])
        for value, part in zip((o, *found), (whole[0], *whole[2:]), strict=True):
            torch.testing.assert_close(value, part[first:last])


@inside
def test_ordered_sums_are_those_of_atomics() -> None:
    index = picked([[t, 8, 3 if t != 3 else 1] for t in range(T)])
    ways = [gradients(dsa_attention, latents(), index, scale=SCALE, deterministic=yes) for yes in (False, True)]
    for a, b in zip(*ways, strict=True):
        torch.testing.assert_close(a, b)


@inside
def test_runs_of_queries_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace for one or two queries at a time gives what a large one gives, in every way."""
    index = picked([[t, 8, 3 if t != 3 else 1] for t in range(T)])
    large = gradients(dsa_attention, latents(), index, scale=SCALE, deterministic=True)
    monkeypatch.setattr(configs, "RUN_BYTES", 1 << 13)
    for yes in (False, True):
        small = gradients(dsa_attention, latents(), index, scale=SCALE, deterministic=yes)
        for a, b in zip(small, large, strict=True):
            torch.testing.assert_close(a, b)


@inside
def test_a_nan_query_stays_in_its_row() -> None:
    leaves = latents()
    index = picked([[t, 8, -1] for t in range(T)])
    clean, _ = dsa_attention(*leaves, index, scale=SCALE)
    with torch.no_grad():
        leaves[0][2, 0, 0] = float("nan")
    o, lse = dsa_attention(*leaves, index, scale=SCALE)
    assert o[2, 0].isnan().all() and lse[2, 0].isnan()
    assert torch.equal(o[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]]) and torch.equal(o[2, 1], clean[2, 1])


@inside
def test_views_of_one_projection_are_taken_as_they_are() -> None:
    whole, keys = normal(T, H, V + R), normal(S, V + R, seed=1)
    index = picked([[t, 8, -1] for t in range(T)])
    views = (whole[..., :V], whole[..., V:], keys[:, :V], keys[:, V:])
    a, _ = dsa_attention(*views, index, scale=SCALE)
    b, _ = dsa_attention(*(view.contiguous() for view in views), index, scale=SCALE)
    assert torch.equal(a, b)


@inside
def test_the_registered_way_gives_the_same_bits() -> None:
    index = picked([[t, 8, -1] for t in range(T)])
    gate, leaves = normal(T, H, V, seed=8).requires_grad_(), latents()
    short = gradients(lambda *x: dsa_attention(*x[:4], index, x[4], scale=SCALE), [*leaves, gate])

    def long(*x: Tensor) -> tuple[Tensor, Tensor]:
        settings = (None, SCALE, 1, False, True, True)
        o, lse, _, _ = registered.dsa_attention_forward(
            x[0], x[1], x[2][:, None], x[3][:, None], None, x[4], None, index[:, None], *settings
        )
        return o, lse

    traced = gradients(long, [*leaves, gate])
    assert all(torch.equal(a, b) for a, b in zip(short, traced, strict=True))


@outside
def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    with torch.device("meta"):
        leaves = [torch.empty(size, requires_grad=True) for size in ((5, 4, V), (5, 4, R), (7, V), (7, R))]
        gate = torch.empty(5, 4, requires_grad=True)
        o, lse = dsa_attention(*leaves, torch.empty(5, 3, dtype=torch.int32), gate, scale=SCALE)
        found = torch.autograd.grad(o, [*leaves, gate], torch.empty_like(o))
    assert o.shape == (5, 4, V) and lse.shape == (5, 4) and lse.dtype == torch.float32 and not lse.requires_grad
    assert [g.shape for g in found] == [leaf.shape for leaf in (*leaves, gate)]


@outside
@pytest.mark.parametrize(
    ("H", "width", "forward", "backward"),
    [
        (64, 512, ["hopper_forward"], ["prepare", "permute", "hopper_backward"]),
        (96, 512, ["forward"], ["prepare", "shares", "queries", "contributions"]),
        (64, 256, ["forward"], ["prepare", "shares", "queries", "contributions"]),
    ],
)
def test_without_rotated_parts_hoppers_kernels_read_zeros(
    H: int, width: int, forward: list[str], backward: list[str]
) -> None:
    """Their tiles are 512 + 64 columns; elsewhere the portable kernels take the plain columns alone."""
    leaves = [meta((64, H, width), learns=True), meta((64, width), learns=True)]
    first: list[str] = []
    second: list[str] = []
    with recorded(log=first):
        o, _ = dsa_attention(
            leaves[0], None, leaves[1], None, meta((64, 32), torch.int32), scale=SCALE, deterministic=False
        )
    with recorded(log=second):
        found = torch.autograd.grad(o, leaves, torch.empty_like(o))
    assert [name.removesuffix("_kernel") for name in first] == forward
    assert [name.removesuffix("_kernel") for name in dict.fromkeys(second)] == backward
    assert [g.shape for g in found] == [leaf.shape for leaf in leaves]


@outside
@pytest.mark.parametrize(
    ("H", "settings_", "forward", "backward"),
    [
        (64, {}, ["hopper_forward"], ["prepare", "permute", "hopper_backward"]),
        (128, {"deterministic": True}, ["hopper_forward"], ["prepare", "shares", "queries", "contributions", "sums"]),
        (96, {}, ["forward"], ["prepare", "shares", "queries", "contributions"]),
        (64, {"block_size": 64}, ["hopper_forward"], ["prepare", "shares", "queries", "blocks"]),
        (64, {"block_size": 8}, ["hopper_forward"], ["prepare", "shares", "queries", "contributions", "sums"]),
    ],
)
def test_each_call_starts_the_kernels_that_it_should(
    H: int, settings_: dict[str, Any], forward: list[str], backward: list[str]
) -> None:
    """Atomics for single keys alone; Hopper's kernels for whole blocks of heads; counted launches are the real ones."""
    T, B = 64, settings_.get("block_size", 1)
    sizes = ((T, H, 512), (T, H, 64), (T, 512), (T, 64))
    leaves = [meta(size, learns=True) for size in sizes]
    first: list[str] = []
    second: list[str] = []
    with recorded(log=first):
        given: dict[str, Any] = {"deterministic": False, "bounds": meta((T, 2), torch.int32), **settings_}
        o, _ = dsa_attention(*leaves, meta((T, 64 // B), torch.int32), scale=SCALE, **given)
    with recorded(log=second):
        torch.autograd.grad(o, leaves, torch.empty_like(o))
    assert [name.removesuffix("_kernel") for name in first] == forward
    assert [name.removesuffix("_kernel") for name in dict.fromkeys(second)] == backward


@inside
def test_permuted_columns_give_four_neighbours_to_a_thread() -> None:
    """Position 8i + 2l + e of a group of 16 takes column 4l + 2i + e."""
    x = torch.arange(3 * 32, dtype=torch.float32).reshape(3, 1, 32)
    out = torch.full((3, 32), float("nan"))
    permute_kernel[(1,)](x, out, 3, 1, 32, 32, 32, WIDTH=32, ROWS=4)
    own = [c // 16 * 16 + c % 8 // 2 * 4 + c % 16 // 8 * 2 + c % 2 for c in range(32)]
    assert torch.equal(out, x[:, 0, own])


@outside
@given(st.integers(0, 40), st.integers(0, 9), st.integers(1, 50), st.sampled_from([1, 8]))
@settings(max_examples=60, deadline=None)
def test_counted_pairs_are_those_of_a_causal_selection(T: int, more: int, K: int, B: int) -> None:
    S = T + more
    assert pairs(T, S, K, B) == sum(min(S - T + t + 1, K * B) for t in range(T))


@outside
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_bounds_are_those_of_each_querys_document(lengths: list[int], causal: bool, data: st.DataObject) -> None:
    S = sum(lengths)
    first = data.draw(st.integers(0, S))
    T = data.draw(st.integers(0, S - first))
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    owner = [n for n, length in enumerate(lengths) for _ in range(length)]
    expected = [[ends[owner[t]], t + 1 if causal else ends[owner[t] + 1]] for t in range(first, first + T)]
    found = bounds_of(T, "cpu", ends, causal=causal, first_query=first, keys=S)
    assert found.tolist() == expected and found.dtype == torch.int32


@outside
@pytest.mark.parametrize("ends", [[0, 3, 3, 6], [0, 4, 2, 6], [1, 6], [0, 5], [0], []])
def test_documents_that_are_not_sorted_are_refused(ends: list[int]) -> None:
    with pytest.raises(KernelError) as caught:
        bounds_of(6, "cpu", ends)
    assert caught.value.code == "kernel/cu-seqlens-unsorted"


@inside
@pytest.mark.parametrize("bad", cases.bad_inputs("cpu") if INTERPRETED else (), ids=lambda bad: bad.name)
def test_bad_input_is_refused_with_its_code(bad: Any) -> None:
    with pytest.raises(KernelError) as caught:
        bad.call()
    assert caught.value.code == f"kernel/{bad.code}" and caught.value.where == "dsa_attention"


class Allocated(TorchDispatchMode):
    """Most bytes alive at once of the tensors that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if isinstance(out, Tensor) and name.startswith(("empty", "new_", "zeros", "full", "clone", "_to_copy")):
            size = out.numel() * out.element_size()
            self.alive += size
            self.most = max(self.most, self.alive)
            weakref.finalize(out, self._freed, size)
        return out

    def _freed(self, size: int) -> None:
        self.alive -= size


@outside
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_linear_in_tokens(deterministic: bool) -> None:
    """Nothing of [T, S] and nothing of [T, K, width]: twice the tokens need at most twice the bytes, full size."""
    made = []
    for T in (16_384, 32_768):
        parts = [meta(size) for size in ((T, 64, 512), (T, 64, 64), (T, 1, 512), (T, 1, 64))]
        index = meta((T, 1, 2048), torch.int32)
        p = Problem(*parts, None, index, None, None, None, 0.1, 1)
        with recorded(), Allocated() as allocated:
            found = compute_forward(p, True, False)
            compute_backward(p, meta((T, 64, 512)), found.lse, found.o, found.low, deterministic)
        made.append(allocated.most)
        ours = 2 * T * 64 * (5 * 512 + 3 * 64) + 16 * T * 576 + 8 * T * 64
        assert allocated.most <= ours + 2 * RUN_BYTES
    assert made[0] > 1 << 30 and made[1] <= 2.02 * made[0]


@inside
@pytest.mark.parametrize("heads", [16, 48, 128])
def test_head_counts_of_the_contract(heads: int) -> None:
    """From 16 to 128 heads on one key head, also where they are no power of two."""
    leaves = latents(H=heads, T=3, S=6)
    agree(leaves, picked([[0, 2, -1], [1, -1, -1], [5, 0, 3]]))


@inside
@pytest.mark.parametrize("B", [1, 8, 16, 32, 64])
def test_a_row_whose_only_key_is_its_own(B: int) -> None:
    """One key has all the share: the output is its value, and the queries' gradient is exactly 0."""
    T = 3
    leaves = latents(T=T, S=T)
    index = torch.tensor([[0, -1]] * T, dtype=torch.int32) if B > 1 else torch.tensor([[t, -1] for t in range(T)])
    first = torch.arange(T)
    bounds = torch.stack([first, first + 1], 1).to(torch.int32)
    o, _ = dsa_attention(*leaves, index.to(torch.int32), scale=SCALE, block_size=B, bounds=bounds)
    torch.testing.assert_close(o, leaves[2].detach()[:, None].expand_as(o), rtol=1e-6, atol=1e-6)
    dq, dr, dlatent, _ = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert float(dq.abs().max()) < 1e-6 and float(dr.abs().max()) < 1e-6
    torch.testing.assert_close(dlatent, torch.full_like(dlatent, float(leaves[0].shape[1])), rtol=1e-5, atol=1e-5)
