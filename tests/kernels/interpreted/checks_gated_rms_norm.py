"""Gated RMSNorm in true bf16, fp16 and fp32. Runs under TRITON_INTERPRET=1.

Legend: T tokens, H heads, D row width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardwright.kernels import interpreter

interpreter.install()

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shardwright.kernels.gated_rms_norm import cases  # noqa: E402
from shardwright.kernels.gated_rms_norm.op import (  # noqa: E402
    gated_rms_norm,
    gated_rms_norm_backward,
    gated_rms_norm_forward,
    launch_backward,
    launch_forward,
)
from shardwright.kernels.gated_rms_norm.reference import gated_rms_norm_reference  # noqa: E402
from shardwright.kernels.launch import Launch  # noqa: E402
from shardwright.kernels.verify import judge, poisoned_memory, values, verify_case, verify_repeats  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402

EPS = 1e-5
KINDS = ("sigmoid", "silu")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "dense": ((5, 3, 64), lambda leaf: leaf),
    "slice of a joint projection": ((5, 3, 208), lambda leaf: leaf[..., 64:128]),
    "groups inside a joint projection": ((5, 1, 208), lambda leaf: leaf[..., 16:].view(5, 3, 64)),
    "value heads in groups": ((5, 2, 3, 200), lambda leaf: leaf[..., 8:72]),
    "heads before tokens": ((3, 5, 64), lambda leaf: leaf.transpose(0, 1)),
    "one gate for all heads": ((5, 1, 64), lambda leaf: leaf.expand(5, 3, 64)),
}
"""Name → shape of the tensor that model code holds, and the view of it that is the gate."""


@pytest.mark.parametrize("shape", cases.SUITE.small_shapes, ids=str)
@pytest.mark.parametrize("dtype", cases.SUITE.dtypes, ids=str)
def test_error_is_no_larger_than_eagers(shape: dict[str, int], dtype: torch.dtype) -> None:
    """All dtypes, odd sizes, zero rows, NaN-poisoned memory."""
    assert [result for result in verify_case(cases.SUITE, shape, dtype, "cpu") if not result.ok] == []


def test_a_row_of_one_column_keeps_its_small_gradient() -> None:
    """dx = dy·w·σ(gate)·eps/(x² + eps)^1.5: the difference 1 - x̂² would leave 1 % of it in fp32."""
    x, gate, weight, dy = (draw(9, 1, seed=at, dtype=torch.float32) for at in range(4))
    leaf, weight = x.clone().requires_grad_(), weight[0]
    (dx,) = torch.autograd.grad(gated_rms_norm(leaf, gate, weight, EPS, activation="sigmoid"), leaf, dy)
    scale = dy.double() * weight.double() * torch.sigmoid(gate.double())
    exact = scale * EPS / (x.double().square() + EPS) ** 1.5
    torch.testing.assert_close(dx.double(), exact, rtol=2e-6, atol=0)


def test_two_runs_give_the_same_bits() -> None:
    assert verify_repeats(cases.SUITE, {"T": 40, "H": 2, "D": 64}, torch.bfloat16, "cpu").ok


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYOUTS)
def test_both_gates_in_every_layout(activation: str, weight_dtype: torch.dtype, name: str) -> None:
    """Fused in bf16, held to eager bf16's own error; the weight may stay in fp32, as Kimi K3 stores it."""
    shape, view = LAYOUTS[name]
    leaf = draw(*shape, seed=2)
    x, weight, dy = draw(*view(leaf).shape), draw(64, seed=1, dtype=weight_dtype), draw(*view(leaf).shape, seed=3)

    def plain(x: Tensor, leaf: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (gated_rms_norm_reference(x, view(leaf), weight, EPS, activation),)

    def fused(x: Tensor, leaf: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (gated_rms_norm(x, view(leaf), weight, EPS, activation=activation),)

    inputs = [x, leaf, weight]
    exact = values(plain, [t.double() for t in inputs], [dy.double()])
    eager = values(plain, inputs, [dy])
    with poisoned_memory():
        found = values(fused, inputs, [dy])
    assert found[0].is_contiguous()
    results = [
        judge("", name, v, *four) for v, *four in zip(["y", "dx", "dleaf", "dw"], found, eager, exact, strict=True)
    ]
    assert [result for result in results if not result.ok] == []


@pytest.mark.parametrize("activation", KINDS)
def test_forward_has_eagers_bits_in_strict_form(activation: str) -> None:
    """The same fp32 operations and one rounding: at most one bf16 step apart, in few places."""
    x, gate, weight = draw(9, 4, 128), draw(9, 4, 128, seed=1), draw(128, seed=2)
    ours = gated_rms_norm(x, gate, weight, EPS, activation=activation)
    eager = gated_rms_norm_reference(x, gate, weight, EPS, activation)
    assert float((ours != eager).float().mean()) < 2e-3
    torch.testing.assert_close(ours, eager, rtol=2.0**-7, atol=0)


def test_weight_gradient_is_summed_in_fp32() -> None:
    """2,048 rows of 64 with an open gate: a bf16 running sum is off by more than 1 % of the largest gradient."""
    x, weight = draw(2048, 64), torch.ones(64, dtype=torch.bfloat16).requires_grad_()
    gate, dy = torch.full((2048, 64), 30.0).bfloat16(), draw(2048, 64, seed=2) + 1
    (dweight,) = torch.autograd.grad(gated_rms_norm(x, gate, weight, EPS, activation="sigmoid"), weight, dy)
    normalised = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)
    terms = normalised * dy.double()
    exact, running = terms.sum(0), torch.zeros(64, dtype=torch.bfloat16)
    for row in terms.bfloat16():
        running += row
    ours, narrow = (float((v.double() - exact).abs().max() / exact.abs().max()) for v in (dweight, running))
    assert ours < 4e-3 < 1e-2 < narrow


def test_rstd_is_kept_in_fp32() -> None:
    x, gate, weight = draw(3, 2, 96), draw(3, 2, 96, seed=1), draw(96, seed=2)
    _, rstd = gated_rms_norm_forward(x, gate, weight, EPS, "silu")
    exact = torch.rsqrt(x.double().pow(2).mean(-1) + EPS).flatten()
    assert rstd.dtype == torch.float32
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0)


