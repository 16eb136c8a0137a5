"""Time and memory of profile and structure stage on published layouts: headers alone, no weights.

``python benchmarks/structure.py glm-5 kimi-k3`` writes each checkpoint's headers (sparse data) to a temporary folder,
then runs each stage in a process of its own and adds a result line: wall seconds, processor seconds, peak memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lines import append, line

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"profile": {"kimi-k3": 15.0}, "structure": {"kimi-k3": 60.0, "glm-5": 60.0}}
"""Bars in seconds."""
FILES = {"kimi-k3": 96, "glm-5": 3}


def published() -> ModuleType:
    """The layouts of published models that the tests count."""
    spec = importlib.util.spec_from_file_location("published", ROOT / "tests" / "checkpoints" / "published.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module
    spec.loader.exec_module(module)
    return module


def write(name: str, folder: Path) -> None:
    layouts = published()
    made = layouts.kimi_k3() if name == "kimi-k3" else layouts.latent(layouts.GLM_5)
    layouts.write(folder, made, files=FILES[name])


def stage(name: str, folder: Path) -> dict[str, Any]:
    """One stage on one folder; run in a process of its own."""
    from shardwright.checkpoints.profile import profile_checkpoint

    began, used = time.perf_counter(), time.process_time()
    profile = profile_checkpoint(folder)
    found: dict[str, Any] = {"tensors": profile.tensors}
    if name == "structure":
        profiled = time.perf_counter() - began
        found |= {"profile_s": profiled, **structure(folder, profile)}
    found |= {"s": time.perf_counter() - began, "processor_s": time.process_time() - used}
    return {**found, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def structure(folder: Path, profile: Any) -> dict[str, Any]:
    """The structure stage as ``plan`` runs it."""
    from shardwright.agents.structure.run import run_structure
    from shardwright.schemas.recipe import DataSpec, LoraSpec, PrecisionSpec, Recipe
    from shardwright.search_spaces.catalogue import load_cluster

    recipe = Recipe(
        data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
        lora=LoraSpec(targets=("attention", "experts")),
        precision=PrecisionSpec(base="bfloat16"),
    )
    result = run_structure(folder, profile, load_cluster("h200-8"), recipe)
    legal = sum(one.certificate.legal for one in result.proposals)
    return {"graphs": len(result.graph.layers), "proposals": len(result.proposals), "legal": legal}


def main(names: list[str]) -> None:
    made = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write(name, folder)
            for which in ("profile", "structure"):
                command = [sys.executable, __file__, "--stage", which, str(folder)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                seen = json.loads(done.stdout.strip().splitlines()[-1])
                limit = LIMITS[which].get(name)
                numbers = {key: float(value) for key, value in seen.items() if key != "peak_bytes"}
                metrics = {**numbers, "load_average": os.getloadavg()[0], **({"bar_s": limit} if limit else {})}
                fields = {"bench": "structure", "case": name, "passes": which, "unit": "s", "ours": seen["s"]}
                made.append(line({**fields, "peak_bytes": seen["peak_bytes"], "metrics": metrics}))
    append(made)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stage"]:
        import torch

        torch.set_num_threads(2)
        sys.stdout.write(json.dumps(stage(sys.argv[2], Path(sys.argv[3]))) + "\n")
    else:
        main(sys.argv[1:] or ["glm-5", "kimi-k3"])
