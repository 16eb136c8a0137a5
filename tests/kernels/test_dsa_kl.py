"""The indexer's own loss, dense and sparse, with its gradient: under the interpreter (own process) and beside it.

Legend: T queries, S keys, N indexer heads, D indexer width, H attention heads, G key heads, M attention width,
k chosen keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter")

if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from shardwright.kernels.dsa.indexer.op import default_scale, dsa_indexer  # noqa: E402
from shardwright.kernels.dsa.kl import cases, configs, contract  # noqa: E402
from shardwright.kernels.dsa.kl.cost import cost  # noqa: E402
from shardwright.kernels.dsa.kl.op import dsa_kl, factors  # noqa: E402
from shardwright.kernels.dsa.kl.pooled import dsa_pooled_kl  # noqa: E402
from shardwright.kernels.dsa.kl.reference import (  # noqa: E402
    attention_lse,
    dsa_kl_reference,
    dsa_pooled_kl_reference,
    kl_rows_reference,
    target_reference,
)
from shardwright.kernels.verify import relative_error, verify_case  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402

FLAT = 0.25


@outside
def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("../test_dsa_kl.py")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def problem(T: int, H: int = 4, G: int = 1, M: int = 16, N: int = 3, D: int = 16) -> tuple[torch.Tensor, ...]:
    """The indexer's q, k, weights and the attention's q, k."""
    sizes = ((T, N, D), (T, D), (T, N), (T, H, M), (T, G, M))
    return tuple(normal(*size, seed=at) for at, size in enumerate(sizes))


def both(
    made: tuple[torch.Tensor, ...], lse: torch.Tensor, indices: torch.Tensor | None, **options: object
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(loss, dq, dk, dw) of the operator, and of the reference in fp64."""
    leaves = [x.clone().requires_grad_() for x in made[:3]]
    loss = dsa_kl(*leaves, *made[3:], lse, indices, attention_scale=FLAT, **options)  # type: ignore[arg-type]
    wide = [x.double().requires_grad_() for x in made[:3]]
    plain = {name: value for name, value in options.items() if name != "deterministic"}
    rest = (*(x.double() for x in made[3:]), lse.double(), indices)
    scales = {"scale": default_scale(made[0]), "attention_scale": FLAT}
    exact = dsa_kl_reference(*wide, *rest, **scales, **plain)  # type: ignore[arg-type]
    return [loss, *torch.autograd.grad(loss, leaves)], [exact, *torch.autograd.grad(exact, wide)]


def near(pair: tuple[list[torch.Tensor], list[torch.Tensor]], most: float = 2e-6) -> bool:
    return all(relative_error(a.detach(), b.detach()) < most for a, b in zip(*pair, strict=True))


@inside
@pytest.mark.parametrize("suite", [cases.SUITE, cases.DENSE_SUITE], ids=["sparse", "dense"])
@pytest.mark.parametrize("at", range(len(cases.SMALL)))
def test_error_is_no_larger_than_eagers(suite: cases.OpSuite, at: int) -> None:
    """Loss, dq, dk (atomics, and in a fixed order), dw; no queries too."""
    found = verify_case(suite, suite.small_shapes[at], torch.bfloat16, "cpu")
    assert len(found) == 4 and [result for result in found if not result.ok] == []


@inside
def test_the_gradient_of_a_score_is_softmax_minus_target() -> None:
    """One indexer head of width-16 unit keys: every score is one weight times one entry of q; by hand."""
    k, q_main, k_main = torch.eye(16)[:4].contiguous(), normal(4, 2, 16, seed=1), normal(4, 1, 16, seed=2)
    q, weights = (normal(4, 1, 16, seed=3).abs() + 0.5).requires_grad_(), torch.ones(4, 1)
    lse = attention_lse(q_main, k_main, None, FLAT)
    loss = dsa_kl(q, k, weights, q_main, k_main, lse, None, attention_scale=FLAT, scale=1.0, reduction="sum")
    (dq,) = torch.autograd.grad(loss, q)
    logits = torch.einsum("hm,sm->hs", q_main[3], k_main[:, 0]) * FLAT
    target = logits.softmax(-1).mean(0)
    scores = q.detach()[3, 0, :4]
    assert torch.allclose(dq[3, 0, :4], scores.softmax(-1) - target, atol=1e-6) and dq[3, 0, 4:].eq(0).all()
    assert dq[0].abs().max() < 1e-6, "a query with one key has loss 0"


