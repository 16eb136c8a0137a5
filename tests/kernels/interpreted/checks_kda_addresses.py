"""No kernel of the delta rule or of the short convolution touches memory outside the tensor it was given.

Every tensor argument of every launch becomes a copy between two guards, filled with NaN or a canary. An access outside
the copies raises where it happens; guards are compared afterwards. So an access that would land in a neighbouring
tensor is seen too. Shipped launch choices and those worth tuning. Runs under TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreted
from torch import Tensor

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.gated_delta import cases as scalar_cases  # noqa: E402
from shardwright.kernels.gated_delta.op import gated_delta  # noqa: E402
from shardwright.kernels.kda import cases, configs  # noqa: E402
from shardwright.kernels.kda.configs import Tile  # noqa: E402
from shardwright.kernels.kda.documents import documents  # noqa: E402
from shardwright.kernels.kda.op import kda  # noqa: E402
from shardwright.kernels.kda.step import kda_step  # noqa: E402
from shardwright.kernels.short_conv import cases as conv_cases  # noqa: E402
from shardwright.kernels.short_conv.op import short_conv  # noqa: E402
from shardwright.kernels.verify import poisoned_memory  # noqa: E402

GUARD = 4096
"""Values on each side of a tensor."""
CANARY = 1_234_567


class Guards:
    """The guarded copies of one launch's tensors."""

    def __init__(self) -> None:
        self.kernel = ""
        self.launched: set[str] = set()
        self.copies: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        """Original, buffer, copy inside it, and the copy's first values."""

    def begin(self, kernel: str, given: list[Any]) -> list[Any]:
        self.kernel, self.copies = kernel, []
        self.launched.add(kernel)
        return [self._guarded(value) if isinstance(value, Tensor) else value for value in given]

    def _guarded(self, tensor: Tensor) -> Tensor:
        fill: float = float("nan") if tensor.is_floating_point() else CANARY
        buffer = torch.full((tensor.numel() + 2 * GUARD,), fill, dtype=tensor.dtype)
        inside = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
        inside.copy_(tensor)
        self.copies.append((tensor, buffer, inside, inside.clone()))
        return inside

    def end(self) -> None:
        for original, buffer, inside, before in self.copies:
            edges = torch.cat((buffer[:GUARD], buffer[-GUARD:]))
            whole = edges.isnan() if edges.is_floating_point() else edges == CANARY
            assert bool(whole.all()), f"{self.kernel} wrote beside a tensor"
            if not torch.equal(inside.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8)):
                original.copy_(inside)

    def check(self, pointers: Any, mask: Any) -> None:
        taken = pointers[mask].astype(np.int64)
        if not taken.size:
            return
        inside = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for _, _, t, _ in self.copies]
        held = np.zeros(taken.shape, bool)
        for low, high in inside:
            held |= (taken >= low) & (taken < high)
        assert held.all(), f"outside, in {self.kernel}"


@contextmanager
def guarded() -> Iterator[Guards]:
    found, builder, executor = Guards(), type(interpreted.interpreter_builder), interpreted.GridExecutor
    before = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}
    start, finish = executor._init_args_hst, executor._restore_args_dev

    def watching(name: str, mask_at: int) -> Callable[..., Any]:
        def access(self: Any, pointers: Any, *rest: Any) -> Any:
            found.check(pointers.data, np.broadcast_to(rest[mask_at].data.astype(bool), pointers.data.shape))
            return before[name](self, pointers, *rest)

        return access

    def begin(self: Any, arguments: Any, named: Any) -> Any:
        args, kwargs = start(self, arguments, named)
        made = found.begin(self.fn.__name__, [*args, *kwargs.values()])
        return made[: len(args)], dict(zip(kwargs, made[len(args) :], strict=True))

    def end(self: Any, *given: Any) -> None:
        found.end()

    builder.create_masked_load = watching("create_masked_load", 0)
    builder.create_masked_store = watching("create_masked_store", 1)
    executor._init_args_hst, executor._restore_args_dev = begin, end
    try:
        yield found
    finally:
        executor._init_args_hst, executor._restore_args_dev = start, finish
        for name, function in before.items():
            setattr(builder, name, function)


def passes(function: Any, given: list[Tensor], **settings: Any) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    outputs = [out for out in function(*leaves, **settings) if out is not None]
    ends = [torch.randn(o.shape, generator=torch.Generator().manual_seed(5)).to(o.dtype) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, ends)]


def same_as_unguarded(function: Any, given: list[Tensor], **settings: Any) -> Guards:
    """Guards hold, fresh memory is NaN, nothing of it comes out, and the bits are those without guards."""
    wanted = passes(function, given, **settings)
    with guarded() as found, poisoned_memory():
        ours = passes(function, given, **settings)
    for a, b in zip(ours, wanted, strict=True):
        assert bool(a.isfinite().all()) and torch.equal(a, b)
    return found


PIECES = ((0, 1), (0, 63), (0, 1, 1, 3, 66))
"""Bounds of documents: one token, one short of a chunk, tiny pieces, an empty one, a last chunk of one row."""


