"""``plan --report`` on Kimi K3's published layout for 128 × H200: ``python benchmarks/k3_plan.py [--write]``.

497,220 tensors in 96 files, headers alone (data is sparse), LoRA r = 16 on attention and experts. The command runs as
a user would run it, in a process of its own and without its cache; case ``k3/plan``, seconds from start to exit, bar
90 on two cores. ``--write`` keeps the report in ``docs/k3-plan.html`` and appends the line.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lines import ROOT, append, line
from structure import write

from shardwright.schemas.plan import load_plan

BAR_S = 90.0
REPORT = ROOT / "docs" / "k3-plan.html"
RECIPE = """name: kimi-k3
lora:
  targets: [attention, experts]
  rank: 16
  alpha: 32
data:
  train: train.jsonl
  held_out: held_out.jsonl
batch:
  sequence_tokens: 4096
  global_batch_sequences: 256
schedule:
  steps: 100
precision:
  base: bfloat16
"""


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "checkpoint").mkdir()
        write("kimi-k3", folder / "checkpoint")
        (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
        for name in ("train.jsonl", "held_out.jsonl"):
            (folder / name).write_text('{"text": "pinned by its hash alone"}\n', encoding="utf-8")
        program = [sys.executable, "-m", "shardwright.workflows.cli.main", "plan", "checkpoint", "--no-cache"]
        command = [*program, "-c", "h200-128", "-r", "recipe.yaml", "-o", "plan.json", "--report", "plan.html"]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, cwd=folder, check=False)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            return done.returncode
        made = load_plan(folder / "plan.json")
        metrics = {
            "seconds": round(seconds, 1),
            "bar_s": BAR_S,
            "processor_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "load_average": round(os.getloadavg()[0], 1),
            "proposals": float(len(made.evidence.proposals)),
            "fusions": float(len(made.decision.fusions)),
        }
        fields = {"bench": "k3", "case": "k3/plan", "unit": "s", "ours": metrics["seconds"], "metrics": metrics}
        result = line({**fields, "peak_bytes": after.ru_maxrss * 1024})
        sys.stdout.write(result.model_dump_json() + "\n")
        if "--write" in arguments:
            REPORT.write_bytes((folder / "plan.html").read_bytes())
            append([result])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
