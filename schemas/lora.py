"""Resolved LoRA targets: what a plan adapts, with the true rank and layout of each."""

from __future__ import annotations

from typing import Literal

from shardwright.schemas.base import CountInt, DecimalText, Identifier, Model, PositiveInt, added


class LoraTarget(Model):
    """One adapted weight of one layer.

    A dense target adapts ``W [out, in]``. An expert target adapts a stack of ``num_experts`` weights:
    A is ``[E, r, in]``, B is ``[E, out, r]``; one pair ``[r, in]``, ``[out, r]`` where all experts share it.
    """

    parameter: Identifier
    """Fully qualified name in the model, for example ``model.layers.0.mlp.experts.gate_up_proj``."""
    role: Literal["attention", "experts", "shared_experts", "dense_mlp", "head", "router", "other"]
    kind: Literal["dense", "experts"]
    layout: Literal["out_in", "in_out"] = "out_in"
    """Order of the last two dims of the stored weight."""
    in_features: PositiveInt
    out_features: PositiveInt
    num_experts: CountInt = 0
    """0 for dense targets."""
    shared: bool = added(False)
    """All experts of the stack have the same pair."""
    rank: PositiveInt
    alpha: DecimalText
    scaling: DecimalText
    """alpha / rank, or alpha / √rank with rsLoRA, as decimal text."""

    @property
    def adapter_parameters(self) -> int:
        """r · (in + out), times E for expert stacks with a pair for each expert."""
        return self.rank * (self.in_features + self.out_features) * self.pairs

    @property
    def pairs(self) -> int:
        """How many pairs (A, B) are trained."""
        return 1 if self.shared else max(self.num_experts, 1)

    @property
    def module(self) -> str:
        """The owning module: the linear for ``….weight``, else the module that holds the stack."""
        return self.parameter.rsplit(".", 1)[0]
