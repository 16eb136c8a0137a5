"""Rank 0 of a world that does not exist: FSDP2 on a fake process group over fake tensors, its memory by kind.

No device, no weights, no other rank: the model is built, adapted and sharded as a run does it, one micro-batch goes
forward and backward, and FSDP2's own tracker says what rank 0 held at its fullest. Routing is even (there are no
values to route by), so what this checks of a cost model are the static and the gathered bytes, not the imbalance.
Where the plan cuts sequences over ranks, rank 0 runs its own pieces of rows of one document, as a run does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor

from shardwright.checkpoints.build import build_on_meta
from shardwright.runtime import context_pieces
from shardwright.runtime.batch import MicroBatch, as_batch
from shardwright.runtime.checkpointing import checkpoint_layers, recomputed
from shardwright.runtime.context import CONTEXT, Cut, Place, cut_batch, cutting
from shardwright.runtime.context_install import cut_sequences
from shardwright.runtime.device import Device
from shardwright.runtime.experts import module as expert_module
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.dispatch import Route
from shardwright.runtime.experts.packed import Packing, packed_experts_of
from shardwright.runtime.experts.rows import TORCH, Moves, Rows
from shardwright.runtime.files import open_files
from shardwright.runtime.lora.inject import inject
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.parallelize import DTYPES, decoder_layers, shard
from shardwright.runtime.session import stacks_of
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy

SHARDED, UNSHARDED, GATHERS, TOTAL = "Sharded Param", "Unsharded Param", "All Gather", "Total"
"""Kinds as FSDP2's tracker calls them."""
WHOLE = "Whole Param"
"""What a rank keeps outside FSDP, which the tracker does not see."""


@dataclass(frozen=True)
class Simulated:
    """Bytes of rank 0 at its fullest, as FSDP2's tracker names them, and ``WHOLE``."""

    by_kind: dict[str, int]
    """At the fullest moment of all; kinds that held nothing are left out."""
    total: int
    """Bytes of all kinds at that moment."""
    gathered: int
    """Most of unsharded parameters and all-gather buffers at any module's begin or end."""

    @property
    def sharded(self) -> int:
        """Base and adapters that the rank keeps."""
        return self.by_kind.get(SHARDED, 0) + self.by_kind.get(WHOLE, 0)


