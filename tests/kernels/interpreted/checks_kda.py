"""KDA in true bf16 and fp32 against the recurrence in fp64. Runs under TRITON_INTERPRET=1.

Legend: B batch, T tokens, H key heads, HV value heads, K, V widths.
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
from torch._subclasses import FakeTensorMode

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.kda import cases  # noqa: E402
from shardwright.kernels.kda.documents import documents  # noqa: E402
from shardwright.kernels.kda.op import kda  # noqa: E402
from shardwright.kernels.kda.reference import kda_chunk_reference, kda_recurrent_reference  # noqa: E402
from shardwright.kernels.verify import poisoned_memory, relative_error, verify_suite  # noqa: E402

NAMES = ("o", "final", *(f"d{name}" for name in cases.INPUT_NAMES))
ROUNDING = 1e-2
"""Relative error that bf16 factors may leave; what it bounds is below 5e-3 everywhere but in dA_log."""


def drawn(shape: dict[str, int], dtype: torch.dtype, **changed: Tensor | None) -> list[Tensor | None]:
    named = dict(zip(cases.INPUT_NAMES, cases.inputs(shape, dtype, "cpu", 3), strict=True))
    return list({**named, **changed}.values())


def passes(function: Any, given: list[Tensor | None], *, wide: bool, **settings: Any) -> dict[str, Tensor]:
    """Output, final state and the gradient of every input, for seeded output gradients."""
    leaves = [None if t is None else (t.double() if wide else t.clone()).requires_grad_() for t in given]
    o, final = function(*leaves, **settings)
    draw = torch.Generator().manual_seed(5)
    ends = [torch.randn(t.shape, generator=draw).bfloat16().to(t.dtype) for t in (o, final)]
    learning = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad([o, final], learning, ends))
    gradients = {f"d{n}": next(found) for n, leaf in zip(cases.INPUT_NAMES, leaves, strict=True) if leaf is not None}
    return {"o": o.detach(), "final": final.detach(), **gradients}


def errors(given: list[Tensor | None], **settings: Any) -> dict[str, float]:
    exact = passes(kda_recurrent_reference, given, wide=True, **settings)
    with poisoned_memory():
        ours = passes(kda, given, wide=False, output_final_state=True, **settings)
    return {name: relative_error(ours[name], exact[name]) for name in exact}


@pytest.mark.parametrize("suite", [cases.SUITE, cases.SOFTPLUS_SUITE], ids=["bounded", "softplus"])
def test_error_is_no_larger_than_eagers(suite: Any) -> None:
    """Odd lengths, grouped heads, an empty document, NaN-poisoned memory, repeated bits, bad inputs."""
    results = verify_suite(suite, "cpu")
    assert len(results) > 10
    assert [result for result in results if not result.ok] == []


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_chunks_are_the_recurrence(gate: str) -> None:
    given = drawn({"T": 90, "H": 1, "HV": 2, "K": 64, "V": 64, "docs": 3}, torch.float64)
    settings: dict[str, Any] = {"gate": gate, "cu_seqlens": (0, 3, 3, 90)}
    exact, chunked = (passes(f, given, wide=True, **settings) for f in (kda_recurrent_reference, kda_chunk_reference))
    assert max(relative_error(chunked[name], exact[name]) for name in exact) < 1e-12


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_fp32_is_exact_to_fp32(gate: str) -> None:
    """Every gradient of two chunks; decays span 2 ** 460 inside a chunk."""
    found = errors(drawn({"T": 66, "H": 1, "K": 64, "V": 64}, torch.float32), gate=gate)
    assert max(found.values()) < 3e-5, found


def test_one_token() -> None:
    found = errors(drawn({"T": 1, "H": 2, "K": 64, "V": 64}, torch.float32), gate="bounded")
    assert max(found.values()) < 3e-5, found


def test_wide_keys() -> None:
    found = errors(drawn({"T": 20, "H": 1, "K": 256, "V": 128}, torch.float32), gate="bounded")
    assert max(found.values()) < 3e-5, found


def test_saturated_gates_zero_betas_and_repeated_keys() -> None:
    """Gates at their bound for whole chunks and fully open ones, betas of exactly 0 and 1, one key for all tokens."""
    shape = {"T": 66, "H": 1, "K": 64, "V": 64}
    base = drawn(shape, torch.bfloat16)
    g, beta, k = (torch.empty_like(base[at]) for at in (3, 4, 1))
    g[..., :32], g[..., 32:] = 40.0, -40.0
    beta[:, ::2], beta[:, 1::2] = -200.0, 200.0
    k[:] = base[1][:, :1]
    found = errors(drawn(shape, torch.bfloat16, g=g, k=k), gate="bounded")
    assert max(found[name] for name in ("o", "final", "dq", "dk", "dv", "dbeta", "dinitial_state")) < ROUNDING, found
    given = drawn(shape, torch.bfloat16, beta=beta, k=k)
    found = errors(given, gate="bounded")
    assert max(found[name] for name in ("o", "final", "dq", "dv", "dinitial_state")) < ROUNDING, found
    ours = passes(kda, given, wide=False, output_final_state=True, gate="bounded")
    assert not ours["dbeta"].any() and all(bool(t.isfinite().all()) for t in ours.values())


def test_given_decays_and_betas_of_zero() -> None:
    """Decays and betas from outside; a beta of 0 still has its gradient; decays of any size stay finite."""
    shape = {"T": 66, "H": 1, "K": 64, "V": 64}
    base = drawn(shape, torch.float32)
    beta = base[4].sigmoid()
    beta[:, ::3] = 0
    g = -base[3].abs() * 8
    g[:, 20:24] = -500.0
    given = drawn(shape, torch.float32, g=g, beta=beta, A_log=None, dt_bias=None)
    found = errors(given, gate="given", beta_sigmoid=False)
    assert max(found.values()) < 3e-5, found


@pytest.mark.parametrize("at", [18, 21])
def test_the_past_keeps_its_bits(at: int) -> None:
    """Later tokens and gates change no earlier output bit; a prefix alone gives the same bits."""
    given = drawn({"T": 24, "H": 1, "K": 64, "V": 64}, torch.bfloat16)
    with torch.no_grad():
        whole, _ = kda(*given)
        later = [t.clone() if t.dim() > 2 and t.shape[1] == 24 else t for t in given]
        for tensor in later[:5]:
            tensor[:, at:] = tensor[:, at:].flip(1) * 3
        assert torch.equal(kda(*later)[0][:, :at], whole[:, :at])
        prefix = [t[:, :at].clone() if t.dim() > 2 and t.shape[1] == 24 else t for t in given]
        assert torch.equal(kda(*prefix)[0], whole[:, :at])


def test_documents_do_not_leak() -> None:
    """A document's outputs are those that it has alone, bit for bit; a split is one document with its state passed."""
    given = drawn({"T": 90, "H": 1, "K": 64, "V": 64, "docs": 2}, torch.bfloat16)
    with torch.no_grad():
        o, final = kda(*given, cu_seqlens=(0, 70, 90), output_final_state=True)
        parts = []
        for n, (low, high) in enumerate(((0, 70), (70, 90))):
            part = [t[:, low:high].clone() for t in given[:5]]
            alone, state = kda(*part, *given[5:7], given[7][n : n + 1], output_final_state=True)
            assert torch.equal(alone, o[:, low:high]) and torch.equal(state[0], final[n])
            parts.append(part)
        first, state = kda(*parts[0], *given[5:7], given[7][:1], output_final_state=True)
        rest, _ = kda(*parts[1], *given[5:7], state)
        whole, _ = kda(*given[:7], given[7][:1])
    assert torch.equal(first, whole[:, :70]) and relative_error(rest, whole[:, 70:]) < ROUNDING


