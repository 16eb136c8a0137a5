"""Latent norm in true bf16, fp16 and fp32. Runs under TRITON_INTERPRET=1.

Legend: B batch, T rows, W width of the joint projection, H width of the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardwright.kernels import interpreter

interpreter.install()

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shardwright.kernels.latent_norm import cases  # noqa: E402
from shardwright.kernels.latent_norm.op import (  # noqa: E402
    latent_norm,
    latent_norm_backward,
    latent_norm_forward,
    launch_backward,
    launch_forward,
)
from shardwright.kernels.latent_norm.reference import latent_norm_reference  # noqa: E402
from shardwright.kernels.launch import Launch  # noqa: E402
from shardwright.kernels.verify import values, verify_case, verify_repeats  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402

EPS = 1e-6


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_latent_of_one_column_keeps_its_small_gradient() -> None:
    """dx = dy·w·eps/(x² + eps)^1.5: the difference 1 - x̂² would leave 1 % of it in fp32."""
    joint, weight, dy = (draw(9, n, seed=at, dtype=torch.float32) for at, n in enumerate((3, 1, 1)))
    leaf, weight = joint.clone().requires_grad_(), weight[0]
    (dx,) = torch.autograd.grad(latent_norm(leaf, weight, EPS)[0], leaf, dy)
    x = joint[:, :1].double()
    exact = dy.double() * weight.double() * EPS / (x.square() + EPS) ** 1.5
    torch.testing.assert_close(dx[:, :1].double(), exact, rtol=2e-6, atol=0)
    assert bool((dx[:, 1:] == 0).all())


@pytest.mark.parametrize("dtype", cases.SUITE.dtypes, ids=str)
def test_error_is_no_larger_than_eagers(dtype: torch.dtype) -> None:
    """Odd sizes, zero rows, NaN-poisoned memory."""
    results = [result for shape in cases.SUITE.small_shapes for result in verify_case(cases.SUITE, shape, dtype, "cpu")]
    assert len(results) == 20 and [result for result in results if not result.ok] == []


def test_two_runs_give_the_same_bits() -> None:
    assert verify_repeats(cases.SUITE, cases.SUITE.small_shapes[0], torch.bfloat16, "cpu").ok


def test_forward_has_eagers_bits() -> None:
    joint, weight = draw(9, 576), draw(512, seed=1)
    for ours, eager in zip(latent_norm(joint, weight, EPS), latent_norm_reference(joint, weight, EPS), strict=True):
        assert torch.equal(ours, eager) and ours.is_contiguous()


@pytest.mark.parametrize("name", ["slice of a wider projection", "tokens before batches"])
def test_strided_rows(name: str) -> None:
    """Kimi's query and key latents in one projection [B, T, 208]; and rows of a transposed batch."""
    views: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        "slice of a wider projection": (draw(2, 3, 208, dtype=torch.float32), lambda leaf: leaf[..., 128:]),
        "tokens before batches": (draw(3, 2, 80, dtype=torch.float32), lambda leaf: leaf.transpose(0, 1)),
    }
    leaf, view = views[name]
    weight = draw(64, seed=1, dtype=torch.float32)
    dys = [draw(2, 3, n, seed=n, dtype=torch.float32) for n in (64, 16)]
    found = values(lambda leaf, w: latent_norm(view(leaf), w, EPS), [leaf, weight], dys)
    wide = [leaf.double(), weight.double()]
    exact = values(lambda leaf, w: latent_norm_reference(view(leaf), w, EPS), wide, [g.double() for g in dys])
    for ours, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)


def test_only_the_latent_or_only_the_rest_may_be_used() -> None:
    joint, weight = draw(5, 80, dtype=torch.float32).requires_grad_(), draw(64, seed=1, dtype=torch.float32)
    weight.requires_grad_()
    latent, rest = latent_norm(joint, weight, EPS)
    plain = latent_norm_reference(joint, weight, EPS)
    for at, unused in ((0, slice(64, 80)), (1, slice(0, 64))):
        dy = draw(5, (64, 16)[at], seed=9, dtype=torch.float32)
        ours = torch.autograd.grad((latent, rest)[at], (joint, weight), dy, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(plain[at], (joint, weight), dy, retain_graph=True, allow_unused=True)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        assert bool((ours[0][:, unused] == 0).all())
        wanted = torch.zeros(64) if theirs[1] is None else theirs[1]
        torch.testing.assert_close(ours[1], wanted, rtol=1e-5, atol=1e-5)


def test_weight_gradient_is_summed_in_fp32() -> None:
    joint, dy = draw(2048, 80), draw(2048, 64, seed=2) + 1
    weight = torch.ones(64, dtype=torch.bfloat16).requires_grad_()
    (dweight,) = torch.autograd.grad(latent_norm(joint, weight, EPS)[0], weight, dy)
    x = joint[:, :64].double()
    terms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * dy.double()
    exact, running = terms.sum(0), torch.zeros(64, dtype=torch.bfloat16)
    for row in terms.bfloat16():
        running += row
    ours, narrow = (float((v.double() - exact).abs().max() / exact.abs().max()) for v in (dweight, running))
    assert ours < 4e-3 < 1e-2 < narrow


def test_statistics_are_those_of_the_latent_alone_in_fp32() -> None:
    """Huge values beside the latent do not reach its norm; rstd is fp32."""
    joint, weight = draw(3, 96), draw(64, seed=1)
    joint[:, 64:] = 1e30
    _, rest, rstd = latent_norm_forward(joint, weight, EPS)
    exact = torch.rsqrt(joint[:, :64].double().pow(2).mean(-1) + EPS)
    assert rstd.dtype == torch.float32 and torch.equal(rest, joint[:, 64:])
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0)


