"""A block's shared expert before its fused experts: the same values, once a call, whatever the block's own order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.shared import SharedBeforeExperts, put_shared_before_experts
from shardwright.schemas.fusion import FusionDecision

WIDTH = 6


class Experts(nn.Module):
    """Stands for fused experts, which do what is to be done meanwhile before their own work."""

    def __init__(self, order: list[str], fused: bool) -> None:
        super().__init__()
        self.meanwhile: Any = None
        self.order, self.fused = order, fused
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and self.meanwhile is not None:
            self.meanwhile()
        self.order.append("experts")
        return x * self.scale


class Shared(nn.Module):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.order.append("shared")
        return torch.sigmoid(self.linear(x))


class Block(nn.Module):
    """Calls its shared expert behind the experts, or before them, and on its own tokens or on others."""

    def __init__(self, order: list[str], how: str) -> None:
        super().__init__()
        self.how = how
        self.experts, self.shared_experts = Experts(order, how != "unfused"), Shared(order)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "before":
            return self.shared_experts(x) + self.experts(x)
        out = self.experts(x.view(-1, WIDTH)).view(x.shape)
        return out + self.shared_experts(2 * x if self.how == "others" else x)


ORDERS = {
    "behind": ["shared", "experts"],
    "before": ["shared", "experts"],
    "unfused": ["experts", "shared"],
    "others": ["shared", "experts", "shared"],
}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("how", list(ORDERS))
def test_values_and_gradients_are_the_blocks_own(how: str, recomputed: bool) -> None:
    torch.manual_seed(0)
    order: list[str] = []
    block = Block(order, how)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    leaves = [x, *block.parameters()]
    wanted = block(x)
    first = torch.autograd.grad(wanted.square().sum(), leaves)
    made = SharedBeforeExperts(block, block.experts, block.shared_experts, "block")  # type: ignore[arg-type]
    order.clear()
    found = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
    assert order == ORDERS[how]
    second = torch.autograd.grad(found.square().sum(), leaves)
    assert torch.equal(found, wanted)
    for a, b in zip(second, first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert made.value is None and made.tokens is None, "a value outlives its call"


class Layer(nn.Module):
    """A block of the runtime's own experts, with shared ones or without."""

    def __init__(self, name: str, shared: bool) -> None:
        super().__init__()
        self.experts = LoraExperts.__new__(LoraExperts)
        nn.Module.__init__(self.experts)
        self.experts.name, self.experts.meanwhile = name, None
        if shared:
            self.shared_experts = Shared([])


def test_blocks_whose_experts_are_one_operator_are_found() -> None:
    names = [f"{place}.experts" for place in range(3)]
    model = nn.Sequential(*(Layer(name, shared) for name, shared in zip(names, (False, True, True), strict=True)))

    def decision(*modules: str, **more: Any) -> FusionDecision:
        fields: dict[str, Any] = {"proposal_id": "experts.1", "pattern": "experts", "variant": "kernel"}
        fields |= {"provider": "shardwright", "op": "moe_layer", "modules": modules, "roles": {}, "constants": {}}
        return FusionDecision(**{**fields, "tolerance": "0.02", **more})

    assert put_shared_before_experts(model, ()) == 0
    assert put_shared_before_experts(model, (decision(*names, op="grouped_lora_mlp"),)) == 0
    assert put_shared_before_experts(model, (decision(*names, rejected=True),)) == 0
    assert put_shared_before_experts(model, (decision(names[0]),)) == 0, "it has no shared expert"
    assert put_shared_before_experts(model, (decision(names[1]),)) == 1
    assert put_shared_before_experts(model, (decision(*names),)) == 1, (
        "the first of the two has its shared expert before"
    )
