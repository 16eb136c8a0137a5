"""The Gluon kernel of dq, dk and dg on the CPU: its source runs in plain torch, one program after another.

Gluon has no interpreter. But this kernel's layouts say only which thread holds a value, so its source means the same
with tensors in their place: loads, stores, asynchronous copies and shared memory become torch, with true bf16. Every
access is checked to lie inside its tensor, and shared memory starts as NaN. Runs under TRITON_INTERPRET=1, in which the
other kernels of the pass run.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.kda import cases, configs, gradient_launches  # noqa: E402
from shardwright.kernels.kda.op import kda  # noqa: E402
from shardwright.kernels.kda.reference import kda_recurrent_reference  # noqa: E402
from shardwright.kernels.verify import poisoned_memory, relative_error  # noqa: E402

SOURCE = Path(gradient_launches.__file__).with_name("keys_hopper.py")
OTHERS = ("o", "final", "dv", "dinitial_state")
"""What other kernels make."""


class Pointer:
    """An address inside a tensor's memory, or a tensor of such."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def reached(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets and which of them are accessed, all inside the tensor."""
        at, taken = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(True if mask is None else mask))
        used = at[taken]
        assert not used.numel() or (int(used.min()) >= 0 and int(used.max()) < self.memory.numel()), "outside"
        return at, taken


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def load(self, layout: Any) -> Tensor:
        return self.values.clone()

    def store(self, value: Tensor) -> None:
        self.values.copy_(value)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.values.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.values.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    at, taken = pointer.reached(mask)
    flat = pointer.memory.view(-1)
    return torch.where(taken, flat[torch.where(taken, at, 0)], torch.tensor(other, dtype=flat.dtype))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, taken = pointer.reached(mask)
    found = torch.broadcast_to(torch.as_tensor(value), at.shape).to(pointer.memory.dtype)
    pointer.memory.view(-1)[at[taken]] = found[taken]


def allocate(dtype: torch.dtype, shape: list[int], layout: Any, value: Tensor | None = None) -> Shared:
    return Shared(torch.full(shape, float("nan"), dtype=dtype) if value is None else value.clone())


def copy(target: Shared, pointer: Pointer, mask: Any = None) -> None:
    target.store(load(pointer, mask))


def product(a: Tensor, b: Tensor, sum_: Tensor) -> Tensor:
    assert a.dtype == b.dtype == torch.bfloat16
    return a.float() @ b.float() + sum_


def meaning(place: list[int]) -> dict[str, Any]:
    """What the names of the source stand for; ``place`` holds the program's indices."""

    def nothing(*args: Any, **named: Any) -> None:
        return None

    language = SimpleNamespace(
        constexpr=lambda value: value, to_tensor=torch.tensor, static_range=range,
        program_id=lambda axis: torch.tensor(place[axis]),
        NVMMADistributedLayout=nothing, DotOperandLayout=nothing, SliceLayout=nothing, BlockedLayout=nothing,
        SwizzledSharedLayout=nothing, thread_barrier=nothing, allocate_shared_memory=allocate, load=load, store=store,
        bfloat16=torch.bfloat16, float32=torch.float32, int32=torch.int32, int64=torch.int64,
        arange=lambda low, high, layout: torch.arange(low, high),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        reshape=torch.reshape, convert_layout=lambda x, layout, assert_trivial=False: x,
        where=torch.where, sum=torch.sum, min=torch.amin, abs=torch.abs, exp2=torch.exp2, log2=torch.log2,
        rsqrt=torch.rsqrt, minimum=lambda x, most: x.clamp(max=most), maximum=lambda x, least: x.clamp(min=least),
    )  # fmt: skip
    copies = SimpleNamespace(async_copy_global_to_shared=copy, commit_group=nothing, wait_group=nothing)
    gluon = SimpleNamespace(jit=lambda function: function, constexpr_function=lambda function: function)
    return {"gl": language, "gluon": gluon, "async_copy": copies, "mma_v2": product}


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)`` in torch."""
    tree = ast.parse(SOURCE.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    place = [0, 0, 0]
    names = meaning(place)
    exec(compile(tree, str(SOURCE), "exec"), names)
    given = [Pointer(value) if isinstance(value, Tensor) else value for value in arguments]
    shape = {name: value for name, value in constants.items() if name not in ("num_warps", "num_stages")}
    for place[2], place[1], place[0] in itertools.product(*(range(n) for n in reversed(grid))):
        names[kernel.__name__](*given, **shape)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], list[str]]]:
    """Chooses between the two kernels; gives the names of those started since."""
    portable = gradient_launches.sound.start

    def choose(hopper: bool) -> list[str]:
        started: list[str] = []

        def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            started.append(kernel.__name__)
            (run if "hopper" in kernel.__name__ else portable)(kernel, grid, *arguments, **constants)

        monkeypatch.setattr(gradient_launches, "on_hopper", lambda inputs: hopper)
        monkeypatch.setattr(gradient_launches, "sound", SimpleNamespace(start=start))
        return started

    yield choose


def drawn(bounds: tuple[int, ...], HV: int = 1, **changed: Tensor | None) -> list[Tensor | None]:
    shape = {"T": bounds[-1], "H": 1, "HV": HV, "K": 64, "V": 64, "docs": len(bounds) - 1}
    named = dict(zip(cases.INPUT_NAMES, cases.inputs(shape, torch.bfloat16, "cpu", 3), strict=True))
    return list({**named, **changed}.values())


def passes(function: Any, given: list[Tensor | None], wide: bool, **settings: Any) -> dict[str, Tensor]:
    """The gradient of every input, for seeded gradients of the results."""
    leaves = [None if t is None else (t.double() if wide else t.clone()).requires_grad_() for t in given]
    o, final = function(*leaves, **settings)
    draw = torch.Generator().manual_seed(5)
    ends = [torch.randn(t.shape, generator=draw).bfloat16().to(t.dtype) for t in (o, final)]
    found = iter(torch.autograd.grad([o, final], [leaf for leaf in leaves if leaf is not None], ends))
    return {f"d{n}": next(found) for n, leaf in zip(cases.INPUT_NAMES, leaves, strict=True) if leaf is not None}


def gate_of(kind: str, bounds: tuple[int, ...], HV: int = 1) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Inputs and settings of one kind of gate."""
    given = drawn(bounds, HV)
    g, beta = given[3], given[4]
    assert g is not None and beta is not None
    settings: dict[str, Any] = {"gate": "softplus" if kind == "steep" else kind, "cu_seqlens": bounds}
    if kind == "steep":
        given = drawn(bounds, HV, g=g * 4 + 6)
    if kind == "given":
        decays = -g.abs() * 2
        decays[:, 20:24] = -500.0
        given = drawn(bounds, HV, g=decays, beta=beta.sigmoid(), A_log=None, dt_bias=None)
        settings["beta_sigmoid"] = False
    return given, settings


