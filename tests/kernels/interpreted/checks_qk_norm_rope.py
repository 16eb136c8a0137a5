"""Query/key norm + RoPE in true bf16, fp16 and fp32. Runs under TRITON_INTERPRET=1.

Legend: B batch, T tokens, Q and K heads, D head width, W rotary width.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardwright.kernels import interpreter

interpreter.install()

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shardwright.kernels.cases import OpSuite  # noqa: E402
from shardwright.kernels.launch import Launch  # noqa: E402
from shardwright.kernels.qk_norm_rope import cases  # noqa: E402
from shardwright.kernels.qk_norm_rope.contract import PAIRINGS  # noqa: E402
from shardwright.kernels.qk_norm_rope.launches import Inputs, Settings, launch_backward, launch_forward  # noqa: E402
from shardwright.kernels.qk_norm_rope.op import (  # noqa: E402
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_norm_rope_forward,
)
from shardwright.kernels.qk_norm_rope.reference import qk_norm_rope_reference  # noqa: E402
from shardwright.kernels.verify import judge, poisoned_memory, values, verify_case, verify_repeats  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402

EPS = 1e-6
SUITES = (cases.SUITE, cases.PAIRS_SUITE, cases.MLA_SUITE)
NAMES = ("q", "k", "dq", "dk", "dq_weight", "dk_weight")
models = pytest.importorskip("transformers.models")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(*tokens: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 9) -> tuple[Tensor, Tensor]:
    """cos and sin ``[..., T, W]`` of random positions, both halves alike, on a grid that bf16 holds."""
    position = torch.randint(0, 5000, tokens, generator=torch.Generator().manual_seed(seed))
    angle = position[..., None] * 100.0 ** (-torch.arange(0, width, 2) / width)
    whole = torch.cat([angle, angle], -1)
    cos, sin = (torch.round(f(whole) * 256) / 256 for f in (torch.cos, torch.sin))
    return cos.to(dtype), sin.to(dtype)


def outcome(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    with poisoned_memory():
        return values(function, inputs, gradients)


def compare(
    fused: Callable[..., tuple[Tensor, ...]], plain: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]
) -> None:
    """Every output and gradient of ``fused``, held to the error of ``plain`` in the same dtype."""
    truth = plain(*(t.double() for t in inputs))
    gradients = [draw(*out.shape, seed=30 + at, dtype=inputs[0].dtype) for at, out in enumerate(truth)]
    exact = values(plain, [t.double() for t in inputs], [g.double() for g in gradients])
    eager = values(plain, inputs, gradients)
    found = outcome(fused, inputs, gradients)
    results = [judge("qk", "", n, *three) for n, *three in zip(NAMES, found, eager, exact, strict=False)]
    assert len(results) >= 4 and [result for result in results if not result.ok] == []


@pytest.mark.parametrize("suite", SUITES, ids=["halves", "pairs", "mla"])
@pytest.mark.parametrize("dtype", cases.SUITE.dtypes, ids=str)
def test_error_is_no_larger_than_eagers(suite: OpSuite, dtype: torch.dtype) -> None:
    """All dtypes and pairings, odd sizes, zero tokens, NaN-poisoned memory, learning weights."""
    results = [result for shape in suite.small_shapes for result in verify_case(suite, shape, dtype, "cpu")]
    assert len(results) >= 12 and [result for result in results if not result.ok] == []


def joint(x: Tensor, Q: int, K: int, D: int) -> tuple[Tensor, Tensor]:
    """q and k as slices of one projection ``[B, T, (Q + 2K)·D]``."""
    heads = x.view(*x.shape[:-1], Q + 2 * K, D)
    return heads[..., :Q, :], heads[..., Q : Q + K, :]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_views_of_a_joint_projection(pairing: str, last: bool, norm: bool, whole: bool) -> None:
    """Every rotary kind, first and last dimensions, whole and half tables, positions for each batch row."""
    B, T, Q, K, D, W = 2, 3, 3, 2, 48, 16
    cos, sin = tables(B, T, width=W)
    if not whole:
        cos, sin = cos[..., : W // 2], sin[..., : W // 2]
    kind: dict[str, Any] = {"width": W, "pairing": pairing, "last": last}

    def run(function: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        named = {"q_weight": weights[0], "k_weight": weights[1], "eps": EPS} if norm else {}
        table = (cos.to(x.dtype), sin.to(x.dtype))
        found: tuple[Tensor, ...] = function(*joint(x, Q, K, D), *table, **kind, **named)
        return found

    x = draw(B, T, (Q + 2 * K) * D)
    weights = [draw(D, seed=1), draw(D, seed=2)] if norm else []
    truth = run(qk_norm_rope_reference, x.double(), *(w.double() for w in weights))
    gradients = [draw(*out.shape, seed=5 + at) for at, out in enumerate(truth)]
    three = [
        values(
            lambda *i: run(qk_norm_rope_reference, *i),
            [t.double() for t in (x, *weights)],
            [g.double() for g in gradients],
        ),
        values(lambda *i: run(qk_norm_rope_reference, *i), [x, *weights], gradients),
        outcome(lambda *i: run(qk_norm_rope, *i), [x, *weights], gradients),
    ]
    for name, exact, eager, found in zip(("q", "k", "dx", "dq_weight", "dk_weight"), *three, strict=False):
        assert judge("qk", "", name, found, eager, exact).ok, (name, found)
    assert three[2][0].is_contiguous() and three[2][1].is_contiguous()


def test_a_whole_table_may_differ_between_its_halves() -> None:
    """half pairing reads both halves of the table, as transformers' formula does."""
    q, k = draw(4, 2, 32, dtype=torch.float32), draw(4, 1, 32, seed=1, dtype=torch.float32)
    cos, sin = draw(4, 32, seed=2, dtype=torch.float32), draw(4, 32, seed=3, dtype=torch.float32)
    compare(
        lambda q, k: qk_norm_rope(q, k, cos, sin, width=32),
        lambda q, k: qk_norm_rope_reference(q, k, cos.to(q.dtype), sin.to(q.dtype), width=32),
        [q, k],
    )