def simulate(
    checkpoint: Path,
    recipe: Recipe,
    strategy: ParallelStrategy,
    targets: tuple[LoraTarget, ...],
    *,
    layers: int | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> Simulated:
    """One micro-batch of rank 0 of ``strategy.mesh.world_size`` ranks.

    Args:
        checkpoint: its config.json is read, and its headers where the plan keeps experts packed.
        layers: keep only the first so many layers (targets beyond them are left out).
        prepare: changes the adapted model before it is checkpointed and sharded: operators that know fake tensors.

    Raises:
        ClusterError: ``process-group`` where this process belongs to a real one.
        LegalityError: ``context-length``, ``context-layer``, ``context-attention`` where rows cannot be cut as planned.
    """
    if dist.is_initialized():
        raise ClusterError(
            "process-group",
            "this process is already in a process group",
            where="simulate",
            next_action="simulate in a process of its own",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = strategy.mesh.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        ranks = open_mesh(strategy.mesh, Device("cpu", torch.device("cpu"), "fake"))
        model = _sharded(checkpoint, recipe, strategy, targets, ranks, layers, prepare)
        return _tracked(model, *_rows(recipe, strategy, ranks.place))
    finally:
        dist.destroy_process_group()


def _sharded(
    checkpoint: Path,
    recipe: Recipe,
    strategy: ParallelStrategy,
    targets: tuple[LoraTarget, ...],
    ranks: Ranks,
    layers: int | None,
    prepare: Callable[[nn.Module], None] | None,
) -> nn.Module:
    model, packed = _on_meta(checkpoint, DTYPES[recipe.precision.base], strategy.base_format)
    if layers is not None:
        for name, _ in list(decoder_layers(model).items())[layers:][::-1]:
            parent, _, index = name.rpartition(".")
            del model.get_submodule(parent)[int(index)]  # type: ignore[operator]
    present = dict(model.named_parameters())
    chosen = tuple(target for target in targets if target.parameter in present)
    meter = LoadMeter()
    family = str(model.config.model_type)  # type: ignore[union-attr]
    adapter = DTYPES[recipe.precision.adapter]
    inject(model, chosen, model_type=family, ranks=ranks, meter=meter, dropout=0.0, dtype=adapter, packed=packed)
    cut_sequences(model, ranks.place, ())
    if prepare is not None:
        prepare(model)
    checkpoint_layers(recomputed(list(decoder_layers(model).values()), strategy), meter)
    shard(model, strategy, recipe.precision, ranks)
    return model


def _on_meta(checkpoint: Path, dtype: torch.dtype, base_format: str) -> tuple[nn.Module, dict[str, Packing]]:
    """The model, and its experts modules that stay packed."""
    if base_format == "compute":
        return build_on_meta(checkpoint, dtype), {}
    model, files = open_files(checkpoint, dtype)
    return model, packed_experts_of(files.names, stacks_of(model), base_format)


def _rows(recipe: Recipe, strategy: ParallelStrategy, place: Place | None) -> tuple[Tensor | MicroBatch, Cut | None]:
    """A micro-batch of rank 0, and how it is cut: made of values, for where documents begin is read on the host."""
    ids = torch.zeros((strategy.micro_batch_sequences, recipe.batch.sequence_tokens), dtype=torch.int64)
    return (ids, None) if place is None else cut_batch(as_batch(ids), place)


def _tracked(model: nn.Module, rows: Tensor | MicroBatch, cut: Cut | None) -> Simulated:
    if cut is not None:
        delattr(model, CONTEXT)  # these rows are cut already
    with FakeTensorMode(allow_non_fake_inputs=True), even_routing():
        model.to_empty(device="cpu")
        tracker = FSDPMemTracker(model)
        tracker.track_inputs((rows if isinstance(rows, Tensor) else rows.ids,))
        with tracker, cutting(cut), _standing_in(context_pieces, "causal_lower_right", _no_bias):
            summed_loss(model, rows).backward()
        peak = _kinds(tracker.get_tracker_snapshot("peak"))
        total = peak.pop(TOTAL)
    plain = sum(one.nbytes for one in model.parameters() if not isinstance(one, DTensor))
    if plain:
        peak[WHOLE] = plain
    seen = [
        _kinds(one)
        for stats in tracker.memory_tracking.values()
        for snapshots in stats.snapshots.values()
        for one in snapshots
    ]
    return Simulated(peak, total + plain, max((one.get(UNSHARDED, 0) + one.get(GATHERS, 0) for one in seen), default=0))


def _kinds(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    found = snapshot.get(torch.device("cpu"), {})
    return {str(getattr(kind, "value", kind)): int(size) for kind, size in found.items() if size}


@contextmanager
def even_routing() -> Iterator[None]:
    """Every expert gets as many rows as any other: fake tensors hold no values to choose by."""
    with _standing_in(expert_module, "plan_route", _even_route):
        yield


@contextmanager
def _standing_in(home: Any, name: str, other: Any) -> Iterator[None]:
    before = getattr(home, name)
    setattr(home, name, other)
    try:
        yield
    finally:
        setattr(home, name, before)


def _no_bias(queries: int, keys: int) -> None:
    """In place of the causal bias of a piece, which is no fake tensor: what attention holds does not depend on it."""


def _even_route(top_k_index: Tensor, num_experts: int, ep: int, group: Any, by: Rows = TORCH) -> Route:
    flat = top_k_index.reshape(-1)
    order, total, local = torch.argsort(flat, stable=True), flat.numel(), num_experts // ep
    leaves = Moves(order.view(top_k_index.shape), order)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    sizes = [total * (i + 1) // local - total * i // local for i in range(local)]
    if ep == 1:
        return Route(leaves, counts, [], [], None, sizes, counts)
    parts = [total * (i + 1) // ep - total * i // ep for i in range(ep)]
    groups = Moves(order.unsqueeze(1), order) if local > 1 else None
    return Route(leaves, counts, parts, parts, groups, sizes, counts[:local])
