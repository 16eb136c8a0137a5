"""Many families on one mesh: ``families.py JOBS.json`` holds (name, plan, checkpoint) triples.

Eight sequences, one a micro-batch, so that one, two and four ranks accumulate differently. Loss, gradient norm and the
gradient of every adapter against plain transformers with plain LoRA in one process, fp32.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwright.runtime.checkpointing import CheckpointedForward
from shardwright.runtime.checks.step import replicas_agree
from shardwright.runtime.device import open_device
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.packed import SCALES, VALUES, packed_names
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.lora.inject import adapter_names
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import as_saved, by_place, local_values, sum_copies
from shardwright.runtime.parallelize import decoder_layers
from shardwright.runtime.reference import add_plain_lora, load_plain
from shardwright.runtime.session import Live, build
from shardwright.schemas.plan import AdaptationPlan, load_plan

SEQUENCES, TOKENS = 8, 7
IDS = torch.randint(3, 6, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(5))
IDS[:4] = 3
"""Few different tokens: some experts get most rows and some get none."""
COUNTED = SEQUENCES * (TOKENS - 1)
REFERENCES: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}


def values_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random adapters: B is not zero, so A has a gradient too."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * 0.2


def reference(name: str, plan: AdaptationPlan, folder: Path, shapes: dict[str, Any]) -> tuple[float, Any]:
    if name not in REFERENCES:
        model, files = load_plain(folder, torch.float32, torch.device("cpu"))
        whole = {adapter: values_of(adapter, shape) for adapter, shape in shapes.items()}
        leaves = add_plain_lora(model, plan.decision.lora_targets, whole, files.config.text_model_type)
        loss = sum(summed_loss(model, row) for row in IDS.split(1)) / COUNTED
        loss.backward()
        found = {adapter: leaf.grad for adapter, leaf in leaves.items()}
        REFERENCES[name] = float(loss.detach()), found
    return REFERENCES[name]


def as_planned(model: torch.nn.Module, plan: AdaptationPlan) -> None:
    """Recomputed layers, gathers ahead and groups after forward are those that the plan names."""
    strategy = plan.decision.strategy
    layers = list(decoder_layers(model).values())
    wrapped = tuple(place for place, layer in enumerate(layers) if isinstance(layer.forward, CheckpointedForward))
    planned = {"none": (), "full": tuple(range(len(layers))), "layers": strategy.checkpointed_layers}
    assert wrapped == planned[strategy.checkpointing], wrapped
    first: Any = layers[0]
    if not isinstance(first, FSDPModule):
        return
    state: Any = first._get_fsdp_state()
    units = [sum(isinstance(module, FSDPModule) for module in layer.modules()) for layer in layers]
    ahead = sum(units[1 : 1 + strategy.prefetch_depth]) if strategy.prefetch_depth > 1 else 0
    assert len(state._states_to_forward_prefetch) == ahead, (ahead, len(state._states_to_forward_prefetch))
    after = state._fsdp_param_group.post_forward_mesh_info
    if strategy.reshard_scope == "node":
        assert after.shard_mesh_size == plan.decision.cluster.devices_per_node
    else:
        assert after is None or after.shard_mesh_size == strategy.mesh.shard * strategy.mesh.ep


def kept_packed(live: Live, plan: AdaptationPlan, ranks: Ranks) -> str:
    """Packed stacks are the files' bytes, each once in a replica, and FSDP gathers them in the formats they have."""
    stacks = [
        f"{prefix}.{stack}"
        for prefix, module in live.model.named_modules()
        if isinstance(module, LoraExperts)
        for stack in packed_names(module)
    ]
    if not stacks:
        return ""
    parts = [live.parameters[f"{stack}{part}"] for stack in stacks for part in (VALUES, SCALES)]
    mine = sum(owned.local().nbytes for owned in parts)
    held = torch.tensor(mine)
    dist.all_reduce(held)
    files, tensors = live.files, live.files.headers.tensors
    packed = {piece.tensor for stack in stacks for piece in files.names.pieces(stack)}
    stored = [
        tensors[part].stored_bytes
        for one in (files.names.logical(name) for name in packed)
        for part in (one.values, one.companions[0])
    ]
    copies = 1 + plan.decision.strategy.redundant_experts * ranks.sizes.ep / 4
    assert int(held) == ranks.sizes.replicate * copies * sum(stored), (int(held), sum(stored))
    if files.names.logical(next(iter(packed))).format == "mxfp4":
        base = sum(owned.local().nbytes for owned in live.parameters.values() if not owned.adapter)
        assert live.load.bytes_read == base, (live.load.bytes_read, base)
    states = [module._get_fsdp_state() for module in live.model.modules() if isinstance(module, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    cut = {one.sharded_param: one for group in groups for one in group.fsdp_params}
    moved = [cut[owned.parameter] for owned in parts if owned.parameter in cut]
    assert len(moved) == (len(parts) if ranks.sizes.shard > 1 else 0)
    assert all(part.dtype == one.sharded_param.dtype for one in moved for part in one.all_gather_inputs)
    return f" held {mine}"


def check(name: str, plan: AdaptationPlan, folder: Path, ranks: Ranks) -> str:
    live = build(plan, folder, ranks, open_device("cpu", 0), None)
    as_planned(live.model, plan)
    assert replicas_agree(live.parameters, ranks).passed, f"{name}: first values differ over replicas"
    seed = plan.decision.recipe.seeds.lora
    for adapter, owned in live.adapters.items():
        first = initial_box(seed, adapter, owned.shape, tuple((0, size) for size in owned.shape))
        assert torch.equal(owned.local(), owned.part(first)), f"{adapter}: its first values depend on the mesh"
        owned.local().copy_(owned.part(values_of(adapter, owned.shape)))
    optimizer = AdapterOptimizer(live.adapters, plan.decision.recipe.optimizer, ranks)
    share = SEQUENCES // ranks.world
    total = torch.zeros(())
    with live.meter.record():
        for row in IDS[ranks.rank * share : (ranks.rank + 1) * share].split(1):
            loss = summed_loss(live.model, row) / COUNTED
            loss.backward()
            total += loss.detach()
    dist.all_reduce(total)
    sum_copies(live.adapters, ranks)
    assert replicas_agree(live.parameters, ranks).passed, name
    loads = live.meter.finish_step()
    held = kept_packed(live, plan, ranks)
    shapes = {adapter: owned.shape for adapter, owned in live.adapters.items()}
    plain_loss, plain = reference(name, plan, folder, shapes)
    assert abs(float(total) - plain_loss) < 1e-5, (name, float(total), plain_loss)
    squares, worst = 0.0, 0.0
    routers = {one for target in plan.decision.lora_targets if target.role == "router" for one in adapter_names(target)}
    stacks = [target for target in plan.decision.lora_targets if target.kind == "experts"]
    assert sum(owned.expert for owned in live.adapters.values()) == 2 * sum(not one.shared for one in stacks), name
    for adapter, owned in live.adapters.items():
        mine = owned.local_grad()
        assert mine is not None, (name, adapter)
        placed = as_saved(owned, mine, ranks)
        ours = placed.full_tensor() if isinstance(placed, DTensor) else placed
        theirs = torch.zeros(owned.shape) if plain[adapter] is None else plain[adapter]
        again = by_place(owned, local_values(placed), ranks)
        assert torch.equal(again, mine), "what a save holds is this rank's part again, copies alike"
        error = float((ours - theirs).abs().max())
        assert error < 1e-5, (name, adapter, error)
        worst = max(worst, error)
        squares += float(theirs.double().square().sum())
        if owned.expert or adapter in routers:
            assert float(theirs.abs().max()) > 1e-6, (name, adapter)
        if owned.expert:
            idle = loads[adapter.rpartition(".")[0]] == 0
            assert not bool(ours[idle].any()), (name, adapter)
    norm = optimizer.global_norm(optimizer.gradients())
    assert abs(norm - squares**0.5) < 1e-5, (name, norm, squares**0.5)
    assert stacks and loads, name
    uneven = any(int(rows.max()) > 2 * float(rows.float().mean()) for rows in loads.values())
    empty = sum(int((rows == 0).sum()) for rows in loads.values())
    return f"{name}: worst {worst:.1e} norm {norm:.5f} uneven {int(uneven)} empty {empty}{held}"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, plan_path, folder in json.loads(Path(sys.argv[1]).read_text()):
        plan = load_plan(Path(plan_path))
        ranks = open_mesh(plan.decision.strategy.mesh, open_device("cpu", 0))
        line = check(name, plan, Path(folder), ranks)
        if ranks.rank == 0:
            sys.stdout.write(f"{plan.decision.strategy.mesh.text()} {line}\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