def test_mla_rotates_the_end_of_wide_queries_and_one_narrow_key() -> None:
    """DeepSeek-V3: 128 + 64 wide queries, one 64 wide key that is a slice of the latent projection."""
    q, latent = draw(2, 3, 4, 192), draw(2, 3, 576, seed=1)
    cos, sin = tables(1, 3, width=64)
    kind: dict[str, Any] = {"width": 64, "pairing": "interleaved-to-half", "last": True}

    def run(function: Any, q: Tensor, latent: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = function(q, latent[..., None, 512:], cos.to(q.dtype), sin.to(q.dtype), **kind)
        return found

    compare(lambda *i: run(qk_norm_rope, *i), lambda *i: run(qk_norm_rope_reference, *i), [q, latent])


def model(name: str) -> Any:
    return import_module(f"transformers.models.{name}.modeling_{name}")


def heads_first(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """transformers' rotation takes ``[B, heads, T, D]``; back to ``[B, T, heads, D]``."""
    found = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return tuple(x.transpose(1, 2) for x in found)


@pytest.mark.parametrize(
    ("name", "function", "D", "W", "pairing"),
    [
        ("qwen3_moe", "apply_rotary_pos_emb", 32, 32, "half"),
        ("glm4_moe", "apply_rotary_pos_emb", 32, 16, "half"),
        ("minimax_m2", "apply_rotary_pos_emb", 48, 32, "half"),
        ("glm4", "apply_rotary_pos_emb", 32, 16, "interleaved"),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", 32, 32, "interleaved-to-half"),
    ],
)
def test_rotations_are_those_of_transformers(name: str, function: str, D: int, W: int, pairing: str) -> None:
    """fp32, against the model's own function, gradients included."""
    theirs = getattr(model(name), function)
    q, k = (draw(2, 5, heads, D, seed=heads, dtype=torch.float32).requires_grad_() for heads in (4, 2))
    cos, sin = tables(2, 5, width=W)
    outs = heads_first(theirs, q, k, cos, sin), qk_norm_rope(q, k, cos, sin, width=W, pairing=pairing)
    dys = [draw(2, 5, heads, D, seed=50 + heads, dtype=torch.float32) for heads in (4, 2)]
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(out, (q, k), dys) for out in outs]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "norm", "W"), [("qwen3_moe", "Qwen3MoeRMSNorm", 32), ("qwen3_next", "Qwen3NextRMSNorm", 8)]
)
def test_norm_and_rotation_are_those_of_transformers(name: str, norm: str, W: int) -> None:
    """Qwen3-MoE's weights are factors; Qwen3-Next stores their distance from 1 and rotates a quarter."""
    D, module = 32, model(name)
    norms = [getattr(module, norm)(D, eps=EPS) for _ in range(2)]
    for at, layer in enumerate(norms):
        layer.weight.data = draw(D, seed=70 + at, dtype=torch.float32)
    q, k = (draw(2, 5, heads, D, seed=heads, dtype=torch.float32).requires_grad_() for heads in (4, 2))
    cos, sin = tables(2, 5, width=W)
    dys = [draw(2, 5, heads, D, seed=50 + heads, dtype=torch.float32) for heads in (4, 2)]
    ours = qk_norm_rope(
        q,
        k,
        cos,
        sin,
        width=W,
        q_weight=norms[0].weight,
        k_weight=norms[1].weight,
        eps=EPS,
        unit_offset=name == "qwen3_next",
    )
    theirs = heads_first(module.apply_rotary_pos_emb, norms[0](q), norms[1](k), cos, sin)
    leaves = (q, k, norms[0].weight, norms[1].weight)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(out, leaves, dys) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_attention_scores_do_not_change_with_the_pairing() -> None:
    """interleaved and interleaved-to-half only order dimensions differently: q·k is the same."""
    q, k = draw(6, 2, 32, dtype=torch.float32), draw(6, 2, 32, seed=1, dtype=torch.float32)
    cos, sin = tables(6, width=32)
    scores = []
    for pairing in PAIRINGS[1:]:
        a, b = qk_norm_rope(q, k, cos, sin, width=32, pairing=pairing)
        scores.append(torch.einsum("thd,shd->hts", a, b))
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


