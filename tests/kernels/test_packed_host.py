"""What the packed experts cost the host: launches, launches bound as one series, and what a series is left for.

Values are compared in the interpreter, where this file runs again (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")
sys.path.append(str(Path(__file__).parent))

from test_bound import FakeDriver, Trace, a_pass, fake

from shardwright.kernels import admitted, bound, device
from shardwright.kernels.cases import OpSuite, Shape
from shardwright.kernels.packed_experts import biased_cases, cases, op, series, workspace

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="needs triton's own launch path")
COPIED: Shape = {"R": 1100, "E": 4, "H": 128, "I": 64}
LOOPED: Shape = {**COPIED, "R": 300}

__all__ = ["fake"]
"""A fixture of the tests of bound launches."""


@outside
def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("../test_packed_host.py")


def suites() -> Iterator[object]:
    for name, suite in {"base": cases.SUITE, "biases": biased_cases.SUITE, "lora": cases.LORA_SUITE}.items():
        for label, shape in {"copied": COPIED, "looped": LOOPED}.items():
            yield pytest.param(suite, {**shape, "r": 16} if name == "lora" else shape, id=f"{name}-{label}")


@pytest.fixture
def hopper(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The driver of ``test_bound``, on which the products of copies are Hopper's."""
    monkeypatch.setattr(device, "capability", lambda tensor: (9, 0))
    workspace.release()
    yield fake
    workspace.release()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each attempt to start a series came to."""
    found: list[bool] = []
    again = series.again

    def noted(known: series.Series | None, tensors: list[torch.Tensor]) -> bool:
        found.append(again(known, tensors))
        return found[-1]

    monkeypatch.setattr(series, "again", noted)
    return found


@outside
@pytest.mark.parametrize("name", ["fwd", "fwd+dx"])
@pytest.mark.parametrize(("suite", "shape"), list(suites()))
def test_a_series_starts_what_triton_would(
    suite: OpSuite, shape: Shape, name: str, hopper: FakeDriver, told: list[bool]
) -> None:
    """Every launch, argument for argument; the second call on, a pass without adapters is series alone."""
    a_pass(suite, shape, name, hopper.fresh)
    told.clear()
    quick = a_pass(suite, shape, name, hopper.fresh)
    tried = list(told)
    with admitted.apart():
        plain = a_pass(suite, shape, name, hopper.fresh)
    assert quick.slow == 0 and plain.slow == len(plain.launches) > 0
    assert quick.launches == plain.launches
    lora, copied = "up_a" in suite.input_names, shape["R"] == COPIED["R"]
    copies = 1 if copied and name == "fwd+dx" else 0  # a forward alone is decoded in the loop at this size
    runs = 2 if name == "fwd+dx" else 1  # ``a_pass`` runs a training forward once before what it traces
    alone = copies if lora else copies + (3 if name == "fwd+dx" else 1)
    assert all(tried) and len(tried) == alone + (runs - 1) * (alone - (0 if lora else 2)), tried


@outside
@pytest.mark.parametrize(("shape", "name", "launches"), [
    (COPIED, "fwd+dx", 9), (LOOPED, "fwd+dx", 6), (COPIED, "fwd", 3), (LOOPED, "fwd", 3)])  # fmt: skip
def test_launches_of_a_call(shape: Shape, name: str, launches: int, hopper: FakeDriver) -> None:
    assert len(a_pass(cases.SUITE, shape, name, hopper.fresh).launches) == launches


@outside
def test_products_of_another_device_are_bound_one_by_one(fake: FakeDriver) -> None:
    """Not Hopper's: the first product of copies is two launches, which make no series; nothing is started twice."""
    workspace.release()
    a_pass(cases.SUITE, COPIED, "fwd+dx", fake.fresh)
    quick = a_pass(cases.SUITE, COPIED, "fwd+dx", fake.fresh)
    with admitted.apart():
        plain = a_pass(cases.SUITE, COPIED, "fwd+dx", fake.fresh)
    assert quick.slow == 0 and quick.launches == plain.launches
    workspace.release()


def _both(x: torch.Tensor, given: list[torch.Tensor], dy: torch.Tensor, start: Callable[[], Trace]) -> Trace:
    found = start()
    (y,) = cases.fused(x, *given)
    torch.autograd.grad(y, x, dy)
    start()
    return found


@outside
@pytest.mark.parametrize("shape", [COPIED, LOOPED], ids=["copied", "looped"])
def test_a_series_is_left_where_a_bound_launch_is(shape: Shape, hopper: FakeDriver, told: list[bool]) -> None:
    x, *given = cases.inputs(shape, torch.bfloat16, "cpu", 3)
    x.requires_grad_()
    dy = torch.ones(x.shape, dtype=torch.bfloat16)
    everything = len(_both(x, given, dy, hopper.fresh).launches)
    _both(x, given, dy, hopper.fresh)

    told.clear()
    off = torch.ones(dy.numel() + 1, dtype=torch.bfloat16)[1:].view(dy.shape)
    found = _both(x, given, off, hopper.fresh)
    assert all(told) and found.slow == 0 and len(found.launches) == everything, "a gradient off its boundary is copied"

    told.clear()
    hopper.device += 1
    found = _both(x, given, dy, hopper.fresh)
    assert not any(told) and found.slow == len(found.launches) == everything
    assert {launch[0][1] for launch in found.launches} == {hopper.device}
    hopper.device -= 1

    bound.forget()
    told.clear()
    found = _both(x, given, dy, hopper.fresh)
    assert not any(told) and found.slow == everything, "what is bound no more is no part of a series"
    told.clear()
    found = _both(x, given, dy, hopper.fresh)
    assert all(told) and found.slow == 0 and len(found.launches) == everything

    hopper.refuses = RuntimeError("Triton Error [CUDA]")
    with pytest.warns(RuntimeWarning, match="through triton from now on"):
        found = _both(x, given, dy, hopper.fresh)
    assert found.slow == len(found.launches) == everything


