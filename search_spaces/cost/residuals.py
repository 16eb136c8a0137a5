"""What a layer moves around its two halves where a residual stream is more than one row.

Kimi K3 (``checkpoints/models/kimi_k3``): each half reads a mix of earlier snapshots and the running sum (attention
residuals). A snapshot is what the layer that takes it was given, so it is kept as that layer's input and not again.
Hyper-connections: each half reads a weighted sum of N streams and is added to all of them, which are mixed with each
other on the way.

Legend: T tokens, H hidden, R rows that a layer is given: snapshots and the running sum; N streams; b bytes a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.cost.family import COUNTED_TOKENS, Moved
from shardwright.search_spaces.cost.fusion import FusedProviders, kernel_cost
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import PROVIDERS, provider_cost

SNAPSHOT_LAYERS = {"kimi_k3": 12}
"""Layers from one snapshot to the next, as ``attn_res_block_size`` of the family's config has it."""

OPERATOR, WEIGHTS = "attention_residual", "hyper_connection"

CONNECTION_MOVES = {
    "deepseek_v4": ((28.0, 68.5), (145.0, 309.0)),
    "glm5_next": ((28.0, 68.5), (145.0, 309.0)),
    "hy_v4": ((32.6, 64.5), (25.0, 33.0)),
    "qwen4_exp": ((33.7, 72.9), (23.0, 33.0)),
}
"""Of one hyper-connection and the sum behind it, frozen: streams of ``b·H`` bytes read or written for each of N, and
kernels, (forward, backward), of the families' own code (``tests/search_spaces/test_connections.py``). Twenty Sinkhorn
steps over N × N numbers a token are most of the kernels and little of the bytes."""
SINKHORN_STEPS = {"deepseek_v4": 20, "glm5_next": 20}
"""``hc_sinkhorn_iters`` of the families whose connection has a module that a plan may have compiled."""
MOST_MOVES = ((33.7, 72.9), (145.0, 309.0))
"""Of a family that is not among them."""


@dataclass(frozen=True)
class RowMoves:
    """Of a layer's mixes and sums, (forward, backward) each; all zero where the residual stream is one row."""

    chains: Moved = (0.0, 0.0)
    """Bytes a token by torch's own operators."""
    operator: Moved = (0.0, 0.0)
    """Bytes a token by an operator of ours, or compiled where torch's own are left beside it."""
    kernels: Moved = (0.0, 0.0)

    @property
    def bytes(self) -> Moved:
        """By whichever."""
        return self.chains[0] + self.operator[0], self.chains[1] + self.operator[1]


def has_snapshots(work: Workload) -> bool:
    """Whether layers mix snapshots, so that what a layer is given is not what its first norm reads."""
    return work.profile.model_type in SNAPSHOT_LAYERS


def has_rows(work: Workload) -> bool:
    """Whether a layer's residual stream is more than one row, so that its halves read mixes and not the stream."""
    return has_snapshots(work) or work.profile.shape.residual_streams > 1