def test_rotation_keeps_lengths_and_position_zero() -> None:
    q = draw(3, 2, 64, dtype=torch.float32)
    angle = torch.tensor([0.0, 1.0, 2.0])[:, None] * torch.rand(1, 32, generator=torch.Generator().manual_seed(0))
    a, _ = qk_norm_rope(q, q[:, :1], angle.cos(), angle.sin(), width=64)
    assert torch.equal(a[0], q[0]) and not torch.equal(a[1], q[1])
    torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1), rtol=1e-6, atol=0)


def test_weight_gradients_are_summed_in_fp32() -> None:
    """2,048 heads of 64 without rotation: a bf16 running sum is off by more than 1 % of the largest gradient."""
    q, dy = draw(256, 8, 64), draw(256, 8, 64, seed=2) + 1
    weight = torch.ones(64, dtype=torch.bfloat16).requires_grad_()
    cos, sin = torch.ones(256, 32), torch.zeros(256, 32)
    norm: dict[str, Any] = {"q_weight": weight, "k_weight": torch.ones(64).bfloat16(), "eps": EPS}
    a, _ = qk_norm_rope(q, q[:, :1], cos, sin, width=64, **norm)
    (dweight,) = torch.autograd.grad(a, weight, dy)
    terms = (q.double() * torch.rsqrt(q.double().pow(2).mean(-1, keepdim=True) + EPS) * dy.double()).flatten(0, 1)
    exact, running = terms.sum(0), torch.zeros(64, dtype=torch.bfloat16)
    for row in terms.bfloat16():
        running += row
    ours, narrow = (float((v.double() - exact).abs().max() / exact.abs().max()) for v in (dweight, running))
    assert ours < 4e-3 < 1e-2 < narrow


