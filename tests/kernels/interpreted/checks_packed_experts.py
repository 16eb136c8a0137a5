"""The packed experts in the interpreter, against fp64. Runs under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from shardwright.kernels import interpreter
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Kind, Layout
from shardwright.kernels.grouped_lora_mlp.layer import Adapter, Held, Wants, choice_of
from shardwright.kernels.packed_experts import biased_cases, cases, configs, copies_launch, op, workspace
from shardwright.kernels.packed_experts.compute import PackedWeights
from shardwright.kernels.packed_experts.reference import dequantise_reference, packed_experts_reference
from shardwright.kernels.packed_experts.storage import PackedStack, fp8_stack, mxfp4_stack
from shardwright.kernels.verify import poisoned_memory, verify_case, verify_repeats
from shardwright.schemas.errors import KernelError

interpreter.install()

SITU = Activation("situ", (4.0, 25.0, 0.0))


def fp8(E: int, N: int, K: int, seed: int) -> PackedStack:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn((E, N, K), generator=generator) * 20).to(torch.float8_e4m3fn)
    return fp8_stack(values, torch.rand((E, N // 128, K // 128), generator=generator) * 0.01)


def test_decoding_is_exact_for_every_byte_and_scale() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(1, 8, 32).repeat(1, 32, 1)
    scale = torch.arange(512).remainder(256).to(torch.uint8).reshape(1, 256, 2)
    stack = mxfp4_stack(packed, scale)
    found, exact = copies_launch.dequantise(stack), dequantise_reference(stack)
    assert torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.nan_to_num(), exact.nan_to_num())
    assert torch.equal(copies_launch.dequantise(fp8(2, 128, 256, 1)), dequantise_reference(fp8(2, 128, 256, 1)))


@pytest.mark.parametrize("of", ["base", "lora", "biases"])
def test_error_is_no_larger_than_eagers(of: str) -> None:
    """Experts without rows, a hot one, rows of nobody, no rows; poisoned memory, same bits twice."""
    suite = {"base": cases.SUITE, "lora": cases.LORA_SUITE, "biases": biased_cases.SUITE}[of]
    shapes = suite.small_shapes[:2] if of == "lora" else suite.small_shapes
    results = [result for shape in shapes for result in verify_case(suite, shape, torch.bfloat16, "cpu")]
    results.append(verify_repeats(suite, suite.small_shapes[0], torch.bfloat16, "cpu"))
    assert [result for result in results if not result.ok] == []


@pytest.mark.parametrize(
    ("kind", "packing", "interleaved", "biased"),
    [
        ("swiglu", "mxfp4", True, False),
        ("relu2", "mxfp4", False, False),
        ("situ", "fp8", False, False),
        ("clamped_swiglu", "mxfp4", True, True),
        ("relu2", "mxfp4", False, True),
        ("situ", "fp8", False, True),
    ],
)
def test_both_ways_agree_with_fp64(kind: Kind, packing: str, interleaved: bool, biased: bool) -> None:
    """Decoded in the loop and from a copy: outputs, dx and all adapter gradients; biases reach past the clamp."""
    activation = {"situ": SITU, "clamped_swiglu": biased_cases.CLAMPED}.get(kind, Activation(kind))
    E, H, I, R, r = 3, 128, 128 if packing == "fp8" else 64, 24, 5
    F = I * (2 if activation.gated else 1)
    make = fp8 if packing == "fp8" else (lambda E, N, K, seed: cases.stack(E, N, K, "cpu", seed))
    stacks = make(E, F, H, 1), make(E, H, I, 2)
    generator, counts = torch.Generator().manual_seed(5), torch.tensor([9, 0, 13])
    x, dy = (torch.randn((R, H), generator=generator).bfloat16() for _ in range(2))
    sizes = ((E, r, H), (E, F, r), (E, r, I), (E, H, r))
    factors = [(torch.randn(size, generator=generator) * size[-1] ** -0.5).bfloat16() for size in sizes]
    adapters = Adapter(factors[0], factors[1], 0.5), Adapter(factors[2], factors[3], 0.25)
    choice, given = choice_of(activation, Layout("out_in", interleaved), *adapters)
    biases: tuple[torch.Tensor, ...] = ()
    if biased:
        biases = tuple(3 * torch.randn((E, width), generator=generator).bfloat16() for width in (F, H))
    leaves = [t.double().requires_grad_() for t in (x, *factors)]
    pairs = (leaves[1], leaves[2], 0.5), (leaves[3], leaves[4], 0.25)
    wide = (bias.double() for bias in biases)
    y = packed_experts_reference(leaves[0], counts, *stacks, *pairs, activation, interleaved, *wide)
    exact = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
    for dequantise in (False, True):
        w = PackedWeights(*stacks, *given, *biases)
        with poisoned_memory():
            near, kept, _ = op.run_forward(choice, w, x, counts, True, dequantise)
            found = op.run_backward(choice, w, Held(x, kept), counts, dy, Wants(), dequantise=dequantise)
        ours = [near, found.dx, found.up_a, found.up_b, found.down_a, found.down_b]
        for name, got, right in zip(("y", "dx", "ua", "ub", "da", "db"), ours, exact, strict=True):
            assert got is not None
            assert float((got.double() - right).norm() / right.norm()) < 1e-2, (name, dequantise)


def test_one_bias_alone_is_added_where_it_belongs() -> None:
    """Codes of zero: what is left of the layer is its biases, each expert's own, and nothing for rows of nobody."""
    E, H, I, counts = 2, 64, 64, torch.tensor([3, 2])
    nothing = [
        PackedStack(s.values.zero_(), s.scales, "mxfp4") for s in (cases.stack(E, N, 64, "cpu", N) for N in (128, 64))
    ]
    x = torch.ones((6, H), dtype=torch.bfloat16)
    after = torch.arange(E * H, dtype=torch.float32).reshape(E, H).bfloat16()
    y = op.packed_experts(x, counts, *nothing, down_bias=after)
    assert torch.equal(y[:5], after.repeat_interleave(counts, 0)) and bool((y[5:] == 0).all())
    before = torch.full((E, 2 * I), 2.0, dtype=torch.bfloat16)
    y = op.packed_experts(x, counts, *nothing, up_bias=before)
    assert bool((y == 0).all())
    one = cases.stack(E, H, I, "cpu", 3)
    y = op.packed_experts(x, counts, nothing[0], one, up_bias=before)
    h = torch.nn.functional.silu(torch.tensor(2.0)) * 2
    exact = (h * dequantise_reference(one).float().sum(-1)).repeat_interleave(counts, 0)
    assert torch.allclose(y[:5].float(), exact, rtol=2e-2, atol=2e-2) and bool((y[5:] == 0).all())


