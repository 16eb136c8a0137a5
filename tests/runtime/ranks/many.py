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
from shardwright.search_spaces.executable import EXECUTABLE

EXECUTABLE["replicate"].proof.setdefault(2, "this very test")

if __name__ == "__main__":
    dist.init_process_group("gloo")
    execute.close = lambda failed: None if failed else dist.barrier()
    for flags in json.loads(Path(sys.argv[1]).read_text()):
        code = main(flags)
        if code:
            os._exit(code)
    os._exit(0)