def test_epsilon_is_the_callers() -> None:
    """x = 0.058·randn, D 32, bf16: with eps 1e-6 the root mean square is 1 to 1e-3 after norm and rotation."""
    q = 0.058 * torch.randn(512, 4, 32, generator=torch.Generator().manual_seed(0))
    ones, (cos, sin) = torch.ones(32), tables(512, width=32)
    for eps, low, high in ((1e-6, 0.996, 1.004), (1.0, 0.0, 0.1)):
        a, _ = qk_norm_rope(
            q.bfloat16(), q[:, :1].bfloat16(), cos, sin, width=32, q_weight=ones, k_weight=ones, eps=eps
        )
        assert low < float(a.double().pow(2).mean().sqrt()) < high


def test_inputs_stay_untouched_and_can_be_used_twice() -> None:
    """D5: q goes into two rotations and a product; recomputation gives the same bits."""
    q, k = draw(6, 4, 64, dtype=torch.float32).requires_grad_(), draw(6, 2, 64, seed=1, dtype=torch.float32)
    cos, sin = tables(6, width=64)
    before = [t.detach().clone() for t in (q, k, cos, sin)]
    first, second = (qk_norm_rope(q, k, cos, sin, width=64) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (twice,) = torch.autograd.grad(first[0].sum() + second[0].sum() + (q * q).sum(), q)
    (once,) = torch.autograd.grad(qk_norm_rope(q, k, cos, sin, width=64)[0].sum(), q)
    torch.testing.assert_close(twice, 2 * once + 2 * q.detach())
    assert all(torch.equal(a.detach(), b) for a, b in zip((q, k, cos, sin), before, strict=True))
    places = {t.untyped_storage().data_ptr() for t in (q, k, *first, *second)}
    assert len(places) == 6


def test_an_adapter_below_gets_its_gradient() -> None:
    """D8: the rotation has a backward, so LoRA on q and on k learns."""
    x = draw(6, 16, dtype=torch.float32)
    low = [draw(16, heads * 32, seed=heads, dtype=torch.float32).requires_grad_() for heads in (4, 2)]
    q, k = ((x @ w).view(6, -1, 32) for w in low)
    a, b = qk_norm_rope(q, k, *tables(6, width=32), width=32)
    assert a.grad_fn is not None and b.grad_fn is not None
    grads = torch.autograd.grad((a.pow(2).sum(-1) * b.sum()).sum(), low)
    assert all(float(g.norm()) > 0.1 for g in grads)


def test_an_expanded_or_transposed_gradient_is_read_right() -> None:
    """D6, and the layout that attention hands back."""
    B, T, Q, K, D = 2, 3, 4, 2, 32
    q, k = (draw(B, T, heads, D, seed=heads, dtype=torch.float32).requires_grad_() for heads in (Q, K))
    cos, sin = tables(B, T, width=16)

    def grads(of: Callable[[Tensor, Tensor], Any]) -> tuple[Tensor, ...]:
        a, b = qk_norm_rope(q, k, cos, sin, width=16)
        return torch.autograd.grad(*of(a, b))

    ones = [torch.ones(B, T, heads, D) for heads in (Q, K)]
    summed = grads(lambda a, b: (a.sum() + b.sum(), (q, k)))
    plain = grads(lambda a, b: ((a, b), (q, k), ones))
    assert all(torch.equal(x, y) for x, y in zip(summed, plain, strict=True))
    turned = [draw(B, heads, T, D, seed=heads, dtype=torch.float32).transpose(1, 2) for heads in (Q, K)]
    strided = grads(lambda a, b: ((a, b), (q, k), turned))
    dense = grads(lambda a, b: ((a, b), (q, k), [g.contiguous() for g in turned]))
    assert all(torch.equal(x, y) for x, y in zip(strided, dense, strict=True))


def test_only_queries_or_only_keys_may_be_used() -> None:
    q, k = (draw(3, heads, 32, seed=heads, dtype=torch.float32).requires_grad_() for heads in (4, 2))
    cos, sin = tables(3, width=32)
    dq, dk = torch.autograd.grad(qk_norm_rope(q, k, cos, sin, width=32)[0].sum(), (q, k))
    assert float(dq.norm()) > 0 and torch.equal(dk, torch.zeros_like(k))


def test_frozen_weights_cost_no_gradient() -> None:
    q, k = draw(6, 4, 64).requires_grad_(), draw(6, 2, 64, seed=1)
    weights, (cos, sin) = [draw(64, seed=2), draw(64, seed=3)], tables(6, width=64)
    fixed = (64, "half", False, EPS, False)
    found = qk_norm_rope_backward(q.detach(), k, q.detach(), k, cos, sin, *weights, *fixed, False)
    assert found[2].numel() == found[3].numel() == 0

    def dq() -> Tensor:
        named = {"q_weight": weights[0], "k_weight": weights[1], "eps": EPS}
        a, b = qk_norm_rope(q, k, cos, sin, width=64, **named)  # type: ignore[arg-type]
        wanted = [q, *(w for w in weights if w.requires_grad)]
        return torch.autograd.grad(a.sum() + b.sum(), wanted)[0]

    frozen = dq()
    for weight in weights:
        weight.requires_grad_()
    assert torch.equal(frozen, dq())


def test_zero_tokens_stay_on_the_graph() -> None:
    q, k = torch.empty(2, 0, 4, 32, requires_grad=True), torch.empty(2, 0, 2, 32, requires_grad=True)
    weights = [torch.ones(32, requires_grad=True) for _ in range(2)]
    named: dict[str, Any] = {"q_weight": weights[0], "k_weight": weights[1], "eps": EPS}
    a, b = qk_norm_rope(q, k, *tables(0, width=32), width=32, **named)
    found = torch.autograd.grad(a.sum() + b.sum(), (q, k, *weights))
    assert a.shape == (2, 0, 4, 32) and found[0].shape == (2, 0, 4, 32)
    assert torch.equal(found[2], torch.zeros(32)) and torch.equal(found[3], torch.zeros(32))


def test_nan_stays_in_its_head() -> None:
    """With a norm a NaN takes its head of its token; without one it takes the two values that it turns."""
    q, k = draw(5, 4, 64), draw(5, 2, 64, seed=1)
    cos, sin = tables(5, width=64)
    ones: dict[str, Any] = {"q_weight": torch.ones(64), "k_weight": torch.ones(64), "eps": EPS}
    for norm, reached in ((ones, 64), ({}, 2)):
        clean = qk_norm_rope(q, k, cos, sin, width=64, **norm)
        broken = q.clone()
        broken[2, 1, 7] = float("nan")
        found = qk_norm_rope(broken, k, cos, sin, width=64, **norm)
        lost = found[0].isnan()
        assert int(lost.sum()) == int(lost[2, 1].sum()) == reached
        assert torch.equal(found[0][~lost], clean[0][~lost]) and torch.equal(found[1], clean[1])


@pytest.mark.parametrize("launch", [Launch(1, 4, 1, 1), Launch(4, 4, 2, 2), Launch(16, 4, 1, 8)])
def test_every_launch_gives_the_same_values_and_writes_nothing_outside(launch: Launch) -> None:
    """Guard bands around every output keep their NaN; odd sizes leave ragged tiles."""
    T, Q, K, D, W, band = 5, 3, 2, 22, 12, 64
    q, k = (draw(T, heads, D, seed=heads, dtype=torch.float32) for heads in (Q, K))
    dq_out, dk_out = (draw(T, heads, D, seed=9 + heads, dtype=torch.float32) for heads in (Q, K))
    weights = [draw(D, seed=20 + at, dtype=torch.float32) for at in range(2)]
    cos, sin = tables(T, width=W)
    fixed = Settings(W, "interleaved", True, EPS)
    sizes = {"q": T * Q * D, "k": T * K * D, "dq": T * Q * D, "dk": T * K * D, "dwq": D, "dwk": D}
    room = {name: torch.full((band + n + band,), float("nan")) for name, n in sizes.items()}
    view = {name: whole[band : len(whole) - band] for name, whole in room.items()}
    given = Inputs(q, k, cos, sin, *weights)
    launch_forward(given, fixed, (view["q"], view["k"]), launch)
    learn = (view["dwq"], view["dwk"])
    launch_backward((dq_out, dk_out), given, fixed, (view["dq"], view["dk"]), learn, launch)
    leaves = [t.double().requires_grad_() for t in (q, k, *weights)]
    named: dict[str, Any] = {"q_weight": leaves[2], "k_weight": leaves[3], "eps": EPS}
    kind: dict[str, Any] = {"width": W, "pairing": "interleaved", "last": True}
    outs = qk_norm_rope_reference(leaves[0], leaves[1], cos.double(), sin.double(), **kind, **named)
    exact = [*outs, *torch.autograd.grad(outs, leaves, [dq_out.double(), dk_out.double()])]
    for produced, truth in zip(view.values(), exact, strict=True):
        torch.testing.assert_close(produced.view(truth.shape).double(), truth, rtol=1e-5, atol=1e-5)
    for whole in room.values():
        assert bool(whole[:band].isnan().all()) and bool(whole[-band:].isnan().all())


def test_two_runs_give_the_same_bits() -> None:
    assert verify_repeats(cases.SUITE, cases.SUITE.small_shapes[0], torch.bfloat16, "cpu").ok


def test_compiled_and_faked_calls_see_one_opaque_operator() -> None:
    x, weights = draw(2, 5, 8 * 32).requires_grad_(), [draw(32, seed=at).requires_grad_() for at in (1, 2)]
    cos, sin = tables(2, 5, width=32, dtype=torch.bfloat16)

    def block(x: Tensor, qw: Tensor, kw: Tensor) -> Tensor:
        q, k = joint(x * 2, 4, 2, 32)
        a, b = qk_norm_rope(q, k, cos, sin, width=32, q_weight=qw, k_weight=kw, eps=EPS)
        return a.sum(2) + b.sum(2)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    outs = [f(x, *weights) for f in (block, compiled)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out, (x, *weights), torch.ones_like(out)) for out in outs]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with FakeTensorMode():
        q, k = (torch.empty(3, 7, heads, 64, device="cuda") for heads in (4, 1))
        table = torch.empty(3, 7, 32, device="cuda")
        a, b = qk_norm_rope(q, k, table, table, width=32)
        assert a.shape == q.shape and b.shape == k.shape and a.device.type == "cuda"
    meta = [torch.empty(7, heads, 64, device="meta") for heads in (4, 1)]
    assert qk_norm_rope(*meta, *(torch.empty(7, 64, device="meta") for _ in range(2)), width=64)[0].is_meta


