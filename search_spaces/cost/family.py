"""What the layers of one family compute that other families' do not: activations and residuals of their own.

Kimi K3 (``checkpoints/models/kimi_k3``): its gate is SiTU, and each half of a layer reads a mix of earlier snapshots
and the running sum (attention residuals). A snapshot is what the layer that takes it was given, so it is kept as that
layer's input and no second time.

Legend: T tokens, H hidden, R rows that a layer is given: snapshots and the running sum; b bytes a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import PROVIDERS, provider_cost

COUNTED_TOKENS = 4096
"""Tokens at which bytes are counted: they grow with tokens alone."""

FAMILY_GATES = {"kimi_k3": "situ"}
"""Operator of a gated feed-forward where it is not ``swiglu``."""

SNAPSHOT_LAYERS = {"kimi_k3": 12}
"""Layers from one snapshot to the next, as ``attn_res_block_size`` of the family's config has it."""

Moved = tuple[float, float]
"""Of a forward and a backward."""

NOTHING: tuple[Moved, Moved] = ((0.0, 0.0), (0.0, 0.0))


def has_snapshots(work: Workload) -> bool:
    """Whether layers mix snapshots, so that what a layer is given is not what its first norm reads."""
    return work.profile.model_type in SNAPSHOT_LAYERS


def gate_cost(work: Workload, fused: FusedProviders, tokens: int, width: int) -> OpCost:
    """The gate of a dense feed-forward, ``[tokens, width]``."""
    op = FAMILY_GATES.get(work.profile.model_type, "swiglu")
    if op == "swiglu":
        return fused.cost(op, {"T": tokens, "I": width}, work.dtype)
    chosen = fused.provider("activation")
    return provider_cost(op, chosen if chosen in PROVIDERS else "eager", {"T": tokens, "I": width}, work.dtype)


@lru_cache(maxsize=64)
def eager_gate(model_type: str, dtype: str) -> tuple[Moved, Moved]:
    """(bytes, kernels) of an eager gate, of one value of its result."""
    op = FAMILY_GATES.get(model_type, "swiglu")
    passes = _passes(provider_cost(op, "eager", {"T": COUNTED_TOKENS, "I": 1}, dtype))
    return _mean([passes])


def rows_of_layer(index: int, block: int) -> tuple[int, bool]:
    """(R, whether the layer takes a snapshot): first the embedding, then the sum at every ``block``-th layer."""
    return 1 + -(-index // block), index % block == 0


def rows_at_end(layers: int, block: int) -> int:
    """R that the mix before the last norm reads."""
    return rows_of_layer(layers, block)[0]


def residual_moves(work: Workload, layer: LayerWork, fused: FusedProviders) -> tuple[Moved, Moved]:
    """(bytes a token, kernels) of a layer's attention residuals, mean over its kind; nothing in other families."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    if block is None:
        return NOTHING
    given = tuple(rows_of_layer(index, block) for index in layer.kind.layer_indices)
    return _residuals(given, _provider(fused), work.hidden, work.dtype)


def last_mix_moves(work: Workload, fused: FusedProviders) -> tuple[Moved, Moved]:
    """The same of the mix before the last norm."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    if block is None:
        return NOTHING
    rows = rows_at_end(work.profile.shape.num_layers, block)
    return _mean(
        [_passes(provider_cost("attention_residual", _provider(fused), _sizes(rows, work.hidden), work.dtype))]
    )


def _provider(fused: FusedProviders) -> str:
    chosen = fused.provider("attention_residual")
    return chosen if chosen in PROVIDERS else "eager"


def _sizes(rows: int, hidden: int) -> dict[str, int]:
    return {"T": COUNTED_TOKENS, "R": rows, "H": hidden}


def _passes(cost: OpCost) -> tuple[PassCost, PassCost]:
    return cost.forward, cost.backward or cost.forward


@lru_cache(maxsize=256)
def _residuals(given: tuple[tuple[int, bool], ...], provider: str, hidden: int, dtype: str) -> tuple[Moved, Moved]:
    layers = []
    for rows, snapshot in given:
        parts = [
            provider_cost("residual_rows", "eager", {**_sizes(rows, hidden), "S": int(snapshot)}, dtype),
            provider_cost("attention_residual", provider, _sizes(rows, hidden), dtype),
            provider_cost("attention_residual", provider, _sizes(rows + snapshot, hidden), dtype),
        ]
        layers.append(tuple(_sum(column) for column in zip(*map(_passes, parts), strict=True)))
    return _mean(layers)


def _sum(passes: Iterable[PassCost]) -> PassCost:
    found = list(passes)
    return found[0].model_copy(
        update={
            name: sum(getattr(one, name) for one in found) for name in ("bytes_read", "bytes_written", "launches")
        }
    )  # fmt: skip


def _mean(layers: list[tuple[PassCost, ...]]) -> tuple[Moved, Moved]:
    """((bytes a token forward, backward), (kernels forward, backward))."""
    columns = list(zip(*layers, strict=True))
    whole = [sum(one.bytes_read + one.bytes_written for one in found) / len(found) for found in columns]
    moved = [size / COUNTED_TOKENS for size in whole]
    kernels = [sum(one.launches for one in found) / len(found) for found in columns]
    return (moved[0], moved[1]), (kernels[0], kernels[1])
