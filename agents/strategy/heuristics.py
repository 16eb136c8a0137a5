"""Plans that people use by habit: where a study starts, and what its best is compared with."""

from __future__ import annotations

from shardwright.agents.strategy.oracle import Priced, Scan
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.legality import violations_in

WARM_PLANS = 3
"""Plans of the scan's ranking that a study starts from."""


def warm(context: SearchContext, found: Scan, best: Priced) -> tuple[ParallelStrategy, ...]:
    """Where a study starts: common habits, the scan's best and what the refinement made of them."""
    return (*habits(context), *(plan.strategy for plan in found.top(WARM_PLANS)), best.strategy)


def habits(context: SearchContext) -> tuple[ParallelStrategy, ...]:
    """Legal plans among: FSDP only, widest EP in a node, widest EP, each with and without recomputation."""
    world = context.world
    degrees = [d for d in range(1, world + 1) if world % d == 0 and context.experts and context.experts % d == 0] or [1]
    wanted = [1, max(d for d in degrees if d <= context.domain or d == 1), max(degrees)]
    found: list[ParallelStrategy] = []
    for ep in dict.fromkeys(wanted):
        for how in ("full", "none"):
            sequences = context.global_batch // world
            if sequences * world != context.global_batch:
                continue
            strategy = ParallelStrategy(
                mesh=Mesh(shard=world // ep, ep=ep),
                accumulation_steps=sequences,
                checkpointing="full" if how == "full" else "none",
            )
            if not violations_in(context, strategy):
                found.append(strategy)
    return tuple(found)
