"""KDA in true bf16 and fp32 against the recurrence in fp64. Runs under TRITON_INTERPRET=1.

Legend: B batch, T tokens, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.kda import cases, configs  # noqa: E402
from shardwright.kernels.kda.documents import documents  # noqa: E402
from shardwright.kernels.kda.op import kda  # noqa: E402
from shardwright.kernels.kda.reference import kda_chunk_reference, kda_recurrent_reference  # noqa: E402
from shardwright.kernels.kda.step import kda_step  # noqa: E402
from shardwright.kernels.verify import poisoned_memory, relative_error, verify_suite  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402

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


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_queries_and_keys_of_any_length(gate: str) -> None:
    """Norms from 1e-4 to 1e5 beside each other, in one block of a chunk and over its blocks."""
    shape = {"T": 40, "H": 1, "K": 64, "V": 64}
    base = drawn(shape, torch.float32)
    lengths = 10.0 ** torch.linspace(-5, 4, 40).roll(7)[None, :, None, None]
    found = errors(drawn(shape, torch.float32, q=base[0] * lengths, k=base[1] * lengths), gate=gate)
    dA_log = found.pop("dA_log")  # one number, a sum of all decays' gradients that cancels
    assert max(found.values()) < 3e-5 and dA_log < 1e-3, (found, dA_log)


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
    """The registered operator gives what the short way gives, checkpointed or not; gradients of sums have stride 0."""
    shape = {"T": 9, "H": 1, "K": 64, "V": 64}
    given = drawn(shape, torch.float32)
    short, traced, again = ([t.clone().requires_grad_() for t in given] for _ in range(3))
    kda(*short)[0].sum().backward()

    def node(*tensors: Tensor) -> Tensor:
        return torch.ops.shardwright.kda_forward(*tensors, [], "bounded", -5.0, True, True)[0]

    node(*traced).sum().backward()
    checkpoint(node, *again, use_reentrant=False).sum().backward()
    for a, b, c in zip(short, traced, again, strict=True):
        assert torch.equal(a.grad, b.grad) and torch.equal(a.grad, c.grad)


@pytest.mark.parametrize("learns", [False, True])
def test_fake_tensors_have_the_shapes_of_real_ones(learns: bool) -> None:
    """All results of the registered operator, two documents, one of them empty."""
    given = drawn({"T": 9, "H": 1, "HV": 2, "K": 64, "V": 64, "docs": 3}, torch.bfloat16)
    settings = ([0, 5, 5, 9], "bounded", -5.0, True, learns)
    real = torch.ops.shardwright.kda_forward(*given, *settings)
    with FakeTensorMode() as mode:
        fake = torch.ops.shardwright.kda_forward(*[mode.from_tensor(t) for t in given], *settings)
        o, final = kda(*[mode.from_tensor(t) for t in given], cu_seqlens=[0, 5, 5, 9], output_final_state=True)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]
    assert final is not None and (o.shape, final.shape) == (real[0].shape, real[1].shape)


def mild(T: int, docs: int = 1) -> list[Tensor]:
    """Inputs whose decays are so mild that the first token still weighs on the last."""
    given = drawn({"T": T, "H": 1, "K": 64, "V": 64, "docs": docs}, torch.float32)
    return [t * 0.3 - 6.0 if n == 3 else t for n, t in enumerate(given)]


def test_what_is_kept_is_what_is_made_again() -> None:
    """Bit for bit, in a single document and in pieces of documents."""
    given = drawn({"T": 70, "H": 1, "K": 64, "V": 64, "docs": 2}, torch.bfloat16)
    settings: dict[str, Any] = {"output_final_state": True, "cu_seqlens": (0, 66, 70)}
    again, kept = (passes(kda, given, wide=False, keep=keep, **settings) for keep in (False, True))
    assert all(torch.equal(again[name], kept[name]) for name in again)


def test_pieces_side_by_side_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces of one document, every gradient; what passes between pieces is no trifle."""
    given, settings = mild(150, 2), {"gate": "softplus", "cu_seqlens": (0, 140, 150)}
    monkeypatch.setattr(configs, "pieces", lambda *sizes: 3)
    monkeypatch.setattr(configs, "part", lambda *sizes: 2)
    found = errors(given, **settings)
    assert max(found.values()) < 3e-5, found
    first = [t[:, 64:140].clone() if n < 5 else t for n, t in enumerate(given[:7])]
    whole, _ = kda_recurrent_reference(*given, **settings)
    alone, _ = kda_recurrent_reference(*first, gate="softplus")
    assert relative_error(alone, whole[:, 64:140].double()) > 0.1


