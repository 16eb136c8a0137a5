"""Bound launches start exactly what triton would have started: specialisation, grid, stream and every argument.

Triton's own launch path runs (binder, specialisation, cache key, descriptors), over a driver that notes what its
launchers get in place of a GPU. A compiled kernel is known by all that it would be compiled for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.runtime.driver import driver
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
    "attention_residual": {"T": 6, "R": 2, "H": 128},
    "latent_norm": {"T": 6, "W": 160, "H": 128},
    "qk_norm_rope": {"T": 5, "Q": 4, "K": 2, "D": 128, "W": 128},
    "router": {"T": 16, "E": 128, "k": 8},
    "permute": {"T": 40, "K": 3, "E": 5, "H": 40},
    "grouped_lora_mlp": {"R": 30, "E": 4, "H": 72, "I": 40},
    "moe_layer": {"T": 40, "K": 3, "E": 5, "H": 72, "I": 40},
    "packed_experts": {"R": 30, "E": 4, "H": 128, "I": 64},
    "short_conv": {"T": 70, "C": 40, "J": 4, "docs": 3},
}


def suites() -> Iterator[Any]:
    for op, shape in SHAPES.items():
        found = OPERATORS[op].load_suites()
        for suite in found if op != "qk_norm_rope" else found[:1]:
            lora, base = "down_a" in suite.input_names, "up_bias" in suite.input_names
            label = f"{op}{'-lora' if lora else '-base' if base else ''}"
            yield pytest.param(suite, {**shape, "r": 16} if lora else shape, id=label)


META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
"""A compiled descriptor's facts, for triton's own code that makes a launcher's arguments of one."""


