"""Installs sparse latent attention with our operators; projections and norms stay (``fused_dsa_layer``).

Rows are flattened into one packed sequence: documents begin where positions are 0, and at every row. The operators keep
documents apart by these borders, so the family's mask is not read; that it says the same is checked on the first call
of each size.
Legend: B rows, S tokens a row, K selected keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwright.runtime.fused_dsa_borders import Borders
from shardwright.runtime.fused_dsa_layer import NOT_ROTATED, SparseAttention
from shardwright.schemas.fusion import FusionDecision

CACHES = ("cache", "past_key_values")
"""Arguments with which a family hands over its cache: decoding runs the module's own forward."""


def fused_dsa(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Any]:
    """The forward of a sparse attention that returns (output [B, S, hidden], ``None``[, indices [B, S, K]]).

    Raises:
        LegalityError: ``fusion-dsa`` where the plan does not name every part, or the module lacks one.
    """
    layer = SparseAttention.of(module, name, decision)
    original: Callable[..., Any] = module.forward
    checked: set[tuple[int, int]] = set()

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        unrotated = position_embeddings is None and layer.layout != NOT_ROTATED
        if unrotated or any(kwargs.get(key) is not None for key in CACHES):
            handed = {} if prev_topk_indices is None else {"prev_topk_indices": prev_topk_indices}
            found: tuple[Any, ...] = original(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **handed,
                **kwargs,
            )
            return found
        borders = Borders.of(hidden_states, position_ids)
        readable = type(attention_mask) is Tensor and not attention_mask.is_meta
        if attention_mask is not None and readable and (borders.B, borders.S) not in checked:
            borders.require(attention_mask, name)
            checked.add((borders.B, borders.S))
        y, indices = layer(hidden_states, position_embeddings, borders, prev_topk_indices)
        return (y, None, indices) if layer.hands_on else (y, None)

    forward.layer = layer  # type: ignore[attr-defined]
    return forward