BOUNDS = (0, 3, 3, 40)
"""A document of three tokens, an empty one, and one that ends inside a block."""


def errors(given: list[Tensor | None], exact: dict[str, Tensor], **settings: Any) -> dict[str, float]:
    with poisoned_memory():
        found = passes(kda, given, False, output_final_state=True, **settings)
    return {name: relative_error(found[name], exact[name]) for name in exact if name not in OTHERS}


@pytest.mark.parametrize("kind", ["softplus", "steep", "given"])
def test_gates_without_a_bound(kind: str, by_hand: Callable[[bool], list[str]]) -> None:
    """Mild ones, and ones that decay over a block by more than a factor can hold."""
    given, settings = gate_of(kind, BOUNDS)
    started = by_hand(True)
    found = errors(given, passes(kda_recurrent_reference, given, True, **settings), **settings)
    assert "kda_keys_hopper_kernel" in started and max(found.values()) < 6e-3, found


def test_error_is_no_larger_than_the_portable_kernels(by_hand: Callable[[bool], list[str]]) -> None:
    """Two value heads a key head: their gradients leave in fp32."""
    given, settings = gate_of("bounded", BOUNDS, HV=2)
    exact = passes(kda_recurrent_reference, given, True, **settings)
    by_hand(False)
    portable = errors(given, exact, **settings)
    by_hand(True)
    ours = errors(given, exact, **settings)
    assert all(ours[name] < 1.1 * portable[name] + 1e-4 for name in ours), (ours, portable)


def test_a_document_has_the_gradients_that_it_has_alone(by_hand: Callable[[bool], list[str]]) -> None:
    """Bit for bit, of q, k and the gate."""
    by_hand(True)
    bounds = (0, 5, 12)
    given, settings = gate_of("bounded", bounds)
    whole = passes(kda, given, False, output_final_state=True, **settings)
    other = [t.clone() if t is not None else None for t in given]
    for tensor in other[:5]:
        assert tensor is not None
        tensor[:, 5:] = tensor[:, 5:].flip(1) * 2
    changed = passes(kda, other, False, output_final_state=True, **settings)
    for name in ("dq", "dk", "dg"):
        assert torch.equal(whole[name][:, :5], changed[name][:, :5])
        assert not torch.equal(whole[name][:, 5:], changed[name][:, 5:])


def test_parts_of_the_chunks(by_hand: Callable[[bool], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in several launches give the bits of one launch."""
    by_hand(True)
    given, settings = gate_of("bounded", (0, 66))
    whole = passes(kda, given, False, output_final_state=True, **settings)
    monkeypatch.setattr(configs, "part", lambda *sizes: 1)
    parts = passes(kda, given, False, output_final_state=True, **settings)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