def test_the_registered_operator_is_well_formed() -> None:
    q, k = (draw(4, heads, 32, seed=heads, dtype=torch.float32).requires_grad_() for heads in (2, 1))
    weights = [draw(32, seed=at, dtype=torch.float32).requires_grad_() for at in (3, 4)]
    inputs = (q, k, *tables(4, width=16), *weights, 16, "interleaved", True, EPS, True)
    torch.library.opcheck(qk_norm_rope_forward, inputs)
    torch.library.opcheck(
        qk_norm_rope_forward, (q, k, *tables(4, width=16), None, None, 16, "half", False, None, False)
    )


def test_guards_speak_from_the_operator() -> None:
    q, k = draw(4, 4, 32), draw(4, 2, 32, seed=1)
    cos, sin = tables(4, width=32)
    w = draw(32, seed=3)

    def call(*inputs: Tensor, **named: Any) -> Callable[[], Any]:
        return lambda: qk_norm_rope(*inputs, **{"width": 32, **named})

    normed = {"q_weight": w, "k_weight": w, "eps": EPS}
    refused: dict[str, list[Callable[[], Any]]] = {
        "dtype-mixed": [
            call(q, k.float(), cos, sin),
            call(q, k, cos, sin.bfloat16()),
            call(q, k, cos, sin, **{**normed, "q_weight": w.half(), "k_weight": w.half()}),
            call(q, k, cos, sin, **{**normed, "k_weight": w.float()}),
        ],
        "dtype-unsupported": [call(q.double(), k.double(), cos, sin), call(q, k, cos.long(), sin.long())],
        "wrong-shape": [
            call(q, k[:3], cos, sin),
            call(q[0], k[0], cos, sin),
            call(q, k[None], cos, sin),
            call(q, k, cos, sin, **{**normed, "k_weight": w[:16]}),
        ],
        "rotary-width": [call(q, k, cos, sin, width=n) for n in (31, 0, -2, 34)],
        "table-shape": [
            call(q, k, cos[:3], sin[:3]),
            call(q, k, cos[:, :30], sin[:, :30]),
            call(q, k, cos, sin[:, :16]),
            call(q, k, cos.expand(2, 4, 32), sin.expand(2, 4, 32)),
            call(q[None], k[None], cos.expand(2, 4, 32), sin.expand(2, 4, 32)),
        ],
        "unknown-pairing": [call(q, k, cos, sin, pairing="quarter")],
        "one-weight": [call(q, k, cos, sin, q_weight=w, eps=EPS)],
        "bad-epsilon": [
            call(q, k, cos, sin, eps=EPS),
            call(q, k, cos, sin, **{**normed, "eps": None}),
            call(q, k, cos, sin, **{**normed, "eps": -1.0}),
        ],
        "hidden-too-large": [call(draw(4, 1, 514), k, cos, sin)],
        "not-contiguous": [call(draw(4, 32, 4).transpose(1, 2), k, cos, sin)],
        "misaligned": [call(draw(513)[1:].view(4, 4, 32), k, cos, sin)],
        "table-needs-gradient": [call(q, k, cos.clone().requires_grad_(), sin)],
    }
    for code, calls in refused.items():
        for run in calls:
            with pytest.raises(KernelError) as caught:
                run()
            assert caught.value.code == f"kernel/{code}" and caught.value.where == "qk_norm_rope", caught.value


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_size_gives_the_fp64_values(data: st.DataObject) -> None:
    """Sizes, pairing, placement, tables and norm drawn freely; every gradient compared."""
    B, T, Q, K = (data.draw(st.integers(1, most)) for most in (2, 4, 3, 2))
    half = data.draw(st.integers(1, 12))
    D, DK = (2 * half + data.draw(st.integers(0, 9)) for _ in range(2))
    kind: dict[str, Any] = {
        "width": 2 * half,
        "pairing": data.draw(st.sampled_from(PAIRINGS)),
        "last": data.draw(st.booleans()),
    }
    norm, shared = data.draw(st.booleans()), data.draw(st.booleans())
    cos, sin = tables(*((T,) if shared else (B, T)), width=2 * half)
    inputs = [draw(B, T, Q, D, dtype=torch.float32), draw(B, T, K, DK, seed=1, dtype=torch.float32)]
    if norm:
        inputs += [draw(D, seed=2, dtype=torch.float32), draw(DK, seed=3, dtype=torch.float32)]
        kind |= {"eps": 1e-5, "unit_offset": data.draw(st.booleans())}

    def run(function: Any, q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        named = {"q_weight": weights[0], "k_weight": weights[1]} if weights else {}
        found: tuple[Tensor, ...] = function(q, k, cos.to(q.dtype), sin.to(q.dtype), **kind, **named)
        return found

    gradients = [draw(*t.shape, seed=7, dtype=torch.float32) for t in inputs[:2]]
    found = values(lambda *i: run(qk_norm_rope, *i), inputs, gradients)
    wide = [t.double() for t in inputs]
    exact = values(lambda *i: run(qk_norm_rope_reference, *i), wide, [g.double() for g in gradients])
    for ours, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=3e-5, atol=3e-5)