def test_epsilon_is_the_callers() -> None:
    """x = 0.058·randn, D 32, an open gate: with eps 1e-6 the output's root mean square is 1 to 1e-3."""
    x = 0.058 * torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    weight, gate = torch.ones(32), torch.full((2048, 32), 40.0)
    y = gated_rms_norm(x.bfloat16(), gate.bfloat16(), weight, 1e-6, activation="sigmoid")
    assert abs(float(y.double().pow(2).mean().sqrt()) - 1) < 1e-3
    assert float(gated_rms_norm(x, gate, weight, 1.0, activation="sigmoid").pow(2).mean().sqrt()) < 0.1


def test_inputs_stay_untouched_and_can_be_used_twice() -> None:
    x, gate = draw(6, 2, 64).requires_grad_(), draw(6, 2, 64, seed=1).requires_grad_()
    weight = draw(64, seed=2).requires_grad_()
    before = [t.detach().clone() for t in (x, gate, weight)]
    first = gated_rms_norm(x, gate, weight, EPS, activation="silu")
    second = gated_rms_norm(x, x, weight, EPS, activation="silu")
    torch.autograd.grad(first.sum() + second.sum(), (x, gate, weight))
    assert all(torch.equal(a.detach(), b) for a, b in zip((x, gate, weight), before, strict=True))
    assert torch.equal(first, gated_rms_norm(x, gate, weight, EPS, activation="silu"))


def test_x_may_gate_itself() -> None:
    """One tensor in both roles: its gradient is the sum of both."""
    x, weight, dy = draw(4, 64, dtype=torch.float32), draw(64, seed=1, dtype=torch.float32), draw(4, 64, seed=2).float()
    leaf, plain = x.clone().requires_grad_(), x.double().requires_grad_()
    (ours,) = torch.autograd.grad(gated_rms_norm(leaf, leaf, weight, EPS, activation="silu"), leaf, dy)
    exact = gated_rms_norm_reference(plain, plain, weight.double(), EPS, "silu")
    (truth,) = torch.autograd.grad(exact, plain, dy.double())
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)


def test_an_expanded_or_transposed_gradient_is_read_right() -> None:
    x, gate = draw(6, 3, 96, dtype=torch.float32).requires_grad_(), draw(6, 3, 96, seed=1, dtype=torch.float32)
    weight = draw(96, seed=2, dtype=torch.float32)

    def y() -> Tensor:
        return gated_rms_norm(x, gate, weight, EPS, activation="sigmoid")

    (summed,) = torch.autograd.grad(y().sum(), x)
    (ones,) = torch.autograd.grad(y(), x, torch.ones(6, 3, 96))
    assert torch.equal(summed, ones)
    turned = draw(3, 6, 96, seed=4, dtype=torch.float32).transpose(0, 1)
    (strided,), (dense,) = (torch.autograd.grad(y(), x, g) for g in (turned, turned.contiguous()))
    assert torch.equal(strided, dense)


def test_a_frozen_weight_costs_no_gradient() -> None:
    x, gate, weight = draw(6, 96).requires_grad_(), draw(6, 96, seed=1), draw(96, seed=2)
    y, rstd = gated_rms_norm_forward(x.detach(), gate, weight, EPS, "silu")
    assert gated_rms_norm_backward(y, x.detach(), gate, weight, rstd, EPS, "silu", False)[2].numel() == 0
    (dx,) = torch.autograd.grad(gated_rms_norm(x, gate, weight, EPS, activation="silu").sum(), x)
    y = gated_rms_norm(x, gate, weight.requires_grad_(), EPS, activation="silu")
    assert torch.equal(dx, torch.autograd.grad(y.sum(), (x, weight))[0])


