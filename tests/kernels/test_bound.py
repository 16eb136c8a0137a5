"""Bound launches start exactly what triton would have started: kernel, grid and every argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

from triton.runtime.jit import JITFunction

from shardwright.kernels import admitted, bound, device, guards, tuned
from shardwright.kernels.cases import BenchCase, OpSuite, Shape
from shardwright.kernels.passes import timed_pass
from shardwright.kernels.permute import cases as permute_cases
from shardwright.kernels.registry import OPERATORS

SHAPES: dict[str, Shape] = {
    "rms_norm": {"T": 6, "H": 128},
    "add_rms_norm": {"T": 6, "H": 128},
    "gated_rms_norm": {"T": 3, "H": 2, "D": 128},
    "latent_norm": {"T": 6, "W": 160, "H": 128},
    "qk_norm_rope": {"T": 5, "Q": 4, "K": 2, "D": 128, "W": 128},
    "router": {"T": 16, "E": 128, "k": 8},
    "permute": {"T": 40, "K": 3, "E": 5, "H": 40},
    "grouped_lora_mlp": {"R": 30, "E": 4, "H": 72, "I": 40},
    "moe_layer": {"T": 40, "K": 3, "E": 5, "H": 72, "I": 40},
    "packed_experts": {"R": 30, "E": 4, "H": 128, "I": 64},
}


def suites() -> Iterator[Any]:
    for op, shape in SHAPES.items():
        found = OPERATORS[op].load_suites()
        for at, suite in enumerate(found if op != "qk_norm_rope" else found[:1]):
            lora = at > 0 and "down_a" in suite.input_names
            yield pytest.param(suite, {**shape, "r": 16} if lora else shape, id=f"{op}{'-lora' if lora else ''}")


@dataclass
class Trace:
    """Launches in order, with tensors named by where their memory was first seen; all are kept alive."""

    launches: list[tuple[Any, ...]] = field(default_factory=list)
    slow: int = 0
    alive: list[Tensor] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)

    def word(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.alive.append(value)
            return "memory", self.seen.setdefault(value.data_ptr(), len(self.seen)), tuple(value.shape), value.dtype
        if getattr(value, "base", None) is not None:
            return "descriptor", self.word(value.base), list(value.shape), list(value.strides), value.padding
        return value

    def note(self, name: str, grid: tuple[int, ...], arguments: list[Any]) -> None:
        self.launches.append((name, (*grid, 1, 1)[:3], [self.word(value) for value in arguments]))


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Trace]]:
    """Kernels are noted instead of run, on CPU tensors; a call starts a new trace."""
    now = [Trace()]

    def run(kernel: Any, *given: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> Any:
        values = [*given, *(named[name] for name in kernel.arg_names[len(given) :])]
        name = kernel.fn.__name__
        now[0].slow += 1
        now[0].note(name, grid, values)

        def again(x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
            assert (stream, function, metadata, rest[:3]) == (5, name, "packed", (None, None, None))
            now[0].note(name, (x, y, z), list(rest[3:]))

        return SimpleNamespace(run=again, function=name, packed_metadata="packed")

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(device, "interpreted", lambda: True)
    monkeypatch.setattr(guards, "one_device", lambda *args, **named: None)
    monkeypatch.setattr(bound, "BINDS", True)
    monkeypatch.setattr(bound, "current_device", lambda: -1)
    monkeypatch.setattr(bound, "current_stream", lambda at: 5)
    bound.forget()

    def fresh() -> Trace:
        now[0] = Trace()
        return now[0]

    yield fresh
    bound.forget()


def a_pass(suite: OpSuite, shape: Shape, name: str, start: Callable[[], Trace]) -> Trace:
    run = timed_pass(suite, BenchCase("", shape, torch.bfloat16, (name,)), suite.fused, name, device="cpu")
    found = start()
    run()
    start()  # what follows is another's
    return found


@pytest.mark.parametrize("name", ["fwd", "fwd+dx", "fwd+bwd"])
@pytest.mark.parametrize(("suite", "shape"), list(suites()))
def test_the_second_call_starts_what_triton_would(
    suite: OpSuite, shape: Shape, name: str, trace: Callable[[], Trace]
) -> None:
    bound_equals_plain(suite, shape, name, trace)


@pytest.mark.parametrize("name", ["fwd", "fwd+dx"])
@pytest.mark.parametrize("op", ["grouped_lora_mlp", "moe_layer"])
def test_so_do_the_hopper_products(
    op: str, name: str, trace: Callable[[], Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "capability", lambda tensor: (9, 0))
    size = {"R": 360, "E": 2} if op == "grouped_lora_mlp" else {"T": 180, "K": 2, "E": 2}
    monkeypatch.setitem(permute_cases.SMALL, (180, 2, 2), "uniform")
    suite = OPERATORS[op].load_suites()[1]
    quick = bound_equals_plain(suite, {**size, "H": 128, "I": 64, "r": 16}, name, trace)
    assert "hopper_product_kernel" in {launch[0] for launch in quick.launches}


def bound_equals_plain(suite: OpSuite, shape: Shape, name: str, trace: Callable[[], Trace]) -> Trace:
    a_pass(suite, shape, name, trace)
    quick = a_pass(suite, shape, name, trace)
    with admitted.apart():
        plain = a_pass(suite, shape, name, trace)
    assert quick.slow == 0 and plain.slow == len(plain.launches) > 0
    assert quick.launches == plain.launches
    return quick


def test_another_shape_is_bound_anew(trace: Callable[[], Trace]) -> None:
    suite = OPERATORS["moe_layer"].load_suites()[0]
    a_pass(suite, SHAPES["moe_layer"], "fwd+dx", trace)
    assert a_pass(suite, {**SHAPES["moe_layer"], "H": 80}, "fwd+dx", trace).slow > 0
    assert a_pass(suite, SHAPES["moe_layer"], "fwd+dx", trace).slow == 0


def test_nothing_is_bound_apart_or_off_a_boundary_or_where_roles_are_one_tensor(trace: Callable[[], Trace]) -> None:
    from shardwright.kernels.add_rms_norm.op import add_rms_norm

    x, weight = torch.ones(4, 64), torch.ones(64)
    with admitted.apart():
        add_rms_norm(x, x.clone(), weight, 1e-6)
    with tuned.override("router", "forward", None):
        add_rms_norm(x, x.clone(), weight, 1e-6)
    for _ in range(2):
        found = trace()
        add_rms_norm(x, x, weight, 1e-6)
        assert found.slow == 1, "x and the residual are one tensor here, two the next time"
    other = x.clone()
    found = trace()
    add_rms_norm(x, other, weight, 1e-6)
    assert found.slow == 1
    found = trace()
    add_rms_norm(other, x, weight, 1e-6)
    assert found.slow == 0 and found.alive[0] is other and found.alive[1] is x
    found = trace()
    add_rms_norm(x, x, weight, 1e-6)
    assert found.slow == 0 and found.alive[0] is found.alive[1] is x


def test_a_misaligned_gradient_goes_through_triton(trace: Callable[[], Trace]) -> None:
    from shardwright.kernels.rms_norm.op import rms_norm

    x, weight = torch.ones(4, 64, requires_grad=True), torch.ones(64)
    for _ in range(2):
        rms_norm(x, weight, 1e-6).backward(torch.ones(4, 64))
    off = torch.ones(257)[1:].view(4, 64)
    y = rms_norm(x, weight, 1e-6)
    found = trace()
    y.backward(off)
    assert found.slow == 1


def test_hooks_of_a_profiler_see_every_launch(trace: Callable[[], Trace]) -> None:
    from triton import knobs

    from shardwright.kernels.rms_norm.op import rms_norm

    x, weight = torch.ones(4, 64), torch.ones(64)
    rms_norm(x, weight, 1e-6)
    hook = lambda *args: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        found = trace()
        rms_norm(x, weight, 1e-6)
        assert found.slow == 1
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
