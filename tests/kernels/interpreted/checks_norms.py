"""RMSNorm and residual add + RMSNorm in true bf16, fp16 and fp32. Runs under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.add_rms_norm.op import add_rms_norm  # noqa: E402
from shardwright.kernels.launch import Launch  # noqa: E402
from shardwright.kernels.rms_norm import configs  # noqa: E402
from shardwright.kernels.rms_norm.op import (  # noqa: E402
    launch_backward,
    launch_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from shardwright.kernels.rms_norm.reference import rms_norm_reference  # noqa: E402
from shardwright.kernels.verify import verify_all  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402

EPS = 1e-6


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_error_is_no_larger_than_eagers(op: str) -> None:
    """All dtypes, odd sizes, zero rows, H that is no power of two, NaN-poisoned memory, repeated bits."""
    results = verify_all([op], "cpu")
    assert len(results) > 40
    assert [result for result in results if not result.ok] == []


def test_forward_has_eagers_bits() -> None:
    x, weight = draw(9, 576), draw(576, seed=1)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))


def test_weight_gradient_is_summed_in_fp32() -> None:
    """4,096 rows of 64: a bf16 running sum is off by more than 5 % of the largest gradient."""
    x, weight, dy = draw(4096, 64), torch.ones(64, dtype=torch.bfloat16), draw(4096, 64, seed=2) + 1
    leaf = weight.clone().requires_grad_()
    (dweight,) = torch.autograd.grad(rms_norm(x, leaf, EPS), leaf, dy)
    normalised = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)
    terms = normalised * dy.double()
    exact = terms.sum(0)
    running = torch.zeros(64, dtype=torch.bfloat16)
    for row in terms.bfloat16():
        running += row
    ours, narrow = (float((v.double() - exact).abs().max() / exact.abs().max()) for v in (dweight, running))
    assert ours < 4e-3 < 2e-2 < narrow


def test_rstd_is_kept_in_fp32() -> None:
    x, weight = draw(3, 96), draw(96, seed=1)
    _, rstd = rms_norm_forward(x, weight, EPS)
    assert rstd.dtype == torch.float32
    torch.testing.assert_close(rstd.double(), torch.rsqrt(x.double().pow(2).mean(-1) + EPS), rtol=1e-6, atol=0)


def test_epsilon_is_the_callers() -> None:
    """x = 0.058·randn, H 32: with eps 1e-6 the output's root mean square is 1 to 1e-3."""
    x = 0.058 * torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    y = rms_norm(x.bfloat16(), torch.ones(32, dtype=torch.bfloat16), EPS)
    assert abs(float(y.double().pow(2).mean().sqrt()) - 1) < 1e-3
    assert float(rms_norm(x, torch.ones(32), 1.0).pow(2).mean().sqrt()) < 0.1


def test_inputs_stay_untouched_and_can_be_used_twice() -> None:
    x, weight = draw(6, 64).requires_grad_(), draw(64, seed=1).requires_grad_()
    before = x.detach().clone()
    first = rms_norm(x, weight, EPS)
    torch.autograd.grad(first.sum() + rms_norm(x, weight, EPS).sum(), (x, weight))
    assert torch.equal(x.detach(), before)
    assert torch.equal(first, rms_norm(x, weight, EPS))