def rows_of_layer(index: int, block: int) -> tuple[int, bool]:
    """(R, whether the layer takes a snapshot): first the embedding, then the sum at every ``block``-th layer."""
    return 1 + -(-index // block), index % block == 0


def rows_at_end(layers: int, block: int) -> int:
    """R that the mix before the last norm reads."""
    return rows_of_layer(layers, block)[0]


def provider_of_mixes(fused: FusedProviders) -> str:
    """``eager``, ``compile`` or ``shardwright``: what runs the mixes of a plan."""
    return fused.provider(OPERATOR)


def residual_moves(work: Workload, layer: LayerWork, fused: FusedProviders) -> RowMoves:
    """Of a layer's attention residuals, mean over its kind, or of its two hyper-connections."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    if block is None:
        return _connections(work, fused)
    given = tuple(rows_of_layer(index, block) for index in layer.kind.layer_indices)
    return _of_layers(given, provider_of_mixes(fused), work.hidden, work.dtype)


def last_mix_moves(work: Workload, fused: FusedProviders) -> RowMoves:
    """The same of the mix of snapshots before the last norm."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    if block is None:
        return RowMoves()
    provider = provider_of_mixes(fused)
    cost = _mix(provider, rows_at_end(work.profile.shape.num_layers, block), work.hidden, work.dtype)
    return _moves([([], [cost])] if provider == "shardwright" else [([cost], [])])


def _connections(work: Workload, fused: FusedProviders) -> RowMoves:
    """Two a layer; where their weights are compiled, what stands around them stays torch's own."""
    streams, family = work.profile.shape.residual_streams, work.profile.model_type
    if streams == 1:
        return RowMoves()
    moved, kernels = CONNECTION_MOVES.get(family, MOST_MOVES)
    width = 2 * work.base_bytes * work.hidden * streams
    whole = RowMoves(chains=(width * moved[0], width * moved[1]), kernels=(2 * kernels[0], 2 * kernels[1]))
    provider, steps = fused.provider(WEIGHTS), SINKHORN_STEPS.get(family)
    if provider == "eager" or steps is None:
        return whole
    sizes = {"T": COUNTED_TOKENS, "N": streams, "H": work.hidden, "S": steps}
    spelled, ours = (_moves([([provider_cost(WEIGHTS, one, sizes, work.dtype)], [])]) for one in ("eager", provider))
    left = [2 * part for part in spelled.chains], [2 * part for part in spelled.kernels]
    return RowMoves(
        chains=(whole.chains[0] - left[0][0], whole.chains[1] - left[0][1]),
        operator=(2 * ours.chains[0], 2 * ours.chains[1]),
        kernels=(
            whole.kernels[0] - left[1][0] + 2 * ours.kernels[0],
            whole.kernels[1] - left[1][1] + 2 * ours.kernels[1],
        ),
    )


def _mix(provider: str, rows: int, hidden: int, dtype: str) -> OpCost:
    sizes = {"T": COUNTED_TOKENS, "R": rows, "H": hidden}
    if provider in PROVIDERS:
        return provider_cost(OPERATOR, provider, sizes, dtype)
    return kernel_cost(OPERATOR, sizes, dtype)


@lru_cache(maxsize=256)
def _of_layers(given: tuple[tuple[int, bool], ...], provider: str, hidden: int, dtype: str) -> RowMoves:
    """Rows are put side by side for torch's own operators; ours reads each where it lies."""
    layers = []
    for rows, snapshot in given:
        ours = provider == "shardwright"
        sizes = {"T": COUNTED_TOKENS, "R": rows, "H": hidden, "S": int(snapshot), "apart": int(ours)}
        sums = provider_cost("residual_rows", "eager", sizes, dtype)
        mixes = [_mix(provider, count, hidden, dtype) for count in (rows, rows + snapshot)]
        layers.append(([sums], mixes) if ours else ([sums, *mixes], []))
    return _moves(layers)


def _moves(layers: list[tuple[list[OpCost], list[OpCost]]]) -> RowMoves:
    """Mean over layers, each with what torch's operators and what ours do."""

    def bytes_of(costs: Iterable[OpCost]) -> tuple[float, float]:
        moved = [tuple(one.bytes_read + one.bytes_written for one in _passes(cost)) for cost in costs]
        return sum(one[0] for one in moved) / COUNTED_TOKENS, sum(one[1] for one in moved) / COUNTED_TOKENS

    def launches_of(costs: Iterable[OpCost]) -> tuple[float, float]:
        found = [tuple(one.launches for one in _passes(cost)) for cost in costs]
        return sum(one[0] for one in found), sum(one[1] for one in found)

    def mean(pairs: list[tuple[float, float]]) -> Moved:
        return sum(one[0] for one in pairs) / len(pairs), sum(one[1] for one in pairs) / len(pairs)

    return RowMoves(
        chains=mean([bytes_of(torchs) for torchs, _ in layers]),
        operator=mean([bytes_of(ours) for _, ours in layers]),
        kernels=mean([launches_of([*torchs, *ours]) for torchs, ours in layers]),
    )


def _passes(cost: OpCost) -> tuple[PassCost, PassCost]:
    return cost.forward, cost.backward or cost.forward
