"""Rank 0 of eight on fake tensors, and the cost model's bytes: ``simulate.py CHECKPOINT SHARD EP [FORMAT [CP]]``.

What SHARD, EP and CP leave of the eight are replicas.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.checkpoints.targets import parameter_shapes, resolve_targets
from shardwright.runtime.simulate import simulate
from shardwright.schemas.recipe import BatchSpec, DataSpec, LoraSpec, PrecisionSpec, Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import estimate

RANKS = 8


def main() -> None:
    folder, shard, ep = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    base_format = sys.argv[4] if len(sys.argv) > 4 else "compute"
    cp = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    mesh = Mesh(replicate=RANKS // (shard * ep * cp), shard=shard, ep=ep, cp=cp)
    recipe = Recipe(
        data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
        batch=BatchSpec(sequence_tokens=64, global_batch_sequences=mesh.data_ranks),
        precision=PrecisionSpec(base="bfloat16", adapter="float32"),
        lora=LoraSpec(targets=("attention", "experts"), rank=8),
    )
    targets = resolve_targets(parameter_shapes(folder), recipe.lora, model_type=read_config(folder).model_type)
    strategy = ParallelStrategy(mesh=mesh, checkpointing="full", base_format=base_format)  # type: ignore[arg-type]
    found = simulate(folder, recipe, strategy, targets)
    cluster = load_cluster("h200-8")
    report = estimate(profile_checkpoint(folder), recipe, cluster, strategy, targets)
    model = {one.name: one.bytes for one in report.memory.components}
    kept = {"sharded": found.sharded, "gathered": found.gathered}
    sys.stdout.write(json.dumps({**kept, "kinds": found.by_kind, "model": model}) + "\n")


if __name__ == "__main__":
    main()