def test_an_expanded_gradient_equals_ones() -> None:
    x, weight = draw(6, 96, dtype=torch.float32).requires_grad_(), draw(96, seed=1, dtype=torch.float32)
    (summed,) = torch.autograd.grad(rms_norm(x, weight, EPS).sum(), x)
    (ones,) = torch.autograd.grad(rms_norm(x, weight, EPS), x, torch.ones(6, 96))
    assert torch.equal(summed, ones)
    r = draw(6, 96, seed=3, dtype=torch.float32).requires_grad_()
    y, total = add_rms_norm(x, r, weight, EPS)
    both = torch.autograd.grad(y.sum() + total.sum(), (x, r))
    plain = rms_norm_reference(x + r, weight, EPS)
    (expected,) = torch.autograd.grad(plain.sum() + (x + r).sum(), x)
    torch.testing.assert_close(both[0], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(both[0], both[1])


def test_a_frozen_weight_costs_no_gradient() -> None:
    x, weight = draw(6, 96).requires_grad_(), draw(96, seed=1)
    y, rstd = rms_norm_forward(x.detach(), weight, EPS)
    _, dweight = rms_norm_backward(y, x.detach(), weight, rstd, EPS, False)
    assert dweight.numel() == 0
    (dx,) = torch.autograd.grad(rms_norm(x, weight, EPS).sum(), x)
    (with_weight, _) = torch.autograd.grad(rms_norm(x, weight.requires_grad_(), EPS).sum(), (x, weight))
    assert torch.equal(dx, with_weight)


def test_only_the_sum_or_only_the_norm_may_be_used() -> None:
    x, r = draw(4, 64).requires_grad_(), draw(4, 64, seed=1).requires_grad_()
    weight = draw(64, seed=2)
    dy = draw(4, 64, seed=3)
    _, total = add_rms_norm(x, r, weight, EPS)
    assert all(torch.equal(g, dy) for g in torch.autograd.grad(total, (x, r), dy))
    y, _ = add_rms_norm(x, r, weight, EPS)
    (alone,) = torch.autograd.grad(y, x, dy)
    leaf = (x + r).detach().requires_grad_()
    (norm_only,) = torch.autograd.grad(rms_norm(leaf, weight, EPS), leaf, dy)
    assert torch.equal(alone, norm_only)


def test_zero_rows_give_zeros_and_finite_gradients() -> None:
    """Rows of zeros are not an empty batch: y is 0 and dx is dy·w/sqrt(eps)."""
    x, weight = torch.zeros(2, 32, requires_grad=True), torch.ones(32)
    y = rms_norm(x, weight, EPS)
    (dx,) = torch.autograd.grad(y, x, torch.ones(2, 32))
    assert bool((y == 0).all())
    torch.testing.assert_close(dx, torch.full((2, 32), 1e3), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_one_column_keeps_its_small_gradient(dtype: torch.dtype) -> None:
    """dx = dy·w·eps/(x² + eps)^1.5: the difference 1 - x̂² would leave 1 % of it, or nothing, in fp32."""
    x = torch.tensor([[3.0], [-0.7], [0.01], [0.0], [float("nan")]]).to(dtype)
    weight, dy = torch.tensor([1.5]).to(dtype), torch.tensor([[1.0], [-2.0], [0.5], [1.0], [1.0]]).to(dtype)
    wide = x.double()
    exact = dy.double() * weight.double() * EPS / (wide.square() + EPS) ** 1.5
    for call in (
        lambda leaf: rms_norm(leaf, weight, EPS),
        lambda leaf: add_rms_norm(leaf, torch.zeros_like(leaf), weight, EPS)[0],
    ):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(call(leaf), leaf, dy)
        rtol = 2e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(dx.double(), exact, rtol=rtol, atol=0, equal_nan=True)


def test_nan_stays_in_its_row() -> None:
    x, weight = draw(5, 64), draw(64, seed=1)
    clean = rms_norm(x, weight, EPS)
    x[2, 7] = float("nan")
    y = rms_norm(x, weight, EPS)
    assert bool(y[2].isnan().all())
    keep = [0, 1, 3, 4]
    assert torch.equal(y[keep], clean[keep])


@pytest.mark.parametrize(
    "launch", [Launch(1, 4, 1, 0), Launch(4, 4, 3, 1), Launch(2, 4, 2, 2), Launch(1, 4, 1, 0, True)]
)
def test_every_launch_gives_the_same_values_and_writes_nothing_outside(launch: Launch) -> None:
    """Guard bands around every output keep their NaN; odd T and H leave ragged tiles."""
    T, H, band = 7, 33, 64
    x, weight, dy = (draw(*s, seed=i, dtype=torch.float32) for i, s in enumerate(((T, H), (H,), (T, H))))
    room = {name: torch.full((band + n + band,), float("nan")) for name, n in (("y", T * H), ("dx", T * H), ("dw", H))}
    view = {name: whole[band : len(whole) - band] for name, whole in room.items()}
    rstd_room = torch.full((band + T + band,), float("nan"))
    rstd = rstd_room[band : band + T]
    launch_forward(x, weight, EPS, view["y"].view(T, H), rstd, launch)
    launch_backward(dy, x, weight, rstd, EPS, view["dx"].view(T, H), view["dw"], launch)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    y = rms_norm_reference(leaves[0], leaves[1], EPS)
    exact = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
    for produced, truth in zip(view.values(), exact, strict=True):
        torch.testing.assert_close(produced.view(truth.shape).double(), truth, rtol=1e-5, atol=1e-6)
    for whole in (*room.values(), rstd_room):
        assert bool(whole[:band].isnan().all()) and bool(whole[-band:].isnan().all())


def test_compiled_and_faked_calls_see_one_opaque_operator() -> None:
    x, r = draw(2, 5, 96).requires_grad_(), draw(2, 5, 96, seed=1).requires_grad_()
    weight, dy = draw(96, seed=2).requires_grad_(), draw(2, 5, 96, seed=3)

    def block(x: Tensor, r: Tensor, weight: Tensor) -> Tensor:
        y, total = add_rms_norm(x * 2, r, weight, EPS)
        return rms_norm(y, weight, EPS) + total

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    pairs = [(f(x, r, weight),) for f in (block, compiled)]
    assert torch.equal(pairs[0][0], pairs[1][0])
    grads = [torch.autograd.grad(out, (x, r, weight), dy) for (out,) in pairs]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with FakeTensorMode():
        shape = rms_norm(torch.empty(3, 7, 96, device="cuda"), torch.empty(96, device="cuda"), EPS)
        assert shape.shape == (3, 7, 96) and shape.device.type == "cuda"
    meta = add_rms_norm(*(torch.empty(4, 96, device="meta") for _ in range(2)), torch.empty(96, device="meta"), EPS)
    assert [tuple(t.shape) for t in meta] == [(4, 96), (4, 96)]


def test_the_registered_operator_is_well_formed() -> None:
    x, weight = draw(4, 96, dtype=torch.float32), draw(96, seed=1, dtype=torch.float32)
    torch.library.opcheck(rms_norm_forward, (x.requires_grad_(), weight.requires_grad_(), EPS))


def test_guards_speak_from_the_operator() -> None:
    x, weight = draw(4, 96), draw(96, seed=1)
    refused = {
        "kernel/dtype-mixed": lambda: rms_norm(x, weight.float(), EPS),
        "kernel/dtype-unsupported": lambda: rms_norm(x.double(), weight.double(), EPS),
        "kernel/wrong-shape": lambda: rms_norm(x, weight[:95], EPS),
        "kernel/not-contiguous": lambda: rms_norm(draw(96, 4).t(), weight, EPS),
        "kernel/misaligned": lambda: rms_norm(draw(385)[1:].view(4, 96), weight, EPS),
        "kernel/hidden-too-large": lambda: rms_norm(draw(1, 8193), draw(8193), EPS),
        "kernel/bad-epsilon": lambda: rms_norm(x, weight, float("nan")),
    }
    for code, call in refused.items():
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == code
    with pytest.raises(KernelError, match="residual is"):
        add_rms_norm(x, draw(5, 96), weight, EPS)


def test_small_grids_stay_small() -> None:
    """Interpreted tests run at most 200 programs each."""
    assert configs.forward(576).grid(300, 2) <= 200
