"""Attention of cut sequences over chosen keys, where the family's own code runs: indexers score the keys of all ranks.

An indexer of the library takes earlier keys from a cache: here one that hands out the keys of all ranks, and a mask of
what a rank's queries may see of the whole row. So the family's own code scores and chooses, out of as many keys as in
whole rows, and what it returns are places in the row. The library's attention hands them to ours
(``context_attention``); the latents of all tokens are gathered, and keys that were not chosen are masked
(``context_pieces``). Scores of all keys exist at once for a rank's queries, as in the family for all queries.

Legend: B rows, T tokens of a rank, S of a sequence, D indexer width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.runtime.context import Place, active, gather_tokens
from shardwright.runtime.context_attention import EXPANDS
from shardwright.runtime.context_pieces import seen_keys
from shardwright.schemas.errors import LegalityError

GIVEN = ("hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids")
"""What an indexer that can be cut is called with, before its cache."""


@dataclass(frozen=True)
class _AllKeys:
    """Stands for an indexer's cache: the keys that it holds are those of all ranks."""

    place: Place

    def update_indexer(self, own: Tensor, layer: int) -> Tensor:
        """[B, T, D] → [B, S, D]. A collective; has no gradient, as the choice has none."""
        return gather_tokens(own.unsqueeze(1), self.place).squeeze(1)


def cut_choices(model: nn.Module) -> None:
    """Make the library's attentions that choose keys, and their indexers, run on cut rows.

    Raises:
        LegalityError: ``context-layer`` for an indexer that is called in another way.
    """
    for name, module in model.named_modules():
        family: Any = module
        if type(module).__name__.endswith("Indexer"):
            _require_known(module, name)
            family.forward = _over_all_keys(family.forward)
        elif hasattr(module, EXPANDS) and hasattr(module, "indexer"):
            family.forward = _without_a_mask(family.forward)


def _require_known(indexer: nn.Module, name: str) -> None:
    arguments = tuple(inspect.signature(inspect.unwrap(type(indexer).forward)).parameters)[1:]
    if arguments[:-1] != GIVEN:
        raise LegalityError(
            "context-layer",
            f"{type(indexer).__name__} chooses keys of whole rows, called with {', '.join(arguments)}",
            where=name,
            next_action="choose cp 1 for this family",
        )


def _over_all_keys(choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor,
        *args: Any,
        **cache: Any,
    ) -> Tensor:
        cut = active()
        given = (hidden_states, q_resid, position_embeddings)
        if cut is None:
            return choose(*given, attention_mask, *args, **cache)
        return choose(*given, seen_keys(cut), *args, **dict.fromkeys(cache, _AllKeys(cut.place)))

    return forward


def _without_a_mask(attend: Callable[..., Any]) -> Callable[..., Any]:
    """An attention that cuts its mask for the indexer: on cut rows there is none, and nothing reads what stands in."""

    def forward(hidden_states: Tensor, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if active() is not None and attention_mask is None:
            attention_mask = hidden_states.new_empty((0, 1, 0, 0))
        return attend(hidden_states, *args, attention_mask=attention_mask, **kwargs)

    return forward