def test_epsilon_is_the_callers() -> None:
    joint = 0.058 * torch.randn(2048, 48, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(32)
    latent, _ = latent_norm(joint.bfloat16(), ones.bfloat16(), EPS)
    assert abs(float(latent.double().pow(2).mean().sqrt()) - 1) < 1e-3
    assert float(latent_norm(joint, ones, 1.0)[0].pow(2).mean().sqrt()) < 0.1


def test_inputs_stay_untouched_and_outputs_are_fresh() -> None:
    joint, weight = draw(6, 80).requires_grad_(), draw(64, seed=1)
    before = joint.detach().clone()
    latent, rest = latent_norm(joint, weight, EPS)
    again = latent_norm(joint, weight, EPS)
    (twice,) = torch.autograd.grad(latent.sum() + rest.sum() + again[0].sum() + (joint * 2).sum(), joint)
    assert torch.equal(joint.detach(), before) and bool(twice.isfinite().all())
    assert torch.equal(latent, again[0]) and torch.equal(rest, again[1])
    assert len({t.untyped_storage().data_ptr() for t in (joint, latent, rest, *again)}) == 5


def test_an_expanded_or_sliced_gradient_is_read_right() -> None:
    joint, weight = draw(6, 80, dtype=torch.float32).requires_grad_(), draw(64, seed=1, dtype=torch.float32)
    summed, ones = (
        torch.autograd.grad(ends, joint, given)[0]
        for ends, given in (
            (sum(out.sum() for out in latent_norm(joint, weight, EPS)), None),
            (latent_norm(joint, weight, EPS), (torch.ones(6, 64), torch.ones(6, 16))),
        )
    )
    assert torch.equal(summed, ones)
    room = draw(6, 200, seed=4, dtype=torch.float32)
    sliced = (room[:, 4:68], room[:, 100:116])
    strided, dense = (
        torch.autograd.grad(latent_norm(joint, weight, EPS), joint, given)[0]
        for given in (sliced, tuple(g.contiguous() for g in sliced))
    )
    assert torch.equal(strided, dense)


def test_a_frozen_weight_costs_no_gradient() -> None:
    joint, weight = draw(6, 80), draw(64, seed=1)
    latent, rest, rstd = latent_norm_forward(joint, weight, EPS)
    djoint, dweight = latent_norm_backward(latent, rest, joint, weight, rstd, EPS, False)
    learning, learned = latent_norm_backward(latent, rest, joint, weight, rstd, EPS, True)
    assert dweight.numel() == 0 and learned.shape == (64,) and torch.equal(djoint, learning)


def test_nan_stays_in_its_row_and_beside_the_latent_in_its_place() -> None:
    joint, weight = draw(5, 80), draw(64, seed=1)
    clean = latent_norm(joint, weight, EPS)
    joint[2, 7], joint[4, 70] = float("nan"), float("nan")
    latent, rest = latent_norm(joint, weight, EPS)
    assert bool(latent[2].isnan().all()) and int(rest.isnan().sum()) == 1 and bool(rest[4, 6].isnan())
    keep = [0, 1, 3, 4]
    assert torch.equal(latent[keep], clean[0][keep]) and torch.equal(rest[:4], clean[1][:4])


@pytest.mark.parametrize("launch", [Launch(1, 4, 1, 0), Launch(4, 4, 3, 1), Launch(2, 4, 2, 2)])
def test_every_launch_gives_the_same_values_and_writes_nothing_outside(launch: Launch) -> None:
    T, W, H, band = 7, 40, 33, 64
    joint, weight = draw(T, W, dtype=torch.float32), draw(H, seed=1, dtype=torch.float32)
    dlatent, drest = draw(T, H, seed=2, dtype=torch.float32), draw(T, W - H, seed=3, dtype=torch.float32)
    sizes = {"latent": (T, H), "rest": (T, W - H), "djoint": (T, W), "dw": (H,), "rstd": (T,)}
    room = {name: torch.full((band + torch.Size(n).numel() + band,), float("nan")) for name, n in sizes.items()}
    view = {name: whole[band : len(whole) - band].view(sizes[name]) for name, whole in room.items()}
    launch_forward(joint, weight, EPS, view["latent"], view["rest"], view["rstd"], launch)
    launch_backward(dlatent, drest, joint, weight, view["rstd"], EPS, view["djoint"], view["dw"], launch)
    leaves = [t.double().requires_grad_() for t in (joint, weight)]
    outs = latent_norm_reference(leaves[0], leaves[1], EPS)
    exact = [*outs, *torch.autograd.grad(outs, leaves, [dlatent.double(), drest.double()])]
    for name, truth in zip(("latent", "rest", "djoint", "dw"), exact, strict=True):
        torch.testing.assert_close(view[name].double(), truth, rtol=1e-5, atol=1e-6)
    for whole in room.values():
        assert bool(whole[:band].isnan().all()) and bool(whole[-band:].isnan().all())


def test_compiled_and_faked_calls_see_one_opaque_operator() -> None:
    joint, weight = draw(2, 5, 80).requires_grad_(), draw(64, seed=1).requires_grad_()

    def block(joint: Tensor, weight: Tensor) -> Tensor:
        latent, rest = latent_norm(joint * 2, weight, EPS)
        return latent.sum(-1) + rest.sum(-1)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    outs = [f(joint, weight) for f in (block, compiled)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out, (joint, weight), torch.ones_like(out)) for out in outs]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with FakeTensorMode():
        latent, rest = latent_norm(torch.empty(3, 7, 80, device="cuda"), torch.empty(64, device="cuda"), EPS)
        assert latent.shape == (3, 7, 64) and rest.shape == (3, 7, 16) and rest.device.type == "cuda"
    only = torch.compile(lambda j, w: latent_norm(j, w, EPS)[1], backend="aot_eager", fullgraph=True)
    dy = torch.ones(2, 5, 16, dtype=torch.bfloat16)
    (half,) = torch.autograd.grad(only(joint, weight), joint, dy)
    assert bool((half[..., :64] == 0).all()) and bool((half[..., 64:] == 1).all())


