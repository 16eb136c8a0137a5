"""An approved plan as a live model on this rank: built, sharded, filled, ready for the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from shardwright.runtime.checkpointing import checkpoint_layers, recomputed
from shardwright.runtime.checks.dtypes import require_one_trainable_dtype
from shardwright.runtime.context_fusions import cut_fusions
from shardwright.runtime.context_install import cut_sequences
from shardwright.runtime.device import Device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.hierarchical import Nodes, open_nodes
from shardwright.runtime.experts.packed import packed_experts_of
from shardwright.runtime.experts.placement import slots_of
from shardwright.runtime.experts.shared import put_shared_before_experts, put_shared_under_dispatch
from shardwright.runtime.files import Files, open_files
from shardwright.runtime.fuse import Switch, install_fusions
from shardwright.runtime.load.stream import Progress, load_weights, materialize
from shardwright.runtime.lora.inject import find_experts, inject
from shardwright.runtime.mesh import Ranks
from shardwright.runtime.ownership import Owned, owned_parameters
from shardwright.runtime.parallelize import DTYPES, decoder_layers, shard
from shardwright.runtime.segments import keep_apart
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import LoadFacts


@dataclass(frozen=True)
class Live:
    """The model's side of a run on this rank."""

    model: nn.Module
    files: Files
    parameters: dict[str, Owned]
    meter: LoadMeter
    switches: tuple[Switch, ...]
    load: LoadFacts

    @property
    def adapters(self) -> dict[str, Owned]:
        return {name: owned for name, owned in self.parameters.items() if owned.adapter}


def build(plan: AdaptationPlan, checkpoint: Path, ranks: Ranks, device: Device, progress: Progress | None) -> Live:
    """Meta → fused modules → adapters and local experts → checkpointing → FSDP → weights.

    Uses no collective in which a rank that fails would leave another waiting.

    Raises:
        CheckpointError, LegalityError, CheckFailed: as the parts.
    """
    model, files, meter, switches = build_on(plan, checkpoint, ranks)
    materialize(model, device)
    seed = plan.decision.recipe.seeds.lora
    facts = load_weights(model, checkpoint, files.headers, files.names, device, lora_seed=seed, progress=progress)
    return Live(model, files, owned_parameters(model), meter, switches, facts)


def build_on(
    plan: AdaptationPlan, checkpoint: Path, ranks: Ranks
) -> tuple[nn.Module, Files, LoadMeter, tuple[Switch, ...]]:
    """The wrapped model, still on meta."""
    decision = plan.decision
    recipe, strategy = decision.recipe, decision.strategy
    model, files = open_files(checkpoint, DTYPES[recipe.precision.base])
    meter = LoadMeter()
    inject(
        model,
        decision.lora_targets,
        model_type=files.config.text_model_type,
        ranks=ranks,
        meter=meter,
        dropout=float(recipe.lora.dropout),
        dtype=DTYPES[recipe.precision.adapter],
        packed=packed_experts_of(files.names, stacks_of(model), strategy.base_format),
        chunks=strategy.overlap_chunks,
        nodes=_nodes(plan, ranks),
        slots=slots_of(strategy),
        padding=strategy.expert_padding_tokens,
    )
    require_one_trainable_dtype(decoder_layers(model), model)
    keep_apart(model)
    cut_sequences(model, ranks.place, decision.fusions)
    switches = install_fusions(model, decision.fusions)
    cut_fusions(model, switches, decision.fusions)
    if strategy.overlap == "shared":
        put_shared_under_dispatch(model)
    if strategy.checkpointing != "none":
        put_shared_before_experts(model, decision.fusions)
    checkpoint_layers(recomputed(list(decoder_layers(model).values()), strategy), meter)
    shard(model, strategy, recipe.precision, ranks, decision.cluster.domain_devices)
    return model, files, meter, switches


def stacks_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Experts module → full names of its stacks, before anything is injected."""
    return {
        name: tuple(f"{name}.{stack}" for stack, value in module.named_parameters(recurse=False) if value.dim() == 3)
        for name, module in find_experts(model).items()
    }


def _nodes(plan: AdaptationPlan, ranks: Ranks) -> Nodes | None:
    """How EP groups lie over nodes, where the plan wants two stages.

    Raises:
        LegalityError: ``dispatch-hierarchical`` where no EP group of neighbours crosses nodes evenly.
    """
    if plan.decision.strategy.dispatch != "hierarchical":
        return None
    devices = plan.decision.cluster.domain_devices
    nodes = open_nodes(ranks.world, ranks.rank, ranks.sizes.ep, devices) if ranks.sizes.cp == 1 else None
    if nodes is None:
        raise LegalityError(
            "dispatch-hierarchical",
            f"ep {ranks.sizes.ep} over nodes of {devices} devices, cp {ranks.sizes.cp}: dispatch has one stage",
            where="decision.strategy.dispatch",
            next_action="choose dispatch all_to_all",
        )
    return nodes