@dataclass
class Trace:
    """What launchers were called with, in order; tensors named by where their memory was first seen, kept alive."""

    launches: list[tuple[Any, ...]] = field(default_factory=list)
    slow: int = 0
    alive: list[Tensor] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)

    def at(self, address: int) -> tuple[str, int]:
        return "memory", self.seen.setdefault(address, len(self.seen))

    def word(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.alive.append(value)
            return *self.at(value.data_ptr()), tuple(value.shape), value.dtype
        if getattr(value, "base", None) is not None:
            (address, *how), *sizes = make_tensordesc_arg(value, META)
            return "descriptor", self.word(value.base), self.at(address), tuple(map(str, how)), sizes
        return value


class FakeDriver:
    """A CUDA driver of an sm_90 device whose launchers note what they get."""

    def __init__(self) -> None:
        self.trace, self.device, self.stream = Trace(), DEVICE, 5
        self.utils = SimpleNamespace(fill_tma_descriptor=lambda *given: given)
        self.refuses: BaseException | None = None

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + 100 * (device - DEVICE)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def fresh(self) -> Trace:
        self.trace = Trace()
        return self.trace

    def launch(self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
        facts, enter, _, *arguments = rest
        if facts is None and enter is None and self.refuses is not None:
            raise self.refuses
        words = [self.trace.word(value) for value in arguments]
        self.trace.launches.append((function, metadata, (x, y, z), stream, words))

    def compiled(self, kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attrs: Any,
                 warmup: bool) -> Any:  # fmt: skip
        """A compiled kernel, known by all that it would be compiled for."""
        name = kernel.fn.__name__
        function = (name, device, *map(repr, (signature, constants, attrs, options)))
        made = SimpleNamespace(
            run=self.launch, function=function, packed_metadata=("packed", name), launch_metadata=lambda *given: "facts"
        )
        kernel.device_caches[device][0][key] = made
        return made


DEVICE = 70
"""An index that no real device has: triton's caches of it are this file's."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Triton's own launch path, from its binder to the launcher, on CPU tensors and with nothing compiled."""
    made, run, kernels = FakeDriver(), JITFunction.run, set()

    def counted(kernel: Any, *given: Any, **named: Any) -> Any:
        made.trace.slow += 1
        kernels.add(kernel)
        return run(kernel, *given, **named)

    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda kernel, *given: made.compiled(kernel, *given))
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(device, "interpreted", lambda: True)
    monkeypatch.setattr(guards, "one_device", lambda *args, **named: None)
    monkeypatch.setattr(bound, "BINDS", True)
    # CPU tensors have no index; a bound launch holds -1, which stands for the fake device here.
    monkeypatch.setattr(bound, "current_device", lambda: made.device - DEVICE - 1)
    monkeypatch.setattr(bound, "current_stream", lambda index: made.get_current_stream(index + 1 + DEVICE))
    bound.forget()
    yield made
    bound.forget()
    for kernel in kernels:
        for index in [index for index in kernel.device_caches if index >= DEVICE]:
            del kernel.device_caches[index]


@pytest.fixture
def trace(fake: FakeDriver) -> Callable[[], Trace]:
    """A call starts a new trace."""
    return fake.fresh


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
    assert "hopper_product_kernel" in {launch[0][0] for launch in quick.launches}


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


def norm(x: Tensor, weight: Tensor) -> None:
    from shardwright.kernels.rms_norm.op import rms_norm

    rms_norm(x, weight, 1e-6)


def test_a_launch_goes_to_the_stream_that_is_current_now(fake: FakeDriver) -> None:
    x, weight = torch.ones(4, 64), torch.ones(64)
    norm(x, weight)
    fake.stream = 9
    found = fake.fresh()
    norm(x, weight)
    assert found.slow == 0 and [launch[3] for launch in found.launches] == [9]


def test_another_device_goes_through_triton_and_has_its_own_kernel(fake: FakeDriver) -> None:
    x, weight = torch.ones(4, 64), torch.ones(64)
    norm(x, weight)
    fake.device = DEVICE + 1
    found = fake.fresh()
    norm(x, weight)
    assert found.slow == 1 and found.launches[0][0][1] == DEVICE + 1 and found.launches[0][3] == 105


def test_divisibility_is_part_of_what_is_bound(fake: FakeDriver) -> None:
    """Widths of 64 and of 72 are other compilations (16 divides one of them): each layout has its own."""
    for width in (64, 72, 64, 72):
        found = fake.fresh()
        norm(torch.ones(4, width), torch.ones(width))
        slow = fake.fresh()
        with admitted.apart():
            norm(torch.ones(4, width), torch.ones(width))
        assert found.launches[0][0] == slow.launches[0][0]
    assert found.slow == 0


def test_roles_and_dtypes_that_a_key_does_not_know_go_through_triton(fake: FakeDriver) -> None:
    """An operator whose key forgets an optional tensor, or a dtype, is slow, never wrong."""
    from shardwright.kernels.permute.op import launch_combine

    place = torch.zeros((4, 2), dtype=torch.int32)
    out, rows, weights = torch.empty(4, 32), torch.ones(8, 32), torch.ones(4, 2)

    def combined(weights: Tensor | None, rows: Tensor = rows) -> Trace:
        found = fake.fresh()
        launch_combine(rows, place, weights, out, ("a key", "combine"))
        fake.fresh()
        return found

    assert combined(weights).slow == 1 and combined(weights).slow == 0
    other = combined(None)
    assert other.slow == 1 and other.launches[0][0] != combined(weights).launches[0][0]
    assert combined(weights).slow == 0
    half = combined(weights, rows.bfloat16())
    assert half.slow == 1 and "bf16" in half.launches[0][0][2]


def test_hooks_that_run_before_a_kernel_are_not_passed_by(fake: FakeDriver) -> None:
    from shardwright.kernels.rms_norm.triton import rms_norm_fwd_kernel

    x, weight, called = torch.ones(4, 64), torch.ones(64), []
    norm(x, weight)
    rms_norm_fwd_kernel.pre_run_hooks.append(lambda *given, **named: called.append(1))
    try:
        norm(x, weight)
    finally:
        rms_norm_fwd_kernel.pre_run_hooks.clear()
    assert called == [1]


@pytest.mark.parametrize("error", [TypeError("function takes 12 arguments"), RuntimeError("Triton Error [CUDA]")])
def test_what_a_launcher_refuses_goes_through_triton_and_is_said(fake: FakeDriver, error: Exception) -> None:
    x, weight = torch.ones(4, 64), torch.ones(64)
    norm(x, weight)
    fake.refuses = error
    found = fake.fresh()
    with pytest.warns(RuntimeWarning, match="through triton from now on"):
        norm(x, weight)
    assert found.slow == 1 and len(found.launches) == 1 and str(error) in (bound.given_up() or "")
    fake.refuses = None
    found = fake.fresh()
    norm(x, weight)
    norm(x, weight)
    assert found.slow == 2, "nothing is bound any more"


def test_another_triton_binds_nothing() -> None:
    assert bound.asked("1", "3.6.0") and bound.asked(None, "3.6.0") and not bound.asked("0", "3.6.0")
    assert not bound.asked(None, "3.9.0")
    with pytest.warns(RuntimeWarning, match=r"triton is 3\.9\.0"):
        assert not bound.asked("1", "3.9.0")