def test_saturated_gates_have_finite_gradients() -> None:
    """±100 and ±60000 through both activations: eager's own values, no NaN from 0·inf."""
    gate = torch.tensor([[-6e4, -100.0, -88.0, 0.0, 88.0, 100.0, 6e4, 1.0]] * 2).requires_grad_()
    x, weight = draw(2, 8, dtype=torch.float32).requires_grad_(), torch.ones(8)
    for activation in KINDS:
        outs = [
            gated_rms_norm(x, gate, weight, EPS, activation=activation),
            gated_rms_norm_reference(x, gate, weight, EPS, activation),
        ]
        ours, eager = ([y, *torch.autograd.grad(y, (x, gate), torch.ones(2, 8))] for y in outs)
        for a, b in zip(ours, eager, strict=True):
            assert bool(a.isfinite().all())
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_rows_of_zeros_give_zeros_and_finite_gradients() -> None:
    x, gate, weight = torch.zeros(2, 32, requires_grad=True), torch.zeros(2, 32), torch.ones(32)
    y = gated_rms_norm(x, gate, weight, 1e-6, activation="sigmoid")
    (dx,) = torch.autograd.grad(y, x, torch.ones(2, 32))
    assert bool((y == 0).all())
    torch.testing.assert_close(dx, torch.full((2, 32), 500.0), rtol=1e-5, atol=0)


