"""What the patterns of latent attention around our operators share: variants, adapters, contracts, the way of rows.

Legend: T tokens of a rank, H heads, C latent width, R rotated width, J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, VariantSpec
from shardwright.agents.structure.patterns.dsa_way import LayerSizes, faster, told
from shardwright.schemas.cluster import DeviceSpec
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.recipe import LoraSpec, Recipe

OURS = "shardwright"


class LatentAttentionPattern(Pattern):
    """A region from the results of the projections to the input of the output projection."""

    reads_views = True

    @abstractmethod
    def layer_sizes(self, match: Match, tokens: int) -> LayerSizes:
        """What the times of both ways depend on, for rows of so many tokens."""

    def sizes(self, match: Match) -> Sizes:
        """As they are: widths are products of one another."""
        return Sizes({})

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, device_types=("cuda",))
        return (VariantSpec("kernel", OURS, "dsa", kernel), VariantSpec("eager", "eager", "-", anywhere))

    def refuses_adapter(self, spec: VariantSpec, lora: LoraSpec) -> str:
        if spec.provider == OURS and float(lora.dropout):
            return "dropout before an adapter of the up-projection cannot be moved behind the attention"
        return ""

    def way(self, match: Match, spec: VariantSpec, recipe: Recipe, device: DeviceSpec) -> str:
        """Raises: LegalityError: ``indexer-stage-dense`` where the recipe asks for a warm-up that the layer has not."""
        if spec.provider != OURS:
            return ""
        found = self._way(match, recipe, device)
        if match.constants["form"] == "own" and recipe.indexer.scores == "fp8":
            return f"{found}; the indexer scores in fp8, so what it selects is an approximation"
        return found

    def _way(self, match: Match, recipe: Recipe, device: DeviceSpec) -> str:
        form, said, tokens = match.constants["form"], recipe.indexer, recipe.batch.sequence_tokens
        if form == "dense":
            return "rows of any length run dense in a library: the layer has no indexer"
        if said.stage == "dense" and ("sinks" in match.region.inputs or "pool" in match.constants):
            raise LegalityError(
                "indexer-stage-dense",
                f"{match.anchor} attends with sinks, or scores pools of keys: it has no dense warm-up here",
                where="recipe.indexer.stage",
                next_action="use the sparse stage",
            )
        if "sinks" in match.region.inputs:
            return "rows of any length run sparse: libraries of dense attention take no sinks"
        if said.stage == "dense":
            return "rows of any length run dense: the indexers' warm-up attends to all keys, and its loss is over all"
        if form == "own" and float(said.loss):
            return "rows of any length run sparse: the indexer learns from the sparse attention"
        sizes = self.layer_sizes(match, tokens)
        if said.attention == "faster":
            return faster(sizes, tokens, device)
        return told(sizes, tokens, device, recipe.precision.base)


def unfilled(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of a shape and format alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def check_attention(T: int, H: int, C: int, R: int, selected: int, dtype: torch.dtype, scale: float) -> None:
    """Let the attention's contract look at the sizes of its absorbed form; R 0 where nothing is rotated.

    Raises:
        KernelError: what the contract refuses.
    """
    from shardwright.kernels.dsa.attention import contract

    q = {"q_nope": unfilled(T, H, C, dtype=dtype)}
    k = {"latent": unfilled(T, 1, C, dtype=dtype)}
    if R:
        q["q_rope"] = unfilled(T, H, R, dtype=dtype)
        k["k_rope"] = unfilled(T, 1, R, dtype=dtype)
    chosen = unfilled(T, 1, selected, dtype=torch.int32)
    contract.check_static(q, k, chosen, None, None, None, scale=scale, block_size=1)


def check_indexer(T: int, J: int, D: int, selected: int, dtype: torch.dtype, R: int = 0, layout: str = "") -> None:
    """Let the indexer's contract look at its sizes, and at its rotation where it has one.

    Raises:
        KernelError: what the contract refuses.
    """
    from shardwright.kernels.dsa.indexer import contract

    k = unfilled(T, D, dtype=dtype)
    parts = (unfilled(T, J, D, dtype=dtype), k, unfilled(T, J, dtype=dtype))
    contract.check_static(*parts, top_k=selected, query_start=0, scale=1.0)
    if R:
        table = unfilled(T, R // 2, dtype=torch.float32)
        contract.check_rope(k, table, table, layout)
