"""Which ways the sparse attentions of a live model ran, for its record."""

from __future__ import annotations

from torch import nn

from shardwright.runtime.fused_dsa_layer import WAYS
from shardwright.runtime.fused_dsa_loss import fused_layers
from shardwright.schemas.run import WayTaken


def ways_taken(model: nn.Module) -> tuple[WayTaken, ...]:
    """One entry for each length of rows and way that ran so far, its modules in the model's order."""
    found: dict[tuple[int, str, str, str], list[str]] = {}
    for layer in fused_layers(model):
        for tokens, choice in layer.module.__dict__.get(WAYS, {}).items():
            found.setdefault((tokens, choice.path, choice.reason, layer.planned), []).append(layer.name)
    return tuple(
        WayTaken(op="dsa", path=path, row_tokens=tokens, modules=tuple(names), reason=reason, planned=planned)
        for (tokens, path, reason, planned), names in sorted(found.items())
    )
