"""Sharded bf16 models in fp32 arithmetic beside the whole model in fp32: ``wide.py CKPT PLAN [PLAN ...]``.

Gathers, dispatch and combination of rows run as they are; what they carry is fp32.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.runtime.checks.wide import Wide, largest_difference
from shardwright.runtime.device import open_device
from shardwright.runtime.losses import logits_of
from shardwright.runtime.mesh import open_mesh
from shardwright.runtime.reference import load_plain
from shardwright.runtime.session import build
from shardwright.schemas.plan import load_plan

IDS = torch.arange(2 * 8).reshape(2, 8) * 7 % 50 + 8


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checkpoint, paths = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    device = open_device("cpu", 0)
    whole, _ = load_plain(checkpoint, torch.bfloat16, device.torch_device)
    for path in paths:
        plan = load_plan(path)
        ranks = open_mesh(plan.decision.strategy.mesh, device)
        live = build(plan, checkpoint, ranks, device, None)
        ids = IDS[ranks.data_rank : ranks.data_rank + 1]
        with torch.no_grad():
            narrow = logits_of(live.model, ids, None)
            with Wide():
                wide = logits_of(live.model, ids, None)
            again = logits_of(live.model, ids, None)
            exact = whole.float()(input_ids=ids, use_cache=False).logits
        assert wide.dtype is torch.float32 and torch.equal(narrow, again), "the live model is as it was"
        errors = largest_difference(wide, exact), largest_difference(narrow, exact)
        assert errors[0] < 1e-5 < 1e-3 < errors[1], errors
        sys.stdout.write(f"{plan.decision.strategy.mesh.text()} rank {ranks.rank}: {errors}\n")
    dist.barrier()
    sys.stdout.write(f"rank {dist.get_rank()} done\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