def test_tables_follow_values_not_addresses() -> None:
    bounds = torch.tensor([0, 5, 9])
    first = documents(1, 9, bounds.device, bounds)
    bounds[1] = 2
    second = documents(1, 9, bounds.device, bounds)
    assert first.bounds == (0, 5, 9) and second.bounds == (0, 2, 9)
    assert second.table.tolist() == [[0, 2], [2, 9]] and second.first.tolist() == [0, 1, 2]


def test_tracers_see_one_node_with_the_same_bits() -> None:
    """The registered operator gives what the short way gives; fake tensors give its shapes; sums have stride 0."""
    shape = {"T": 9, "H": 1, "K": 64, "V": 64}
    given = drawn(shape, torch.float32)
    short, traced = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    kda(*short)[0].sum().backward()
    o, _ = torch.ops.shardwright.kda_forward(*traced, [], "bounded", -5.0, True)
    o.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(short, traced, strict=True))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in given]
        o, final = kda(*fake, output_final_state=True)
    assert o.shape == given[2].shape and final is not None and final.shape == given[7].shape


@contextmanager
def watched_addresses() -> Iterator[None]:
    """An access outside every tensor that the running kernel was given raises before it happens."""
    inside: list[tuple[int, int]] = []
    kernel = [""]
    builder = type(interpreted.interpreter_builder)
    before = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}
    start = interpreted.GridExecutor._init_args_hst

    def watching(name: str, mask_at: int) -> Callable[..., Any]:
        def access(self: Any, pointers: Any, *rest: Any) -> Any:
            mask = np.broadcast_to(rest[mask_at].data.astype(bool), pointers.data.shape)
            found = pointers.data[mask].astype(np.int64)
            for at in (found.min(), found.max()) if mask.any() else ():
                assert any(low <= at < high for low, high in inside), f"{name} outside, in {kernel[0]}"
            return before[name](self, pointers, *rest)

        return access

    def begin(self: Any, arguments: Any, named: Any) -> Any:
        given = start(self, arguments, named)
        tensors = [t for t in (*given[0], *given[1].values()) if hasattr(t, "data_ptr")]
        inside[:] = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        kernel[0] = self.fn.__name__
        return given

    builder.create_masked_load = watching("create_masked_load", 0)
    builder.create_masked_store = watching("create_masked_store", 1)
    interpreted.GridExecutor._init_args_hst = begin
    try:
        yield
    finally:
        interpreted.GridExecutor._init_args_hst = start
        for name, function in before.items():
            setattr(builder, name, function)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_no_access_outside_its_tensor(gate: str) -> None:
    """Both passes over documents whose last chunks are short; and a table that names too many tokens is seen."""
    given = drawn({"T": 70, "H": 1, "HV": 2, "K": 64, "V": 64, "docs": 3}, torch.bfloat16)
    with watched_addresses():
        passes(kda, given, wide=False, output_final_state=True, gate=gate, cu_seqlens=(0, 3, 3, 70))
    docs = documents(1, 70, given[0].device, (0, 3, 3, 70))
    docs.table[-1, 1] += 64
    try:
        with watched_addresses(), torch.no_grad(), pytest.raises(Exception, match="outside, in kda_gate_kernel"):
            kda(*given, gate=gate, cu_seqlens=docs)
    finally:
        docs.table[-1, 1] -= 64