def test_what_is_frozen_may_not_learn() -> None:
    """Not in any way in, not with an fp8 base; without gradients the same tensors are taken."""
    up, low = cases.stack(2, 128, 64, "cpu", 1), cases.stack(2, 64, 64, "cpu", 2)
    x, counts = torch.ones((5, 64), dtype=torch.bfloat16), torch.tensor([3, 2])
    bias = torch.ones((2, 64), dtype=torch.bfloat16, requires_grad=True)
    base = fp8(1, 256, 128, 1), fp8(1, 128, 128, 2)
    base[1].values.requires_grad_()
    calls = (
        lambda: op.packed_experts(x, counts, up, low, down_bias=bias),
        lambda: op.packed_experts(torch.ones((5, 128), dtype=torch.bfloat16), counts[:1], *base),
    )
    for call in calls:
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == "kernel/trains-the-base"
    with torch.no_grad():
        assert calls[0]().isfinite().all()


def test_a_base_scale_of_nan_reaches_its_own_expert_alone() -> None:
    up, low = cases.stack(2, 128, 64, "cpu", 1), cases.stack(2, 64, 64, "cpu", 2)
    up.scales[0, 0, 3] = -1  # both groups of one weight row of expert 0
    x = torch.ones((6, 64), dtype=torch.bfloat16)
    y = op.packed_experts(x, torch.tensor([3, 2]), up, low)
    assert y[:3].isnan().all() and y[3:5].isfinite().all() and bool((y[5:] == 0).all())