def test_zero_rows_stay_on_the_graph() -> None:
    x, weight = torch.empty(0, 4, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    y = gated_rms_norm(x, torch.empty(0, 4, 64), weight, EPS, activation="silu")
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == (0, 4, 64) and torch.equal(dweight, torch.zeros(64))


@pytest.mark.parametrize("where", ["x", "gate"])
def test_nan_reaches_what_eager_gives_it_to(where: str) -> None:
    """A NaN in x takes its row; a NaN in the gate takes its one value."""
    x, gate, weight = draw(5, 64), draw(5, 64, seed=1), draw(64, seed=2)
    clean = gated_rms_norm(x, gate, weight, EPS, activation="silu")
    (x if where == "x" else gate)[2, 7] = float("nan")
    y = gated_rms_norm(x, gate, weight, EPS, activation="silu")
    reached = y.isnan()
    assert torch.equal(reached, gated_rms_norm_reference(x, gate, weight, EPS, "silu").isnan())
    assert int(reached.sum()) == (64 if where == "x" else 1)
    assert torch.equal(y[~reached], clean[~reached])


@pytest.mark.parametrize("launch", [Launch(1, 4, 1, 0), Launch(4, 4, 3, 1), Launch(2, 4, 2, 2)])
def test_every_launch_gives_the_same_values_and_writes_nothing_outside(launch: Launch) -> None:
    """Guard bands around every output keep their NaN; odd sizes leave ragged tiles."""
    T, D, band = 7, 33, 64
    x, gate, dy = (draw(T, D, seed=i, dtype=torch.float32) for i in range(3))
    weight = draw(D, seed=3, dtype=torch.float32)
    sizes = (("y", T * D), ("dx", T * D), ("dgate", T * D), ("dw", D), ("rstd", T))
    room = {name: torch.full((band + n + band,), float("nan")) for name, n in sizes}
    view = {name: whole[band : len(whole) - band] for name, whole in room.items()}
    square = {name: view[name].view(T, D) for name in ("y", "dx", "dgate")}
    launch_forward(x, gate, weight, EPS, True, square["y"], view["rstd"], launch)
    launch_backward(dy, x, gate, weight, view["rstd"], EPS, True, square["dx"], square["dgate"], view["dw"], launch)
    leaves = [t.double().requires_grad_() for t in (x, gate, weight)]
    y = gated_rms_norm_reference(leaves[0], leaves[1], leaves[2], EPS, "silu")
    exact = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
    for name, truth in zip(("y", "dx", "dgate", "dw"), exact, strict=True):
        torch.testing.assert_close(view[name].view(truth.shape).double(), truth, rtol=1e-5, atol=1e-6)
    for whole in room.values():
        assert bool(whole[:band].isnan().all()) and bool(whole[-band:].isnan().all())


def test_compiled_and_faked_calls_see_one_opaque_operator() -> None:
    x, gate = draw(2, 5, 96).requires_grad_(), draw(2, 5, 192, seed=1).requires_grad_()
    weight, dy = draw(96, seed=2).requires_grad_(), draw(2, 5, 96, seed=3)

    def block(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(x * 2, gate[..., 96:], weight, EPS, activation="sigmoid") + 1

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    outs = [f(x, gate, weight) for f in (block, compiled)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out, (x, gate, weight), dy) for out in outs]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with FakeTensorMode():
        fake = [torch.empty(3, 7, 96, device="cuda"), torch.empty(7, 3, 96, device="cuda").transpose(0, 1)]
        y = gated_rms_norm(*fake, torch.empty(96, device="cuda"), EPS, activation="silu")
        assert y.shape == (3, 7, 96) and y.device.type == "cuda" and y.is_contiguous()
    meta = [torch.empty(4, 96, device="meta") for _ in range(2)]
    assert gated_rms_norm(*meta, torch.empty(96, device="meta"), EPS, activation="silu").shape == (4, 96)


def test_the_registered_operator_is_well_formed() -> None:
    x, gate, weight = (draw(*s, seed=i, dtype=torch.float32) for i, s in enumerate(((4, 96), (4, 96), (96,))))
    leaves = [t.requires_grad_() for t in (x, gate, weight)]
    torch.library.opcheck(gated_rms_norm_forward, (*leaves, EPS, "silu"))


def test_the_gradient_is_there() -> None:
    """An adapter below the gate gets a gradient that is not zero."""
    x, low = draw(4, 64, dtype=torch.float32), draw(8, 64, seed=1, dtype=torch.float32).requires_grad_()
    y = gated_rms_norm(x, draw(4, 8, seed=2).float() @ low, torch.ones(64), EPS, activation="sigmoid")
    assert y.grad_fn is not None
    assert float(torch.autograd.grad(y.pow(2).sum(), low)[0].norm()) > 0.1


def test_guards_speak_from_the_operator() -> None:
    x, gate, weight = draw(4, 96), draw(4, 96, seed=1), draw(96, seed=2)
    many = draw(2, 8, 3, 8, 5, 8, 3, 8, seed=3)[:, ::2, :, ::2, :, ::2]

    def call(*inputs: Tensor, eps: float = EPS, activation: str = "silu") -> Callable[[], Tensor]:
        return lambda: gated_rms_norm(*inputs, eps, activation=activation)

    refused = {
        "kernel/dtype-mixed": [call(x, gate.float(), weight), call(x, gate, weight.half())],
        "kernel/dtype-unsupported": [call(x.double(), gate.double(), weight.double())],
        "kernel/wrong-shape": [call(x, gate[:3], weight), call(x, gate, weight[:95])],
        "kernel/not-contiguous": [call(x, draw(96, 4).t(), weight)],
        "kernel/misaligned": [call(x, draw(385)[1:].view(4, 96), weight)],
        "kernel/hidden-too-large": [call(draw(1, 8193), draw(1, 8193), draw(8193))],
        "kernel/bad-epsilon": [call(x, gate, weight, eps=float("nan"))],
        "kernel/unknown-activation": [call(x, gate, weight, activation="relu")],
        "kernel/row-layout": [call(many, many, draw(8))],
    }
    for code, calls in refused.items():
        for run in calls:
            with pytest.raises(KernelError) as caught:
                run()
            assert caught.value.code == code and caught.value.where == "gated_rms_norm"


def test_transformers_agrees() -> None:
    """Kimi-Linear's sigmoid gate and Qwen3-Next's silu gate, in fp32 with gradients."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear").KimiLinearRMSNormGated
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next").Qwen3NextRMSNormGated
    for model, activation in ((kimi, "sigmoid"), (qwen, "silu")):
        module = model(64, eps=EPS)
        module.weight.data = draw(64, seed=2, dtype=torch.float32)
        leaves = [draw(3, 4, 64, seed=i, dtype=torch.float32).requires_grad_() for i in (0, 1)]
        dy = draw(3, 4, 64, seed=5, dtype=torch.float32)
        theirs = module(*leaves)
        ours = gated_rms_norm(*leaves, module.weight, EPS, activation=activation)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        grads = [torch.autograd.grad(y, (*leaves, module.weight), dy) for y in (ours, theirs)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(T=st.integers(0, 6), H=st.integers(1, 4), D=st.integers(1, 80), activation=st.sampled_from(KINDS))
def test_any_size_gives_the_fp64_values(T: int, H: int, D: int, activation: str) -> None:
    x, gate, dy = (draw(T, H, D, seed=i, dtype=torch.float32) for i in range(3))
    weight = draw(D, seed=3, dtype=torch.float32)
    leaves = [t.clone().requires_grad_() for t in (x, gate, weight)]
    wide = [t.double().requires_grad_() for t in (x, gate, weight)]
    y = gated_rms_norm(*leaves, EPS, activation=activation)
    exact = gated_rms_norm_reference(*wide, EPS, activation)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)
    pairs = zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(exact, wide, dy.double()), strict=True)
    for ours, truth in pairs:
        torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=2e-5)
