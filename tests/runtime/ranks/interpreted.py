"""``many.py`` with kernels in Triton's CPU interpreter, bf16 as a device computes it: ``interpreted.py JOBS.json``."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

from shardwright.kernels import interpreter

if __name__ == "__main__":
    interpreter.install()
    runpy.run_path(str(Path(__file__).with_name("many.py")), run_name="__main__")
