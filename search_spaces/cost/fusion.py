"""Which provider runs each fusible operator of a plan, and what it costs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.providers import PROVIDERS, provider_cost

HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
"""Module names of norms over one head's width."""

LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Module names of norms over a compressed width."""


@dataclass(frozen=True)
class FusedProviders:
    """Operator → (provider, modules it replaces); everything else runs eager."""

    chosen: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    """Operator → the kernel's own name, where several do its work."""

    @classmethod
    def of(cls, decisions: Sequence[FusionDecision]) -> FusedProviders:
        """Read the accepted decisions that replace something.

        Several regions of one operator add up; where their providers differ, that of the first stands.
        """
        chosen: dict[str, tuple[str, tuple[str, ...]]] = {}
        kernels: dict[str, str] = {}
        for decision in decisions:
            if decision.rejected or decision.provider == "eager":
                continue
            op = operator_of(decision)
            provider, modules = chosen.get(op, (decision.provider, ()))
            chosen[op] = (provider, (*modules, *decision.modules))
            kernels.setdefault(op, decision.op)
        return cls(chosen, kernels)

    def provider(self, op: str) -> str:
        return self.chosen[op][0] if op in self.chosen else "eager"

    def kernel(self, op: str) -> str:
        """The kernel that does an operator's work; empty where none does."""
        return self.kernels.get(op, "")

    def norms(self, layers: int) -> dict[str, float]:
        """The two norms of hidden width in a layer, shared out: ``add_rms_norm``, ``rms_norm``, ``eager``.

        Norms over heads and over what is compressed are not among them.
        """
        added = min(2.0, self._hidden_norms("add_rms_norm") / layers)
        alone = min(2.0 - added, self._hidden_norms("rms_norm") / layers)
        return {"add_rms_norm": added, "rms_norm": alone, "eager": 2.0 - added - alone}

    @cached_property
    def key(self) -> tuple[tuple[str, str, int, str], ...]:
        """(operator, provider, modules, kernel) of all that is fused."""
        found = ((op, provider, len(modules), self.kernel(op)) for op, (provider, modules) in self.chosen.items())
        return tuple(sorted(found))

    @property
    def norms_heads(self) -> bool:
        """Whether the plan's norm also runs over the heads of q and k."""
        modules = self.chosen["rms_norm"][1] if "rms_norm" in self.chosen else ()
        return any(module.endswith(HEAD_NORMS) for module in modules)

    def _hidden_norms(self, op: str) -> int:
        modules = self.chosen[op][1] if op in self.chosen else ()
        return sum(1 for module in modules if not module.endswith((*HEAD_NORMS, *LATENT_NORMS)))

    def cost(self, op: str, shape: dict[str, int], dtype: str) -> OpCost:
        """Work of the chosen provider: its kernel's own cost, or that of eager or compile."""
        provider = self.provider(op)
        if provider in PROVIDERS:
            return provider_cost(op, provider, shape, dtype)
        return kernel_cost(op, shape, dtype)


EXPERT_OPERATORS = ("moe_layer", "grouped_lora_mlp", "packed_experts")
"""Kernels of the experts block: the whole layer at ep 1, received rows otherwise, of a plain or a packed base."""


def operator_of(decision: FusionDecision) -> str:
    """A decision's operator: its op, else its pattern, with underscores; all expert kernels are ``experts``, a
    rotation alone ``rope``, whatever computes it."""
    if decision.op in EXPERT_OPERATORS:
        return "experts"
    if decision.pattern == "rope":
        return "rope"
    return (decision.pattern if decision.op in ("", "-") else decision.op).replace("-", "_")


def kernel_cost(op: str, shape: dict[str, int], dtype: str) -> OpCost:
    """What the fused operator of that name declares for a shape.

    The experts block is priced as its received rows: the whole-layer kernel moves less.
    """
    op = "grouped_lora_mlp" if op == "experts" else op
    module = importlib.import_module(f"shardwright.kernels.{op}.cost")
    cost: OpCost = module.cost(**shape, dtype=dtype)
    return cost