def test_cuts_by_heads_and_length() -> None:
    """The chain is cut only where splitting value columns leaves a device of 132 multiprocessors mostly idle."""
    assert configs.pieces(1024, 32, 128, 132) == 1
    assert configs.pieces(1024, 8, 128, 132) == 4
    assert configs.pieces(1024, 2, 128, 132) == 16
    assert configs.pieces(32, 2, 128, 132) == 1


def test_decays_at_the_bound_of_a_block_and_far_below() -> None:
    """-5 a token (exp of 64 steps back would be infinite), and 6.5e-12 a step."""
    shape = {"T": 64, "H": 1, "K": 64, "V": 64}
    base = drawn(shape, torch.float32, A_log=None, dt_bias=None)
    for decay in (-5.0, -25.76):
        given = [*base[:3], torch.full_like(base[3], decay), base[4].sigmoid(), *base[5:]]
        found = errors(given, gate="given", beta_sigmoid=False)
        dg = found.pop("dg")  # what is left of a decay of exp(-5): sums that cancel
        assert max(found.values()) < 3e-5 and dg < (1e-2 if decay == -5.0 else float("inf")), (found, dg)
    g = torch.full_like(base[3], 40.0)
    found = errors(drawn(shape, torch.float32, g=g), gate="bounded")
    learning = [found[n] for n in ("o", "final", "dq", "dk", "dv", "dbeta", "dinitial_state")]
    assert max(learning) < 3e-5, found


def test_nearly_equal_keys() -> None:
    """Keys of one direction and betas of 1: the inverse is at its worst; gradients of all inputs within fp32."""
    shape = {"T": 64, "H": 1, "K": 64, "V": 64}
    base = drawn(shape, torch.float32)
    k = base[1][:, :1] + 0.05 * torch.randn(base[1].shape, generator=torch.Generator().manual_seed(9))
    found = errors(drawn(shape, torch.float32, k=k, beta=torch.full_like(base[4], 20.0)), gate="softplus")
    learning = {name: error for name, error in found.items() if name != "dbeta"}
    assert max(learning.values()) < 1e-4, found


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_steps_are_the_recurrence(gate: str) -> None:
    """Token by token after a state, and several at once, against the same in fp64; and after the chunked operator."""
    given = drawn({"T": 5, "H": 1, "HV": 2, "K": 64, "V": 64}, torch.float32)
    o, final = kda_recurrent_reference(*[t.double() for t in given], gate=gate)
    with torch.no_grad():
        state, rows = given[7], []
        for t in range(5):
            one, state = kda_step(*(x[:, t : t + 1].contiguous() for x in given[:5]), *given[5:7], state, gate=gate)
            rows.append(one)
        together, after = kda_step(*given, gate=gate)
        chunked, ended = kda(*given, gate=gate, output_final_state=True)
    assert ended is not None
    for found, end in ((torch.cat(rows, 1), state), (together, after), (chunked, ended)):
        assert relative_error(found, o) < 1e-6 and relative_error(end, final) < 1e-6


def test_a_step_has_no_gradient() -> None:
    given = drawn({"T": 1, "H": 1, "K": 64, "V": 64}, torch.float32)
    given[0] = given[0].requires_grad_()
    with pytest.raises(KernelError, match="no-gradient"):
        kda_step(*given)
