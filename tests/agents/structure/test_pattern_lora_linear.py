"""Adapters beside a linear and beside a grouped product; PEFT's own module among them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.interpret import grouped_product
from shardwright.agents.structure.patterns.lora_linear import LoraLinear
from shardwright.agents.structure.testkit import Example, PatternContract, meta


class Adapted(nn.Module):
    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 96, bias=self.bias)
        self.lora_a, self.lora_b = nn.Linear(64, 8, bias=False), nn.Linear(8, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x)) * 2.0


class Biased(Adapted):
    bias = True


class Unscaled(Adapted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora_b(self.lora_a(x)) + self.base(x)


class Dropped(Adapted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(F.dropout(x, 0.1))) * 2.0


class OtherInput(Adapted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x + 1.0)) * 2.0


class RankUsed(Adapted):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        low = self.lora_a(x)
        return self.base(x) + self.lora_b(low) * 2.0, low.sum()


class NonLinear(Adapted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(torch.tanh(self.lora_a(x))) * 2.0


class Subtracted(Adapted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) - self.lora_b(self.lora_a(x)) * 2.0


class Wide(Adapted):
    """Two full products and a third: a sum of linears, no adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a, self.lora_b = nn.Linear(64, 128, bias=False), nn.Linear(128, 96, bias=False)


class WrittenBetween(Adapted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1.0
        base = self.base(x)
        x.mul_(2.0)
        return base + self.lora_b(self.lora_a(x)) * 2.0


class Grouped(nn.Module):
    """Stacks ``[E, out, in]``; the second product's ends may be its own."""

    shift = 0

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.empty(4, 96, 64))
        self.lora_a, self.lora_b = nn.Parameter(torch.empty(4, 8, 64)), nn.Parameter(torch.empty(4, 96, 8))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        base, a, b = (stack.transpose(-2, -1) for stack in (self.base, self.lora_a, self.lora_b))
        other = offs + self.shift if self.shift else offs
        low = torch._grouped_mm(x, a, offs=other)
        return torch._grouped_mm(x, base, offs=offs) + torch._grouped_mm(low, b, offs=offs) * 0.5


class OtherGroups(Grouped):
    shift = 1


def inside(kind: type[nn.Module]) -> Example:
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = kind()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(x)

    return lambda: (InLayer(), (meta(2, 6, 64),))


def grouped(kind: type[Grouped]) -> Example:
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.holder = nn.Module()
            self.products = kind()

        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            products: torch.Tensor = kind.forward(self.products, x, offs)
            return products

    return lambda: (InLayer(), (meta(24, 64), meta(4, dtype=torch.int32)))


def of_peft() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from peft import LoraConfig, inject_adapter_in_model

    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 96, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.proj(x)
            return result

    wrapped = inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=["proj"]), InLayer())
    return wrapped, (meta(2, 6, 64),)


class TestLoraLinear(PatternContract):
    pattern = LoraLinear()
    positives = {
        "scaled": (inside(Adapted), 1),
        "biased": (inside(Biased), 1),
        "unscaled": (inside(Unscaled), 1),
        "grouped": (grouped(Grouped), 1),
        "peft": (of_peft, 1),
    }
    near_misses = {
        "dropout": inside(Dropped),
        "other-input": inside(OtherInput),
        "rank-used-elsewhere": inside(RankUsed),
        "non-linear": inside(NonLinear),
        "subtracted": inside(Subtracted),
        "wide": inside(Wide),
        "written-between": inside(WrittenBetween),
        "other-groups": grouped(OtherGroups),
    }

    def test_scales_and_roles_are_bound(self) -> None:
        seen = {name: self.found(example)[0][0] for name, (example, _) in self.positives.items()}
        assert {name: m.constants["scale"] for name, m in seen.items()} == {
            "scaled": 2.0,
            "biased": 2.0,
            "unscaled": 1.0,
            "grouped": 0.5,
            "peft": 2.0,
        }
        assert set(seen["biased"].roles) == {"base", "a", "b", "bias"}
        assert seen["peft"].roles["a"] == "lora_A.default.weight"
        assert self.pattern.cost_shape(seen["grouped"], 24) == {"T": 24, "E": 4, "H": 64, "N": 96, "r": 8}


def test_grouped_products_agree_with_the_library() -> None:
    torch.manual_seed(3)
    rows, stack = torch.randn(24, 16, dtype=torch.bfloat16), torch.randn(4, 16, 32, dtype=torch.bfloat16)
    offs = torch.tensor([5, 5, 20, 24], dtype=torch.int32)
    expected = torch._grouped_mm(rows, stack, offs=offs).double()
    assert torch.allclose(grouped_product(rows.double(), stack.double(), offs), expected, rtol=1e-2, atol=5e-2)
    short = grouped_product(rows.double(), stack.double(), offs.clamp(max=20))
    assert torch.equal(short[20:], torch.zeros(4, 32, dtype=torch.float64))
