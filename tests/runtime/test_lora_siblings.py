"""Linear maps of one input as one node give what each of them gives alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.lora import siblings
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.runtime.lora.siblings import joint

INPUTS, ROWS = 12, (2, 5)


def maps(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Adapted of ranks 3 and 2, one with a bias; two frozen maps without adapters, one with a bias."""
    generator = torch.Generator().manual_seed(7)
    made: list[nn.Module] = []
    for width, rank, biased in ((8, 3, False), (6, 0, True), (4, 2, True), (10, 0, False)):
        linear: nn.Module = nn.Linear(INPUTS, width, bias=biased).to(dtype).requires_grad_(False)
        if rank:
            linear = LoraLinear(linear, rank, 0.5 * rank, 0.0, torch.float64)  # type: ignore[arg-type]
        with torch.no_grad():
            for value in linear.parameters():
                value.normal_(generator=generator)
        made.append(linear)
    return made


def run(linears: list[nn.Module], together: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the input and every adapter."""
    x = torch.randn(*ROWS, INPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    outputs = joint(x, linears) if together else [linear(x) for linear in linears]
    loss = sum((place + 1) * y.square().sum() for place, y in enumerate(outputs))
    adapters = [value for linear in linears for value in linear.parameters() if value.requires_grad]
    return outputs, list(torch.autograd.grad(loss, [x, *adapters]))  # type: ignore[arg-type]


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (0, 2), (1, 3), (3, 0)])
def test_outputs_and_gradients_are_those_of_each_map(chosen: tuple[int, ...]) -> None:
    linears = [maps()[place] for place in chosen]
    wanted, gradients = run(linears, together=False)
    found, ours = run(linears, together=True)
    assert {type(y.grad_fn).__name__ for y in found} == {"JointProductBackward"}
    for a, b in zip([*found, *ours], [*wanted, *gradients], strict=True):
        assert a.shape == b.shape and float(b.detach().abs().max()) > 0
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_adapters_are_cast_and_their_gradients_come_back_in_their_own_format() -> None:
    linears = [one.to(torch.bfloat16) for one in maps()]
    for linear in linears:
        for name, value in linear.named_parameters():
            if name.startswith("lora"):
                value.data = value.data.float()
    x = torch.randn(*ROWS, INPUTS, dtype=torch.bfloat16)
    outputs = joint(x, linears)
    sum(y.float().sum() for y in outputs).backward()  # type: ignore[union-attr]
    assert [y.dtype for y in outputs] == [torch.bfloat16] * 4
    for linear in linears:
        for name, value in linear.named_parameters():
            assert (value.grad is not None) == name.startswith("lora")
            assert value.grad is None or (value.grad.dtype == torch.float32 and value.grad.shape == value.shape)


def test_an_output_that_nothing_uses_has_a_gradient_of_zero() -> None:
    linears = maps()
    x = torch.randn(*ROWS, INPUTS, dtype=torch.float64)
    joint(x, linears)[2].sum().backward()
    assert isinstance(linears[0], LoraLinear) and linears[0].lora_b.grad is not None
    assert float(linears[0].lora_b.grad.abs().max()) == 0
    assert isinstance(linears[2], LoraLinear) and linears[2].lora_b.grad is not None
    assert float(linears[2].lora_b.grad.abs().max()) > 0


@pytest.mark.parametrize("reason", ["hook", "dropout", "learns", "replaced", "format", "alone"])
def test_maps_that_run_otherwise_are_called_one_by_one(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = maps()
    calls: list[str] = []
    x = torch.randn(*ROWS, INPUTS, dtype=torch.float64)
    if reason == "hook":
        linears[1].register_forward_hook(lambda *_: calls.append("hook"))
    elif reason == "dropout":
        linears[0].dropout = 0.5  # type: ignore[assignment]
    elif reason == "learns":
        linears[3].weight.requires_grad_(True)  # type: ignore[union-attr]
    elif reason == "replaced":
        linears[3].forward = lambda x: calls.append("replaced") or x  # type: ignore[method-assign, assignment]
    elif reason == "format":
        linears[3].to(torch.float32)
    else:
        linears = linears[:1]

    def never(*_: object) -> None:
        raise AssertionError("ran in one node")

    monkeypatch.setattr(siblings.JointProduct, "apply", never)
    if reason == "format":
        with pytest.raises(RuntimeError, match="dtype"):
            joint(x, linears)
        return
    assert len(joint(x, linears)) == len(linears)
    assert calls == ([reason] if reason in ("hook", "replaced") else [])
