"""Kimi K3 on 128 ranks that do not exist: ``python benchmarks/k3_simulate.py [--tokens T] [--eager] [--append]``.

Rank 0 of FSDP2 × EP64 on a fake process group: the model's own code at full width, three layers (delta-rule with a
dense feed-forward, delta-rule and latent attention with 896 experts), LoRA on attention and experts, even routing, one
micro-batch forward and backward over fake tensors. Delta-rule layers run their operators, which know fake tensors, or
with ``--eager`` the model's own chunks; everything else is eager. Beside every measured number stands the cost model's
for the same plan. No device, no weights, no other rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from k3_model import Slice, write_headers
from k3_slice_fusions import decisions
from lines import append, line
from models import recipe_for
from torch import nn

from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.checkpoints.targets import parameter_shapes, resolve_targets
from shardwright.runtime.fuse import install_fusions
from shardwright.runtime.simulate import Simulated, simulate
from shardwright.schemas.cost import MemoryReport
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.cost.fusion import FusedProviders

SHARD, EP = 2, 64
LAYERS = ("kda+dense", "kda", "mla")
GATHERED = ("gathered_root", "gather_buffers", "gather_staging")


def simulated(tokens: int, eager: bool, layers: tuple[str, ...] = LAYERS) -> tuple[Simulated, MemoryReport]:
    """What FSDP2's tracker saw on rank 0, and the cost model's report."""
    mesh = Mesh(shard=SHARD, ep=EP)
    recipe = recipe_for(batch=mesh.data_ranks, tokens=tokens)
    strategy = ParallelStrategy(mesh=mesh, checkpointing="full")
    fused = FusedProviders({} if eager else {"kda": ("shardwright", ())})
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_headers(Path(folder) / "k3", Slice("kimi_k3", layers))
        targets = resolve_targets(parameter_shapes(checkpoint), recipe.lora, model_type="kimi_k3")
        found = simulate(checkpoint, recipe, strategy, targets, prepare=None if eager else with_operator)
        work = workload(profile_checkpoint(checkpoint), recipe, targets)
        report = price(work, load_cluster("h200-128"), strategy, fused)
    return found, report.memory


def with_operator(model: nn.Module) -> None:
    install_fusions(model, decisions(model, ("kda",)))


def compared(found: Simulated, model: MemoryReport) -> dict[str, float]:
    """Measured and modelled bytes, and errors of the model in per cent. There is no step, so no optimizer state."""
    parts = {one.name: one.bytes for one in model.components}
    static = parts["frozen_base"] + parts["adapter_parameters"]
    peak, modelled = found.total, model.peak_bytes - parts["optimizer_state"]
    fields: dict[str, float] = {
        "static_bytes": found.sharded,
        "static_model_bytes": static,
        "static_error_pct": 100 * (static / found.sharded - 1),
        "gathered_bytes": found.gathered,
        "gathered_model_bytes": sum(parts.get(name, 0) for name in GATHERED),
        "peak_bytes": peak,
        "peak_model_bytes": modelled,
        "peak_error_pct": 100 * (modelled / peak - 1),
    }
    fields |= {f"tracked_{kind.lower().replace(' ', '_')}_bytes": size for kind, size in found.by_kind.items()}
    fields |= {f"model_{name}_bytes": size for name, size in parts.items() if size}
    return {name: round(float(value), 4) for name, value in fields.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="k3_simulate.py")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--eager", action="store_true", help="the delta rule as the model's own chunks")
    parser.add_argument("--append", action="store_true", help="append to benchmarks/results")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    found, model = simulated(options.tokens, options.eager)
    fields: dict[str, Any] = {
        "bench": "k3-simulate",
        "case": f"k3-simulate/shard{SHARD}-ep{EP}-{options.tokens}{'-eager' if options.eager else ''}",
        "unit": "s",
        "ours": round(time.perf_counter() - began, 2),
        "metrics": compared(found, model),
    }
    result = line(fields)
    sys.stdout.write(result.model_dump_json() + "\n")
    if options.append:
        append([result])
    return 0


if __name__ == "__main__":
    sys.exit(main())
