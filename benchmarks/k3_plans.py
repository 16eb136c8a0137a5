"""Kimi K3 on 128 devices of every kind in the catalogue: ``python benchmarks/k3_plans.py [--write]``.

LoRA r = 16 on attention and experts, FSDP2 × EP64, 4,096 tokens a sequence, every layer recomputed, the base in bf16
and kept as MXFP4; beside them the fastest plan that the search finds among those that the runtime runs. And a context
of 1,048,576 tokens, each sequence cut over context-parallel ranks, or over tensor-parallel ones, which the runtime does
not run: such plans are marked. ``--write`` puts the tables into ``docs/k3-plans.md``. Nothing is measured: all figures
are modelled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lines import ROOT
from models import kimi_k3, recipe_for, targets_for

from shardwright.agents.strategy.complete import Completion
from shardwright.agents.strategy.explain import unproved_choices
from shardwright.agents.strategy.oracle import scan
from shardwright.agents.strategy.pricing import Pricer
from shardwright.agents.strategy.refine import refine
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.cost.context import exchanged_bytes
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.legality import violations_in
from shardwright.search_spaces.space import enumerate_plans

DEVICES = 128
PAGE = ROOT / "docs" / "k3-plans.md"
CLUSTERS = (
    "a100-8", "h100-128", "h200-128", "b200-8", "b300-8", "gb200-nvl72", "gb300-nvl72", "mi300x-8", "mi355x-8",
    "ascend-910b-8", "cloudmatrix-384",
)  # fmt: skip
SHORT, LONG = 4096, 1 << 20
CP = 128
"""Context-parallel ranks of a sequence on every cluster."""
DEGREES_ON, DEGREES = "h200-128", (16, 32, 64)
PRICED = FusedProviders({"kda": ("shardwright", ()), "linear_cross_entropy": ("shardwright", ("lm_head",))})
GIB = 2**30
COVERED = ("runtime-runs-it", "global-batch")
"""Rules that the named choices break anyway."""


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
    try:
        cost = price(work, cluster, strategy, PRICED)
    except ClusterError as problem:
        return Planned(cluster, strategy, None, str(problem), ())
    refused = violations_in(SearchContext(model, recipe, cluster), strategy)
    rules = {f"{one.rule}: {one.message}" for one in refused if one.rule not in COVERED}
    return Planned(cluster, strategy, cost, "", (*unproved_choices(strategy), *not_a_gpu(cluster), *sorted(rules)))


def not_a_gpu(cluster: ClusterSpec) -> tuple[str, ...]:
    return (f"device type {cluster.device.type}",) if cluster.device.type not in ("cuda", "cpu") else ()


def searched(name: str) -> Planned:
    """The fastest plan of all that the runtime runs, short sequences, with the search's own scan and refinement."""
    cluster, model, recipe = scaled(name), kimi_k3("mxfp4"), recipe_for(batch=DEVICES, tokens=SHORT)
    context = SearchContext(model, recipe, cluster)
    pricer = Pricer(workload(model, recipe, targets_for(model, rank=16)), cluster, PRICED)
    best = refine(context, scan(enumerate_plans(context), pricer), Completion(context, pricer))
    return Planned(cluster, best.strategy, best.cost, "", (*unproved_choices(best.strategy), *not_a_gpu(cluster)))


def short(base_format: str) -> ParallelStrategy:
    """EP64, expert stacks cut in two by FSDP."""
    return ParallelStrategy(mesh=Mesh(shard=2, ep=64), checkpointing="full", base_format=base_format)  # type: ignore[arg-type]


def long(cp: int = 1) -> tuple[ParallelStrategy, int]:
    """Sequences of a million tokens, each over ``cp`` context-parallel or 32 tensor-parallel ranks, and how many."""
    tp = 32 if cp == 1 else 1
    sequences = DEVICES // (cp * tp)
    mesh = Mesh(ep=sequences, cp=cp, tp=tp)
    return ParallelStrategy(mesh=mesh, checkpointing="full", base_format="mxfp4"), sequences


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


