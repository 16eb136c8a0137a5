"""Kimi K3 on 128 devices of every kind in the catalogue: ``python benchmarks/k3_plans.py [--write]``.

LoRA r = 16 on attention and experts, FSDP2 × EP64, 4,096 tokens a sequence, every layer recomputed; the base in bf16
and kept as MXFP4. And a context of 1,048,576 tokens with tensor parallelism, which the runtime does not run: such a
plan is marked. ``--write`` puts the tables into ``docs/k3-plans.md``. Nothing is measured: all figures are modelled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lines import ROOT
from models import kimi_k3, recipe_for, targets_for

from shardwright.agents.strategy.explain import unproved_choices
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.legality import violations_in

DEVICES = 128
PAGE = ROOT / "docs" / "k3-plans.md"
CLUSTERS = (
    "a100-8", "h100-128", "h200-128", "b200-8", "b300-8", "gb200-nvl72", "gb300-nvl72", "mi300x-8", "mi355x-8",
    "ascend-910b-8", "cloudmatrix-384",
)  # fmt: skip
LONG = 1 << 20
GIB = 2**30


@dataclass(frozen=True)
class Planned:
    """One plan on one cluster."""

    cluster: ClusterSpec
    strategy: ParallelStrategy
    cost: CostReport | None
    refused: str
    unproved: tuple[str, ...]


def scaled(name: str) -> ClusterSpec:
    """A catalogue entry with 128 devices (racks of 72 are four to a tray, so 32 trays)."""
    base = load_cluster(name)
    if base.world_size == DEVICES:
        return base
    outer = base.links
    if all(link.name != "inter_node" for link in outer):
        outer = (*outer, next(link for link in load_cluster("h200-128").links if link.name == "inter_node"))
    super_node = base.super_node_devices if base.super_node_devices <= DEVICES else DEVICES
    return ClusterSpec.model_validate(
        {
            **base.model_dump(),
            "name": f"{base.name}-as-{DEVICES}",
            "nodes": DEVICES // base.devices_per_node,
            "links": [link.model_dump() for link in outer],
            "super_node_devices": super_node,
        }
    )


def planned(name: str, strategy: ParallelStrategy, tokens: int, batch: int) -> Planned:
    """Price one plan; the first broken rule where it is not legal."""
    cluster, model = scaled(name), kimi_k3("mxfp4")
    recipe = recipe_for(batch=batch, tokens=tokens)
    broken = violations_in(SearchContext(model, recipe, cluster, explore=True), strategy)
    if broken:
        return Planned(cluster, strategy, None, f"{broken[0].rule}: {broken[0].message}", ())
    work = workload(model, recipe, targets_for(model, rank=16))
    fused = FusedProviders({"kda": ("shardwright", ()), "linear_cross_entropy": ("shardwright", ("lm_head",))})
    try:
        cost = price(work, cluster, strategy, fused)
    except ClusterError as problem:
        return Planned(cluster, strategy, None, str(problem), ())
    device = (f"device type {cluster.device.type}",) if cluster.device.type not in ("cuda", "cpu") else ()
    return Planned(cluster, strategy, cost, "", (*unproved_choices(strategy), *device))


def short(base_format: str) -> ParallelStrategy:
    return ParallelStrategy(mesh=Mesh(shard=2, ep=64), checkpointing="full", base_format=base_format)  # type: ignore[arg-type]


def long() -> ParallelStrategy:
    """Four sequences of a million tokens, each over 32 tensor-parallel ranks.

    Context parallelism is not legal here: linear attention carries a state along the sequence.
    """
    return ParallelStrategy(mesh=Mesh(ep=4, tp=32), checkpointing="full", base_format="mxfp4")


def row(name: str, one: Planned) -> str:
    cells = [name, one.strategy.text()]
    if one.cost is None:
        return "| " + " | ".join([*cells, "-", "-", f"not legal: {one.refused}"]) + " |"
    memory = one.cost.memory
    fits = "fits" if one.cost.feasible else "does not fit"
    numbers = [
        f"{memory.reserved_bytes / GIB:.1f} of {memory.budget_bytes / GIB:.1f} GiB, {fits}",
        f"{one.cost.time.step_ms / 1e3:.1f} s",
    ]
    runs = f"no: {', '.join(one.unproved)}" if one.unproved else "yes"
    return "| " + " | ".join([*cells, *numbers, runs]) + " |"


def page() -> str:
    head = ["| Devices | Plan | Memory of the fullest rank | Step | Executable |", "| --- | --- | --- | --- | --- |"]
    text = [
        "# Kimi K3 on 128 devices",
        "",
        "LoRA r = 16 on attention and experts of all 93 layers (2.78 T parameters), from the cost model alone; written",
        "by `python benchmarks/k3_plans.py --write`. Linear attention and the loss are priced as kernels.",
        "",
        "## FSDP2 × EP64, sequences of 4,096 tokens",
        "",
        *head,
    ]
    for name in CLUSTERS:
        text += [row(name, planned(name, short(kind), 4096, DEVICES)) for kind in ("compute", "mxfp4")]
    text += ["", "## One million tokens of context", "", *head]
    text += [row(name, planned(name, long(), LONG, 4)) for name in CLUSTERS]
    text += [
        "",
        "Context parallelism is not legal for linear attention (its state runs along the sequence), so a long sequence",
        "is spread over tensor-parallel ranks: priced, not run (`search_spaces/executable.py`), refused by `apply`.",
        "",
    ]
    return "\n".join(text)


def main(arguments: list[str]) -> int:
    text = page()
    sys.stdout.write(text)
    if "--write" in arguments:
        write_atomic(PAGE, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