def test_the_workspace_holds_one_layer_and_never_a_stale_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "DEQUANTISE_ROWS", 1)
    made: list[PackedStack] = []
    dequantise = copies_launch.dequantise
    monkeypatch.setattr(copies_launch, "dequantise", lambda stack: made.append(stack) or dequantise(stack))
    layers = [(cases.stack(2, 128, 64, "cpu", at), cases.stack(2, 64, 64, "cpu", at + 1)) for at in (1, 3)]
    one, counts = torch.device("cpu"), torch.tensor([3, 2])
    workspace.release()
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()

    y = op.packed_experts(x, counts, *layers[0], activation=SITU)
    torch.autograd.grad(y, x, torch.ones_like(y))
    held = 2 * 3 * 64 * 64 * 2
    assert len(made) == 2, "the backward shares the forward's copies"
    assert workspace.held_bytes(one) == held, "two stacks of two experts, bf16"
    first = workspace.dequantised(layers[0])
    assert len(made) == 2 and torch.equal(first[0], dequantise_reference(layers[0][0]))
    workspace.dequantised(layers[1])
    assert len(made) == 4 and workspace.held_bytes(one) == held
    layers[1][0].values.zero_()  # changed in place: the version tells
    assert bool((workspace.dequantised(layers[1])[0] == 0).all()) and len(made) == 6
    alike = tuple(PackedStack(s.values.clone(), s.scales.clone(), "mxfp4") for s in layers[1])
    workspace.dequantised((alike[0], alike[1]))
    assert len(made) == 8, "equal bytes in other memory are another layer"
    with torch.inference_mode():
        frozen = tuple(PackedStack(s.values.clone(), s.scales.clone(), "mxfp4") for s in layers[1])
    workspace.dequantised((frozen[0], frozen[1]))
    assert workspace.held_bytes(one) == 2 * 3 * 64 * 64 * 2 and len(made) == 10, (
        "nothing is kept of what has no version"
    )
    workspace.release()
    assert workspace.held_bytes(one) == 0


def test_traced_calls_give_the_same_bits() -> None:
    """Through torch.library, as a dispatch mode sees it; and shapes on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    shape = {"R": 30, "E": 4, "H": 128, "I": 64, "r": 6}
    x, *given = cases.inputs(shape, torch.bfloat16, "cpu", 3)
    x.requires_grad_()
    given[4].requires_grad_()
    (plain,) = cases.fused(x, *given)
    with FlopCounterMode(display=False):
        (traced,) = cases.fused(x, *given)
    assert torch.equal(plain, traced)
    dy = torch.ones_like(plain)
    for ours, theirs in zip(
        torch.autograd.grad(plain, (x, given[4]), dy), torch.autograd.grad(traced, (x, given[4]), dy), strict=True
    ):
        assert torch.equal(ours, theirs)
    bare = [t.detach() for t in (x, *given)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in bare]
        stacks = PackedStack(fakes[1], fakes[2], "mxfp4"), PackedStack(fakes[3], fakes[4], "mxfp4")
        n = torch.empty(4, dtype=torch.int32)
        assert op.packed_experts(fakes[0], n, *stacks, activation=SITU).shape == (30, 128)


def test_traced_calls_with_biases_give_the_same_bits() -> None:
    """With an adapter on one stack, so that what is there and what is not stand beside each other."""
    from torch.utils.flop_counter import FlopCounterMode

    x, *given = biased_cases.inputs({"R": 30, "E": 4, "H": 128, "I": 64}, torch.bfloat16, "cpu", 3)
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(size, generator=generator).bfloat16().requires_grad_() for size in ((4, 5, 64), (4, 128, 5)))
    x.requires_grad_()
    counts, stacks = cases.counts(30, 4, "cpu"), cases.stacks_of(tuple(given))

    def run() -> list[torch.Tensor]:
        low, form = Adapter(a, b, 0.5), biased_cases.CLAMPED
        y = op.packed_experts(
            x, counts, *stacks, low=low, up_bias=given[4], down_bias=given[5], activation=form, interleaved=True
        )
        return [y, *torch.autograd.grad(y, (x, a, b), torch.ones_like(y))]

    plain = run()
    with FlopCounterMode(display=False):
        traced = run()
    assert all(torch.equal(*pair) for pair in zip(plain, traced, strict=True))