HEAD = ("| Devices | Plan | Memory of the fullest rank | Step | Executable |", "| --- | --- | --- | --- | --- |")


def short_rows(name: str) -> list[str]:
    """The two plans of one catalogue entry."""
    return [row(name, planned(name, short(kind), SHORT, DEVICES)) for kind in ("compute", "mxfp4")]


LONG_HEAD = (
    "| Devices | Plan | Memory of the fullest rank | A sequence | Of it exposed communication | Executable |",
    "| --- | --- | --- | --- | --- | --- |",
)


def long_row(name: str, cp: int = 1) -> str:
    """A row of the long context: a step's time over its sequences, and what of it nothing hides."""
    strategy, sequences = long(cp)
    one = planned(name, strategy, LONG, sequences)
    if one.cost is None:
        return row(name, one)
    step, times = one.cost.time.step_ms, one.cost.time.components
    exposed = sum(part.milliseconds for part in times if part.kind == "exposed_communication")
    cells = row(name, one).split(" | ")
    cells[3:4] = [f"{step / 1e3 / sequences:.1f} s", f"{exposed / 1e3 / sequences:.1f} s"]
    return " | ".join(cells)


def exchanged() -> str:
    """What a layer of each kind gathers over the ranks of a sequence, in words."""
    model = kimi_k3("mxfp4")
    strategy, sequences = long(CP)
    work = workload(model, recipe_for(batch=sequences, tokens=LONG), targets_for(model, rank=16))
    plans = plans_of([strategy], model)
    sizes = {}
    for layer in work.layers:
        both = exchanged_bytes(work, layer, plans, plans.tokens(LONG))
        sizes[layer.kind.attention] = " GB forward and ".join(f"{one.item() / 1e9:.2f}" for one in both)
    return f"A delta-rule layer gathers {sizes['linear']} GB back at any length, a latent one {sizes['mla']} GB back."


BY_CONTEXT = """\
A rank holds two pieces of a sequence, one from the front and one from the end, so that causal attention is even.
Delta-rule layers pass states on, `[N | M]` of each piece in fp32; latent layers gather compressed keys and values and
expand them for 1/cp of the heads at a time, once more in backward. Executable where the memory suffices: the runtime
cuts Kimi K3's layers, which `tests/runtime/test_context.py` compares with one process over gloo. No GPU has run it."""


def page() -> str:
    text = [
        "# Kimi K3 on 128 devices",
        "",
        "LoRA r = 16 on attention and experts of all 93 layers (2.78 T parameters), from the cost model alone; written",
        "by `python benchmarks/k3_plans.py --write`. Linear attention and the loss are priced as kernels.",
        "",
        "## FSDP2 × EP64, sequences of 4,096 tokens",
        "",
        *HEAD,
    ]
    for name in CLUSTERS:
        text += short_rows(name)
    text += ["", "## The fastest plan that the runtime runs", "", "The same recipe, found by the search.", "", *HEAD]
    text += [row(name, searched(name)) for name in CLUSTERS]
    text += [
        "",
        "## One million tokens of context",
        "",
        f"### {DEVICES // CP} sequence at a time, cut over {CP} context-parallel ranks",
        "",
        BY_CONTEXT,
        exchanged(),
        "",
        *LONG_HEAD,
    ]
    text += [long_row(name, CP) for name in CLUSTERS]
    text += ["", f"Fewer ranks a sequence and more sequences at once, on {DEGREES_ON}:", "", *LONG_HEAD]
    text += [long_row(DEGREES_ON, cp) for cp in DEGREES]
    text += ["", "### 4 sequences, each over 32 tensor-parallel ranks", "", *LONG_HEAD]
    text += [long_row(name) for name in CLUSTERS]
    text += ["", "Not executable: the runtime cuts no projections.", ""]
    return "\n".join(text)


def main(arguments: list[str]) -> int:
    text = page()
    sys.stdout.write(text)
    if "--write" in arguments:
        write_atomic(PAGE, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
