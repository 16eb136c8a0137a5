"""Run several plans one after another on the same ranks: ``many.py JOBS.json`` holds one flag list a plan.

The process group is opened once: opening it again on torchrun's store finds the addresses of the closed one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from shardwright.runtime import execute
from shardwright.runtime.worker import main
from shardwright.schemas.plan import load_plan

if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    kind = load_plan(Path(jobs[0][jobs[0].index("--plan") + 1])).decision.cluster.device_type
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    execute.close = lambda failed: None if failed else dist.barrier()
    for flags in jobs:
        code = main(flags)
        if code:
            os._exit(code)
    os._exit(0)