@outside
def test_hooks_before_a_kernel_are_run(hopper: FakeDriver) -> None:
    from shardwright.kernels.packed_experts.triton import packed_rows_kernel

    called: list[int] = []
    a_pass(cases.SUITE, LOOPED, "fwd", hopper.fresh)
    packed_rows_kernel.pre_run_hooks.append(lambda *given, **named: called.append(1))
    try:
        a_pass(cases.SUITE, LOOPED, "fwd", hopper.fresh)
    finally:
        packed_rows_kernel.pre_run_hooks.clear()
    assert called == [1]


@outside
def test_what_is_bound_decides_whether_there_is_a_series(hopper: FakeDriver) -> None:
    """Other roles, an unbound launch, or tensors that no launch names: no series."""
    a_pass(cases.SUITE, LOOPED, "fwd", hopper.fresh)
    key, one = next((key, one) for key, one in bound._bound.items() if key[1:] == ("down",))
    names = [None if kind is None else f"t{at}" for at, kind in enumerate(one.kinds)]
    order = [name for name in names if name is not None]
    for bad in (
        (order, [(("nobody",), names)]),
        (order, [(key, names[:-1])]),
        (order, [(key, [None, *names[1:]])]),
        (order, [(key, ["t0"] * len(names))]),
        ([*order, "more"], [(key, names)]),
    ):
        series.keep("a test", *bad)
        assert series.find("a test") is None
    series.keep("a test", order, [(key, names)])
    found = series.find("a test")
    assert found is not None and [step.bound for step in found.steps] == [one]
    tensors = [torch.ones(64, dtype=kind) for kind in found.kinds]
    for bad_tensor in (torch.ones(65, dtype=found.kinds[0])[1:], torch.ones(64, dtype=torch.float64)):
        assert not series.again(found, [bad_tensor, *tensors[1:]])
    assert series.again(found, tensors)


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

    from shardwright.kernels.grouped_lora_mlp.contract import Layout
    from shardwright.kernels.grouped_lora_mlp.layer import Held, Wants, choice_of
    from shardwright.kernels.packed_experts import compute, lists
    from shardwright.kernels.packed_experts.copies_launch import launch_zero_tail
    from shardwright.kernels.permute.tiles import make_tiles


@inside
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("of", [(7, 0, 22, 1), (0, 0, 0, 0), (200, 0, 0, 0), (100, 100, 100, 5), (-3, 9, 1 << 30, 4)])
@pytest.mark.parametrize("tile", [192, 96, 64])
def test_one_launch_gives_the_list_and_the_zeros(of: tuple[int, ...], kind: torch.dtype, tile: int) -> None:
    """Against tile_kernel and zero_tail_kernel: the same bits, for counts that a caller got wrong too."""
    R, H, counts = 200, 40, torch.tensor(of, dtype=kind)
    tiles, y = lists.empty(R, len(of), counts.device, tile), torch.full((R, H), 7.0, dtype=torch.bfloat16)
    right, kept = make_tiles(counts, R, None, tile), y.clone()
    lists.launch_begin(counts, tiles, y, tile)
    launch_zero_tail("tail", kept, right)
    assert torch.equal(y, kept) and torch.equal(tiles.offsets, right.offsets) and torch.equal(tiles.count, right.count)
    used = int(right.count)
    for mine, theirs in zip(tiles.lists(), right.lists(), strict=True):
        assert mine.data_ptr() - tiles.buffer.data_ptr() == theirs.data_ptr() - right.buffer.data_ptr()
        assert torch.equal(mine[:used], theirs[:used])


@inside
@pytest.mark.parametrize("dequantise", [True, False], ids=["copied", "looped"])
def test_a_backward_reads_the_forwards_list(dequantise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with a list of its own; counts that change in between change nothing."""
    monkeypatch.setattr(op.configs, "dequantises", lambda *given, **named: dequantise)
    x, *given = cases.inputs({"R": 30, "E": 4, "H": 128, "I": 64}, torch.bfloat16, "cpu", 3)
    counts, stacks = torch.tensor([7, 0, 19, 1]), cases.stacks_of(tuple(given))
    choice, _ = choice_of(cases.SITU, Layout("out_in", False), None, None)
    w, dy = compute.PackedWeights(*stacks), torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    workspace.release()
    y, kept, _ = op.run_forward(choice, w, x, counts, True)
    own = op.run_backward(choice, w, Held(x, kept), counts, dy, Wants()).dx
    leaf, changed = x.clone().requires_grad_(), counts.clone()
    near = op.packed_experts(leaf, changed, *stacks, activation=cases.SITU)
    changed.zero_()
    (dx,) = torch.autograd.grad(near, leaf, dy)
    assert torch.equal(near, y) and own is not None and torch.equal(dx, own) and bool((dx[27:] == 0).all())
    assert float(dx.abs().max()) > 0
    workspace.release()


@inside
def test_a_backward_is_differentiated_once() -> None:
    x, *given = cases.inputs({"R": 30, "E": 4, "H": 128, "I": 64}, torch.bfloat16, "cpu", 3)
    x.requires_grad_()
    (y,) = cases.fused(x, *given)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