def test_the_registered_operator_is_well_formed() -> None:
    joint, weight = draw(4, 80, dtype=torch.float32), draw(64, seed=1, dtype=torch.float32)
    torch.library.opcheck(latent_norm_forward, (joint.requires_grad_(), weight.requires_grad_(), EPS))


def test_transformers_agrees() -> None:
    """DeepSeek-V3's kv_a projection: split, norm with its own eps, fp32 with gradients."""
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3").DeepseekV3RMSNorm(64)
    module.weight.data = draw(64, seed=2, dtype=torch.float32)
    joint = draw(2, 3, 80, dtype=torch.float32).requires_grad_()
    part, rest = torch.split(joint, [64, 16], dim=-1)
    theirs, ours = (module(part), rest), latent_norm(joint, module.weight, module.variance_epsilon)
    dys = [draw(2, 3, n, seed=n, dtype=torch.float32) for n in (64, 16)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(o, (joint, module.weight), dys) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_guards_speak_from_the_operator() -> None:
    joint, weight = draw(4, 80), draw(64, seed=2)
    calls: dict[str, Callable[[], Any]] = {
        "dtype-mixed": lambda: latent_norm(joint, weight.float(), EPS),
        "dtype-unsupported": lambda: latent_norm(joint.double(), weight.double(), EPS),
        "wrong-shape": lambda: latent_norm(joint[:, :60], weight, EPS),
        "nothing-beside": lambda: latent_norm(joint[:, :64], weight, EPS),
        "not-contiguous": lambda: latent_norm(draw(80, 4).t(), weight, EPS),
        "misaligned": lambda: latent_norm(draw(321)[1:].view(4, 80), weight, EPS),
        "hidden-too-large": lambda: latent_norm(draw(1, 8193), weight, EPS),
        "bad-epsilon": lambda: latent_norm(joint, weight, -1.0),
    }
    for code, call in calls.items():
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == f"kernel/{code}" and caught.value.where == "latent_norm"


@settings(max_examples=12, deadline=None, derandomize=True)
@given(T=st.integers(0, 6), H=st.integers(1, 70), beside=st.integers(1, 40))
def test_any_size_gives_the_fp64_values(T: int, H: int, beside: int) -> None:
    joint, weight = draw(T, H + beside, dtype=torch.float32), draw(H, seed=1, dtype=torch.float32)
    dys = [draw(T, n, seed=5, dtype=torch.float32) for n in (H, beside)]
    found = values(lambda j, w: latent_norm(j, w, EPS), [joint, weight], dys)
    wide = [joint.double(), weight.double()]
    exact = values(lambda j, w: latent_norm_reference(j, w, EPS), wide, [g.double() for g in dys])
    for ours, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=2e-5)
