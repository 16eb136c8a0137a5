"""A bf16 plan on its ranks: ``precision.py PLAN CHECKPOINT``; side tensors stay as the files hold them, on every rank.

Prints rank 0's bytes of the frozen base, and the cost model's for the same plan.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.checks.usage import held_bytes
from shardwright.runtime.device import open_device
from shardwright.runtime.load.decode import read_base
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import open_mesh
from shardwright.runtime.reference import load_plain
from shardwright.runtime.session import build
from shardwright.schemas.plan import load_plan
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import estimate


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan, folder, device = load_plan(Path(sys.argv[1])), Path(sys.argv[2]), open_device("cpu", 0)
    ranks = open_mesh(plan.decision.strategy.mesh, device)
    live = build(plan, folder, ranks, device, None)
    frozen = {name: one for name, one in live.parameters.items() if not one.adapter}
    kept = {name: one for name, one in frozen.items() if one.local().dtype == torch.float32}
    assert {name.split(".self_attn.")[-1] for name in kept} >= {"A_log", "dt_bias", "o_norm.weight"}
    assert all(isinstance(one.parameter, DTensor) for name, one in frozen.items() if name not in kept)
    with ShardReader(folder, live.files.headers) as reader:
        for name, one in kept.items():
            stored = read_base(reader, live.files.names, name, one.shape)
            assert not isinstance(one.parameter, DTensor) and torch.equal(one.local(), stored), name
        for name, buffer in live.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                stored = read_base(reader, live.files.names, name, tuple(buffer.shape))
                assert torch.equal(buffer, stored) and not torch.equal(stored, stored.bfloat16().float()), name
    ids = torch.arange(16).view(1, -1) % 40 + 3
    loss = summed_loss(live.model, ids).detach()
    plain, _ = load_plain(folder, torch.bfloat16, torch.device("cpu"))
    theirs = summed_loss(plain, ids).detach()
    assert abs(float(loss - theirs)) < 0.01 * abs(float(theirs)), (float(loss), float(theirs))
    held = held_bytes(live.model, live.parameters)["frozen_base"]
    decision = plan.decision
    report = estimate(
        profile_checkpoint(folder), decision.recipe, load_cluster("cpu-2"), decision.strategy, decision.lora_targets
    )
    predicted = next(one.bytes for one in report.memory.components if one.name == "frozen_base")
    wide = sum(one.local().nbytes for one in kept.values())
    if ranks.rank == 0:
        sys.stdout.write(json.dumps({"held": held, "predicted": predicted, "wide": wide, "kept": len(kept)}) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
