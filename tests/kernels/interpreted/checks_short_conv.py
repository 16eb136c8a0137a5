"""The short convolution's walk: every number of taps, pieces and documents of any length. TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.short_conv import cases, configs  # noqa: E402
from shardwright.kernels.short_conv.op import short_conv  # noqa: E402
from shardwright.kernels.short_conv.reference import short_conv_reference  # noqa: E402
from shardwright.kernels.verify import poisoned_memory, relative_error  # noqa: E402

BOUNDS = (0, 1, 1, 3, 16, 17, 50, 66, 70)
"""Documents of 1, 0, 2, 13, 1, 33, 16 and 4 tokens, in pieces of 16."""


def drawn(J: int, C: int = 5, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(cases.inputs({"T": BOUNDS[-1], "C": C, "J": J, "docs": len(BOUNDS) - 1}, dtype, "cpu", 3))


def gradients(outputs: tuple[Tensor | None, ...], leaves: list[Tensor], used: tuple[int, ...]) -> list[Tensor]:
    """Those of the outputs ``used``, for seeded gradients; zeros for a leaf that no used output knows."""
    draw = torch.Generator().manual_seed(5)
    ends = [torch.randn(o.shape, generator=draw).to(o.dtype) for o in outputs if o is not None]
    made = [outputs[at] for at in used]
    found = torch.autograd.grad(made, leaves, [ends[at] for at in used], allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def both(given: list[Tensor], used: tuple[int, ...], **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients: ours, in memory that was NaN, and the reference's in fp64."""
    leaves = [t.clone().requires_grad_() for t in given]
    wide = [t.double().requires_grad_() for t in given]
    with poisoned_memory():
        ours = short_conv(*leaves, output_final_state=True, **settings)
        assert ours[1] is not None
        found = [ours[0], ours[1], *gradients(ours, leaves, used)]
    exact = short_conv_reference(*wide, **settings)
    return found, [*exact, *gradients(exact, wide, used)]


@pytest.mark.parametrize("J", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("stated", [False, True], ids=["zeros", "state"])
def test_every_gradient_over_pieces_and_documents(J: int, stated: bool) -> None:
    given = drawn(J) if stated else drawn(J)[:2]
    ours, exact = both(given, (0, 1), cu_seqlens=BOUNDS, silu=J != 3)
    found = [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]
    assert max(found) < 1e-6, found


@pytest.mark.parametrize("used", [(0,), (1,)], ids=["y", "final"])
def test_one_output_alone_has_gradients(used: tuple[int, ...]) -> None:
    ours, exact = both(drawn(4), used, cu_seqlens=BOUNDS)
    assert max(relative_error(a, b) for a, b in zip(ours, exact, strict=True)) < 1e-6


def test_rows_of_a_batch_are_documents() -> None:
    x, weight, initial = drawn(4)
    ours, exact = both([x.reshape(2, 35, 5), weight, initial[:2].contiguous()], (0, 1))
    assert max(relative_error(a, b) for a, b in zip(ours, exact, strict=True)) < 1e-6


def test_the_length_of_pieces_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the taps' gradient, whose sums it orders."""
    given = drawn(4, dtype=torch.bfloat16)
    short, exact = both(given, (0, 1), cu_seqlens=BOUNDS)
    monkeypatch.setattr(configs, "piece", lambda T, C: 64)
    long, _ = both(given, (0, 1), cu_seqlens=BOUNDS)
    same = [torch.equal(a, b) for a, b in zip(short, long, strict=True)]
    assert [at for at, equal in enumerate(same) if not equal] in ([], [3])
    assert relative_error(long[3], exact[3]) < 4e-3


@pytest.mark.parametrize("walk", [configs.Walk(32, 1, 3, 1), configs.Walk(256, 8, 1, 1)])
def test_how_a_program_walks_changes_no_bit(walk: configs.Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token and of eight, and blocks narrower and wider than the channels."""
    given = drawn(4, C=40)
    shipped, _ = both(given, (0, 1), cu_seqlens=BOUNDS)
    monkeypatch.setattr(configs, "forward", lambda: walk)
    monkeypatch.setattr(configs, "backward", lambda: walk)
    other, _ = both(given, (0, 1), cu_seqlens=BOUNDS)
    assert all(torch.equal(a, b) for a, b in zip(shipped, other, strict=True))


def test_nan_stays_where_eager_has_it() -> None:
    """In a gradient: the token and the J - 1 before it. In an input: its own document."""
    x, weight, _ = drawn(4)
    for place in (0, 15, 16, 31, 33, 49):
        leaf = x.clone().requires_grad_()
        dy = torch.ones_like(x)
        dy[0, place] = float("nan")
        (dx,) = torch.autograd.grad(short_conv(leaf, weight, cu_seqlens=(0, 50, 70))[0], leaf, dy)
        assert dx[0, :, 0].isnan().nonzero().ravel().tolist() == list(range(max(0, place - 3), place + 1))
    spoiled = x.clone()
    spoiled[0, 49] = float("nan")
    leaf = spoiled.requires_grad_()
    y, _ = short_conv(leaf, weight, cu_seqlens=(0, 50, 70))
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    assert y[0, :, 0].isnan().nonzero().ravel().tolist() == [49]
    assert dx[0, :, 0].isnan().nonzero().ravel().tolist() == [46, 47, 48, 49]


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_tracer_sees_one_node_with_the_same_bits(used: tuple[int, ...]) -> None:
    given = drawn(4)
    leaves = [[t.clone().requires_grad_() for t in given] for _ in range(2)]
    direct = short_conv(*leaves[0], cu_seqlens=BOUNDS, output_final_state=True)
    traced = torch.ops.shardwright.short_conv_state_forward(*leaves[1], list(BOUNDS), True)
    ours, theirs = gradients(direct, leaves[0], used), gradients(traced, leaves[1], used)
    assert all(torch.equal(a, b) for a, b in zip((*direct, *ours), (*traced, *theirs), strict=True) if a is not None)