def drawn(make: Any, bounds: tuple[int, ...], dtype: torch.dtype, **sizes: int) -> list[Tensor]:
    shape = {"T": bounds[-1], "H": 1, "HV": 3, "K": 64, "V": 64, "docs": len(bounds) - 1, **sizes}
    return list(make(shape, dtype, "cpu", 3))


@pytest.mark.parametrize("bounds", PIECES)
@pytest.mark.parametrize("kind", ["bounded", "scalar"])
def test_documents_of_any_length(kind: str, bounds: tuple[int, ...]) -> None:
    """Three value heads: fewer than a block of heads of the scalar gate's kernel."""
    heads = 3 if kind == "scalar" else 1
    make, op = (scalar_cases.inputs, gated_delta) if kind == "scalar" else (cases.inputs, kda)
    given = drawn(make, bounds, torch.bfloat16, HV=heads)
    found = same_as_unguarded(op, given, cu_seqlens=bounds, output_final_state=True)
    expected = {"kda_scan_kernel", "kda_reverse_kernel", "kda_values_kernel"}
    own = {"scalar": ("gate", "prepare", "keys"), "kda": ("gate", "pairs", "widths", "keys", "strengths")}
    name = "scalar" if kind == "scalar" else "kda"
    assert found.launched == expected | {f"{name}_{one}_kernel" for one in own[name]}


def test_softplus_and_rows_of_a_batch() -> None:
    given = drawn(cases.inputs, (0, 10), torch.bfloat16)
    rows = [t.repeat(2, *(1 for _ in t.shape[1:])) if n < 5 or n == 7 else t for n, t in enumerate(given)]
    same_as_unguarded(kda, rows, gate="softplus", output_final_state=True)


VARIANTS: dict[str, tuple[Tile, ...]] = {
    "pairs": (Tile(32, 0, 1, 2),),
    "widths": (Tile(32, 32, 4, 1),),
    "values": (Tile(64, 32, 4, 1), Tile(64, 16, 4, 1)),
    "keys": (Tile(16, 32, 4, 1), Tile(64, 64, 8, 1)),
    "scan": (Tile(64, 32, 4, 2),),
    "reverse": (Tile(64, 32, 4, 2),),
}


@pytest.mark.parametrize(
    ("kernel", "tile"), [(name, tile) for name, tiles in VARIANTS.items() for tile in tiles], ids=str
)
def test_tuning_variants(kernel: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice that a sweep may try, on a last chunk of one row; results within rounding of the shipped one's."""
    bounds = (0, 3, 3, 65)
    given = drawn(cases.inputs, bounds, torch.bfloat16, HV=1)
    settings: dict[str, Any] = {"cu_seqlens": bounds, "output_final_state": True}
    shipped = passes(kda, given, **settings)
    monkeypatch.setattr(configs, kernel, lambda *sizes: tile)
    with guarded() as found, poisoned_memory():
        ours = passes(kda, given, **settings)
    assert f"kda_{kernel}_kernel" in found.launched
    for a, b in zip(ours, shipped, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-2


@pytest.mark.parametrize(("kind", "keep"), [("bounded", True), ("scalar", False)])
def test_pieces_of_documents(kind: str, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents cut into pieces and gradients made in parts."""
    monkeypatch.setattr(configs, "pieces", lambda *sizes: 3)
    monkeypatch.setattr(configs, "part", lambda *sizes: 2)
    make, op = (scalar_cases.inputs, gated_delta) if kind == "scalar" else (cases.inputs, kda)
    bounds = (0, 130, 130, 131)
    given = drawn(make, bounds, torch.bfloat16, HV=1)
    found = same_as_unguarded(op, given, cu_seqlens=bounds, output_final_state=True, keep=keep)
    assert {"kda_summary_kernel", "kda_combine_kernel"} <= found.launched


@pytest.mark.parametrize("bounds", PIECES)
def test_short_convolution(bounds: tuple[int, ...]) -> None:
    """Channels that no block divides; documents shorter than the taps."""
    shape = {"T": bounds[-1], "C": 21, "J": 4, "docs": len(bounds) - 1}
    given = list(conv_cases.inputs(shape, torch.bfloat16, "cpu", 3))
    same_as_unguarded(short_conv, given, cu_seqlens=bounds, output_final_state=True)


def test_single_steps() -> None:
    for make in (cases.inputs, scalar_cases.inputs):
        given = drawn(make, (0, 2), torch.bfloat16)
        with guarded() as found, poisoned_memory():
            o, state = kda_step(*given, gate="softplus")
        assert found.launched == {"kda_step_kernel"}
        assert bool(o.isfinite().all()) and bool(state.isfinite().all())


def test_the_guards_see_what_is_wrong() -> None:
    """A table that names too many tokens is seen where the first kernel uses it."""
    given = drawn(cases.inputs, (0, 3, 3, 70), torch.bfloat16)
    docs = documents(1, 70, given[0].device, (0, 3, 3, 70))
    docs.table[-1, 1] += 64
    try:
        with guarded(), torch.no_grad(), pytest.raises(Exception, match="outside, in kda_gate_kernel"):
            kda(*given, cu_seqlens=docs)
    finally:
        docs.table[-1, 1] -= 64
