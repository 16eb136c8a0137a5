"""Gated DeltaNet and the short convolution in bf16 and fp32 against fp64. Runs under TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.gated_delta import cases  # noqa: E402
from shardwright.kernels.gated_delta.op import gated_delta  # noqa: E402
from shardwright.kernels.gated_delta.reference import gated_delta_recurrent_reference  # noqa: E402
from shardwright.kernels.short_conv import cases as conv_cases  # noqa: E402
from shardwright.kernels.short_conv.op import short_conv  # noqa: E402
from shardwright.kernels.short_conv.reference import short_conv_reference  # noqa: E402
from shardwright.kernels.verify import poisoned_memory, relative_error, verify_suite  # noqa: E402


def passes(function: Any, given: list[Tensor], *, wide: bool, **settings: Any) -> list[Tensor]:
    leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in given]
    outputs = function(*leaves, **settings)
    draw = torch.Generator().manual_seed(5)
    ends = [torch.randn(t.shape, generator=draw).bfloat16().to(t.dtype) for t in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, ends)]


@pytest.mark.parametrize("suite", [cases.SUITE, conv_cases.SUITE], ids=["gated_delta", "short_conv"])
def test_error_is_no_larger_than_eagers(suite: Any) -> None:
    """Odd lengths, grouped heads, empty documents, NaN-poisoned memory, repeated bits, bad inputs."""
    results = verify_suite(suite, "cpu")
    assert len(results) > 10
    assert [result for result in results if not result.ok] == []


def test_gated_delta_in_fp32_is_exact_to_fp32() -> None:
    given = list(cases.inputs({"T": 90, "H": 1, "HV": 2, "K": 64, "V": 64, "docs": 3}, torch.float32, "cpu", 3))
    exact = passes(gated_delta_recurrent_reference, given, wide=True, cu_seqlens=(0, 3, 3, 90))
    with poisoned_memory():
        ours = passes(gated_delta, given, wide=False, cu_seqlens=(0, 3, 3, 90), output_final_state=True)
    found = [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]
    assert max(found) < 3e-5, found


def test_gated_delta_is_the_librarys_rule() -> None:
    """The recurrence as qwen3_next states it, with the gate and β that its layer makes."""
    modelling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given = list(cases.inputs({"T": 70, "H": 2, "K": 64, "V": 64}, torch.float32, "cpu", 3))
    q, k, v, a, b, A_log, dt_bias, _ = given
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    wanted, _ = modelling.torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=b.sigmoid(), initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
    )
    with torch.no_grad():
        raw, _ = gated_delta(q, k, v, a, b, A_log, dt_bias)
        made, _ = gated_delta(q, k, v, g, b.sigmoid(), gate="given", beta_sigmoid=False)
    assert relative_error(raw, wanted.double()) < 1e-5 and relative_error(made, wanted.double()) < 1e-5


def test_gated_delta_is_causal_and_keeps_documents_apart() -> None:
    given = list(cases.inputs({"T": 70, "H": 1, "K": 64, "V": 64}, torch.bfloat16, "cpu", 3))
    with torch.no_grad():
        whole, _ = gated_delta(*given)
        later = [t.clone() for t in given]
        for tensor in later[:5]:
            tensor[:, 21:] = tensor[:, 21:].flip(1) * 3
        assert torch.equal(gated_delta(*later)[0][:, :21], whole[:, :21])
        zeros = torch.zeros_like(given[7])
        packed, _ = gated_delta(*given[:7], torch.cat((given[7], zeros)), cu_seqlens=(0, 30, 70))
        second = [t[:, 30:].clone() for t in given[:5]]
        assert torch.equal(gated_delta(*second, *given[5:7])[0], packed[:, 30:])


def test_given_decays_and_betas_of_zero() -> None:
    given = list(cases.inputs({"T": 66, "H": 1, "K": 64, "V": 64}, torch.float32, "cpu", 3))
    q, k, v, g, beta = given[:5]
    beta = beta.sigmoid()
    beta[:, ::3] = 0
    g = -g.abs() * 8
    g[:, 20:24] = -500.0
    settings: dict[str, Any] = {"gate": "given", "beta_sigmoid": False}
    exact = passes(
        lambda *x, **s: gated_delta_recurrent_reference(*x, **s)[:1], [q, k, v, g, beta], wide=True, **settings
    )
    ours = passes(lambda *x, **s: gated_delta(*x, **s)[:1], [q, k, v, g, beta], wide=False, **settings)
    found = [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]
    dg = found.pop(4)  # decays so strong that what is left of them are sums that cancel
    assert max(found) < 3e-6 and dg < 1e-4, (found, dg)


@pytest.mark.parametrize("stated", [False, True])
def test_the_convolution_in_fp32(stated: bool) -> None:
    """Every gradient; documents shorter than the taps; without SiLU too."""
    given = list(conv_cases.inputs({"T": 70, "C": 24, "J": 4, "docs": 5}, torch.float32, "cpu", 3))
    given = given if stated else given[:2]
    bounds = (0, 1, 1, 3, 66, 70)
    for silu in (True, False):
        settings: dict[str, Any] = {"cu_seqlens": bounds, "silu": silu}
        exact = passes(short_conv_reference, given, wide=True, **settings)
        with poisoned_memory():
            ours = passes(short_conv, given, wide=False, output_final_state=True, **settings)
        found = [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]
        assert max(found) < 1e-6, found


def test_the_convolution_in_pieces_is_the_whole() -> None:
    """What one call leaves starts the next one, bit for bit; a tracer sees one node with the same bits."""
    x, weight, _ = conv_cases.inputs({"T": 70, "C": 24, "J": 4}, torch.bfloat16, "cpu", 3)
    whole, _ = short_conv(x, weight)
    first, passed = short_conv(x[:, :66].contiguous(), weight, output_final_state=True)
    rest, _ = short_conv(x[:, 66:].contiguous(), weight, passed)
    assert torch.equal(torch.cat((first, rest), 1), whole)
    leaves = [[t.float().clone().requires_grad_() for t in (x, weight)] for _ in range(2)]
    short_conv(*leaves[0])[0].sum().backward()
    torch.ops.shardwright.short_conv_forward(*leaves[1], None, [0, 70], True).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*leaves, strict=True))
