"""Installs sparse latent attention with our operators; projections and norms stay (``fused_dsa_layer``).

Rows are flattened into one packed sequence: documents begin where positions are 0, and at every row. The operators keep
documents apart by these borders, so the family's mask is not read; that it says the same is checked on the first call
of each size. Rows that are cut over ranks have no mask, and run as ``context_dsa`` says.
Legend: B rows, S tokens a row, K selected keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardwright.runtime.context_dsa import for_rows
from shardwright.runtime.fused_dsa_borders import Borders
from shardwright.runtime.fused_dsa_layer import DenseLatentAttention, SparseAttention
from shardwright.runtime.fused_dsa_parts import NOT_ROTATED
from shardwright.runtime.fused_dsa_pooled import PooledSparseAttention
from shardwright.schemas.fusion import FusionDecision

CACHES = ("cache", "past_key_values")
"""Arguments with which a family hands over its cache: decoding runs the module's own forward."""
BY_MASK = "mask"
"""Constant ``call`` of a module that is called with (hidden states, mask) and returns its output alone."""
PADDED = 2
"""Dimensions of a mask that hides padding: what is padded runs the module's own forward."""


def fused_dsa(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Any]:
    """The forward of a sparse attention that returns (output [B, S, hidden], ``None``[, indices [B, S, K]]).

    One that pools keys returns three values, the last ``None`` where no later layer takes its choice. One that its
    model calls with a mask alone returns the output alone.

    Raises:
        LegalityError: ``fusion-dsa`` where the plan does not name every part, or the module lacks one.
    """
    layer = kind_of(decision).of(module, name, decision)
    make = _by_mask if decision.constants.get("call") == BY_MASK else _by_positions
    forward = make(module, name, layer)
    forward.layer = layer  # type: ignore[attr-defined]
    return forward


def kind_of(decision: FusionDecision) -> type[SparseAttention]:
    """What a decision installs."""
    if decision.constants.get("form") == "dense":
        return DenseLatentAttention
    return PooledSparseAttention if "pool" in decision.constants else SparseAttention


@dataclass
class _MaskCheck:
    """Compares a family's mask with the documents on the first call of each size."""

    name: str
    seen: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, borders: Borders, mask: Tensor | None) -> None:
        size = (borders.B, borders.S)
        if borders.cut is None and type(mask) is Tensor and not mask.is_meta and size not in self.seen:
            borders.require(mask, self.name)
            self.seen.add(size)


def _by_positions(module: nn.Module, name: str, layer: SparseAttention) -> Callable[..., Any]:
    original: Callable[..., Any] = module.forward
    check = _MaskCheck(name)
    three = layer.hands_on or isinstance(layer, PooledSparseAttention)

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
        check(borders, attention_mask)
        y, indices = for_rows(layer, borders)(hidden_states, position_embeddings, borders, prev_topk_indices)
        return (y, None, indices) if three else (y, None)

    return forward


def _by_mask(module: nn.Module, name: str, layer: SparseAttention) -> Callable[..., Any]:
    original: Callable[..., Any] = module.forward
    check = _MaskCheck(name)

    def forward(x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None and attention_mask.dim() == PADDED:
            own: Tensor = original(x, attention_mask)
            return own
        borders = Borders.of_mask(x, attention_mask)
        check(borders, attention_mask)
        y, _ = for_rows(layer, borders)(x, None, borders, None)
        return y

    return forward