@inside
@pytest.mark.parametrize(("H", "G", "M"), [(4, 2, 16), (70, 1, 16), (6, 3, 48)])
def test_key_heads_and_more_heads_than_a_tile(H: int, G: int, M: int) -> None:
    """Grouped heads, 70 heads of one key head (two tiles), widths of two powers: sparse and dense."""
    made = problem(7, H, G, M)
    indices = dsa_indexer(*made[:3], top_k=4)
    assert near(both(made, attention_lse(*made[3:], indices, FLAT), indices))
    assert near(both(made, attention_lse(*made[3:], None, FLAT), None))


@inside
def test_sparse_over_all_keys_is_the_dense_warm_up() -> None:
    """k at least T: both stages give the same loss and gradients; packed sequences and a part of the queries too."""
    made = problem(10)
    bounds = torch.tensor([0, 4, 4, 10])
    for options in ({}, {"cu_seqlens": bounds}):
        indices = dsa_indexer(*made[:3], top_k=16, **options)
        lse = attention_lse(*made[3:], indices, FLAT)
        dense = both(made, lse, None, **options)
        assert near(dense) and near((both(made, lse, indices)[0], dense[1]))
    part = tuple(x[6:].clone() if at in (0, 2, 3) else x for at, x in enumerate(made))
    lse = attention_lse(part[3], part[4], None, FLAT, 6)
    assert near(both(part, lse, None, query_start=6))


@inside
def test_a_sink_is_normalised_away_and_empty_rows_are_zero() -> None:
    """B8: with mass outside the keys the target still sums to 1; B3: a row of -1 has loss and gradient 0."""
    made = problem(6)
    indices = dsa_indexer(*made[:3], top_k=3)
    indices[2] = -1
    indices[4] = torch.tensor([-1, 1, 3], dtype=torch.int32)
    lse = attention_lse(*made[3:], indices, FLAT)
    assert lse[2].eq(float("-inf")).all()
    plain = both(made, lse, indices)
    assert near(plain) and near(both(made, torch.logaddexp(lse, torch.tensor(1.5)), indices))
    assert near((both(made, lse + 0.7, indices)[0], plain[1])), "half of every head's mass elsewhere changes nothing"
    assert all(bool(x.isfinite().all()) for x in plain[0]) and plain[0][1][2].eq(0).all()


@inside
@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_add_up(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """Three queries at a time give what all at once give: dk adds up over chunks, in both stages and orders."""
    made = problem(8)
    indices = dsa_indexer(*made[:3], top_k=4)
    lse = attention_lse(*made[3:], indices, FLAT)
    monkeypatch.setattr(configs, "ROW_BYTES", 3 * 4 * 4)
    assert configs.chunk_rows(8, 4) == 3
    assert near(both(made, lse, indices, deterministic=deterministic))
    if not deterministic:
        monkeypatch.setattr(configs, "ROW_BYTES", 3 * 4 * 128)
        assert near(both(made, attention_lse(*made[3:], None, FLAT), None))


@inside
def test_layers_that_share_a_selection_add_their_losses() -> None:
    """GLM-5: two attentions teach one indexer; gradients are the sum."""
    made = problem(6)
    other = (*made[:3], normal(6, 4, 16, seed=11), normal(6, 1, 16, seed=12))
    indices = dsa_indexer(*made[:3], top_k=3)
    leaves = [x.clone().requires_grad_() for x in made[:3]]
    total = torch.zeros(())
    for layer in (made, other):
        lse = attention_lse(*layer[3:], indices, FLAT)
        total = total + dsa_kl(*leaves, *layer[3:], lse, indices, attention_scale=FLAT)
    found = torch.autograd.grad(total, leaves)
    apart = [both(x, attention_lse(*x[3:], indices, FLAT), indices)[1][1:] for x in (made, other)]
    assert all(relative_error(a, b + c) < 2e-6 for a, b, c in zip(found, *apart, strict=True))


@inside
def test_a_key_that_stands_twice_counts_twice_on_both_sides() -> None:
    made = problem(6)
    indices = torch.tensor([[0, -1, -1], [1, 0, 1], [2, 2, -1], [3, 0, 1], [4, 3, 4], [5, 5, 5]], dtype=torch.int32)
    pair = both(made, attention_lse(*made[3:], indices, FLAT), indices)
    assert near(pair) and float(pair[0][0]) > 0
    once = torch.tensor([[0, -1], [1, 0]] + [[t, 0] for t in range(2, 6)], dtype=torch.int32)
    assert not near((pair[0], both(made, attention_lse(*made[3:], once, FLAT), once)[1]), 1e-3)


@inside
def test_incoming_gradients_scale() -> None:
    """Three quarters of a mean over 12 queries: factors that are no powers of two."""
    made = problem(12)
    indices = dsa_indexer(*made[:3], top_k=4)
    lse = attention_lse(*made[3:], indices, FLAT)
    leaves = [x.clone().requires_grad_() for x in made[:3]]
    loss = dsa_kl(*leaves, *made[3:], lse, indices, attention_scale=FLAT)
    found = torch.autograd.grad(0.75 * loss, leaves)
    exact = both(made, lse, indices)[1][1:]
    assert all(relative_error(a, 0.75 * b) < 2e-6 for a, b in zip(found, exact, strict=True))


@inside
def test_traced_and_plain_calls_agree() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        seen: set[str] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen.add(str(func))
            return func(*args, **(kwargs or {}))

    made = problem(5)
    indices = dsa_indexer(*made[:3], top_k=3)
    lse = attention_lse(*made[3:], indices, FLAT)

    def run() -> list[torch.Tensor]:
        return both(made, lse, indices, deterministic=True)[0]

    plain = run()
    with Watch() as watch:
        traced = run()
    assert any("dsa_kl_forward" in name for name in watch.seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def pools_problem(T: int, P: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indexer and attention, lse over pools and begun ones, two chosen pools a query, and their tokens."""
    q, _, weights, q_main, k_main = problem(T)
    keys = normal(T // P, 16, seed=9)
    whole = (torch.arange(T) + 1) // P
    chosen = torch.stack((whole - 1, torch.where(whole > 1, 0, -1)), 1).clamp_min(-1).to(torch.int32)
    tokens = chosen[..., None] * P + torch.arange(P)
    tokens = torch.where(chosen[..., None] >= 0, tokens, -1).flatten(1).to(torch.int32)
    own = torch.arange(T, dtype=torch.int32)[:, None]
    lse = attention_lse(q_main, k_main, torch.cat((tokens, torch.where(whole[:, None] * P <= own, own, -1)), 1), FLAT)
    return (q, keys, weights, q_main, k_main), lse, chosen, tokens


def pools_near(P: int, deterministic: bool, T: int = 11) -> list[torch.Tensor]:
    made, lse, chosen, tokens = pools_problem(T, P)
    leaves = [x.clone().requires_grad_() for x in made[:3]]
    rest = (lse, chosen, tokens)
    loss = dsa_pooled_kl(*leaves, *made[3:], *rest, attention_scale=FLAT, deterministic=deterministic)
    wide = [x.double().requires_grad_() for x in made[:3]]
    teacher = (*(x.double() for x in made[3:]), lse.double(), chosen, tokens)
    exact = dsa_pooled_kl_reference(*wide, *teacher, scale=default_scale(made[0]), attention_scale=FLAT)
    found = [loss, *torch.autograd.grad(loss, leaves)]
    assert near((found, [exact, *torch.autograd.grad(exact, wide)])) and float(exact) > 0.01
    return [x.detach() for x in found]


@inside
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_indexer_of_pools_learns_the_attention_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Loss, dq, dk of the pools, dw against fp64, with rows of no pool, of one, of two; three queries at a time too."""
    whole = pools_near(4, deterministic)
    assert whole[1][:3].eq(0).all(), "the first three queries see no whole pool"
    monkeypatch.setattr(configs, "ROW_BYTES", 3 * 4 * 8)
    assert configs.chunk_rows(11, 8) == 3
    assert all(torch.equal(a, b) for a, b in zip(pools_near(4, True), pools_near(4, True), strict=True))


@outside
def test_the_loss_of_pools_is_traced_by_shapes_alone() -> None:
    (q, keys, weights, *main), lse, chosen, tokens = pools_problem(8, 4)
    leaves = [x.to("meta").requires_grad_() for x in (q, keys, weights)]
    rest = [x.to("meta") for x in (*main, lse, chosen, tokens)]
    loss = dsa_pooled_kl(*leaves, *rest, attention_scale=FLAT)
    assert loss.shape == () and [g.shape for g in torch.autograd.grad(loss, leaves)] == [x.shape for x in leaves]


@inside
def test_pools_of_one_key_are_keys() -> None:
    made = problem(7)
    indices = dsa_indexer(*made[:3], top_k=3)
    lse = attention_lse(*made[3:], indices, FLAT)
    leaves = [x.clone().requires_grad_() for x in made[:3]]
    loss = dsa_pooled_kl(*leaves, *made[3:], lse, indices, indices, attention_scale=FLAT)
    found = [loss, *torch.autograd.grad(loss, leaves)]
    assert near((found, both(made, lse, indices)[1]))


@inside
def test_pools_that_do_not_fit_are_refused() -> None:
    (q, keys, weights, *main), lse, chosen, tokens = pools_problem(8, 4)

    def code(**changed: torch.Tensor) -> str:
        given = {"q": q, "keys": keys, "chosen": chosen, "tokens": tokens, **changed}
        with pytest.raises(KernelError) as caught:
            dsa_pooled_kl(
                given["q"], given["keys"], weights, *main, lse, given["chosen"], given["tokens"], attention_scale=FLAT
            )
        return caught.value.code

    assert code(tokens=tokens[:, :7].contiguous()) == "kernel/bad-pools"
    assert code(keys=normal(9, 16)) == "kernel/bad-pools"
    assert code(tokens=tokens[:4].contiguous()) == "kernel/wrong-shape"
    assert code(chosen=torch.where(chosen == 0, 99, chosen)) == "kernel/index-out-of-range"
    assert code(q=q * float("nan")) == "kernel/nan-scores"


def test_a_mean_is_split_without_loss() -> None:
    for T in (1, 2, 3, 12, 8192, 8191):
        m, power = factors(T, True)
        assert m * power == pytest.approx(1 / T, rel=1e-15) and 0.5 < m <= 1
    assert factors(7, False) == (1.0, 1.0)


def test_widths_split_into_powers() -> None:
    assert [contract.pieces(M) for M in (16, 48, 128, 192, 576)] == [(16, 0), (32, 16), (128, 0), (128, 64), (512, 64)]
    for M in (8, 20, 112):
        with pytest.raises(KernelError) as caught:
            contract.pieces(M)
        assert caught.value.code == "kernel/bad-head-dim"


def test_the_loss_is_a_divergence() -> None:
    """Reference: 0 for equal distributions, positive else, closed form for two keys."""
    seen = torch.tensor([[True, True, False]])
    scores = torch.tensor([[0.0, 1.0, 9.0]], dtype=torch.float64)
    share = scores[:, :2].softmax(-1)
    same = torch.cat((share, torch.zeros(1, 1)), 1)
    assert kl_rows_reference(same, scores, seen).abs().item() < 1e-15
    other = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    by_hand = sum(p * (torch.tensor(p).double().log() - q.log()) for p, q in zip((0.25, 0.75), share[0], strict=True))
    assert kl_rows_reference(other, scores, seen).item() == pytest.approx(float(by_hand))


def test_targets_sum_to_one_over_any_selection() -> None:
    _, _, _, q_main, k_main = problem(5, 4, 2)
    indices = torch.tensor([[0, -1], [1, 0], [2, 0], [-1, -1], [3, 4]], dtype=torch.int32)
    lse = attention_lse(q_main, k_main, indices, FLAT)
    total = target_reference(q_main, k_main, lse, indices, indices >= 0, FLAT).sum(-1)
    assert torch.allclose(total, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]))


def test_memory_is_linear_in_queries() -> None:
    """Workspace within 256 MiB; what is saved grows with T alone, in both stages."""
    for K in (0, 2048):
        sizes = {T: cost(T, 64, 128, K, 64, 576, "bfloat16") for T in (8192, 65_536)}
        assert all(found.forward.workspace_bytes <= 256 * 2**20 for found in sizes.values())
        assert sizes[65_536].saved_bytes == 8 * sizes[8192].saved_bytes


@inside
def test_an_indexer_learns_its_attention_from_detached_states() -> None:
    """Four steps down the gradient lower the loss, in the sparse stage; the states that feed it get no gradient."""
    T, hidden = 8, normal(8, 12, seed=21).requires_grad_()
    q_main, k_main = normal(T, 2, 16, seed=22), normal(T, 1, 16, seed=23)
    to_q, to_k, to_w = (normal(12, n, seed=at).mul_(0.3).requires_grad_() for at, n in ((24, 32), (25, 16), (26, 2)))
    learning, losses = [to_q, to_k, to_w], []
    states = hidden.detach()
    indices = torch.arange(T, dtype=torch.int32).expand(T, T)
    indices = torch.where(indices <= torch.arange(T)[:, None], indices, -1).to(torch.int32).contiguous()
    lse = attention_lse(q_main, k_main, indices, FLAT)
    for _ in range(4):
        made = (states @ to_q).view(T, 2, 16), states @ to_k, states @ to_w
        loss = dsa_kl(*made, q_main, k_main, lse, indices, attention_scale=FLAT)
        losses.append(loss.item())
        loss.backward()
        with torch.no_grad():
            for weight in learning:
                assert weight.grad is not None and weight.grad.abs().sum() > 0
                weight -= 0.2 * weight.grad
                weight.grad = None
    assert hidden.grad is None and losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
