"""The front of step time, memory and device-hours, and why each rival lost."""

from __future__ import annotations

from itertools import chain

from shardwright.agents.strategy.oracle import Priced, Scan
from shardwright.agents.strategy.words import gib, milliseconds, term
from shardwright.schemas.plan import Alternative

SHOWN = 8
"""Rivals in a plan at most."""

LOOKED_AT = 6 * SHOWN
"""Of the ranking, for rivals that differ in more than what costs nothing."""


def objectives(plan: Priced) -> tuple[float, float, float]:
    """What is minimised: step time, reserved memory, device-hours."""
    return plan.cost.time.step_ms, float(plan.cost.memory.reserved_bytes), plan.cost.gpu_hours


def dominates(one: Priced, other: Priced) -> bool:
    """No worse in every objective and better in one."""
    left, right = objectives(one), objectives(other)
    return left != right and all(a <= b for a, b in zip(left, right, strict=True))


def front(plans: tuple[Priced, ...]) -> tuple[Priced, ...]:
    """Plans that fit and that no fitting plan dominates, in the given order."""
    fitting = [plan for plan in plans if plan.cost.feasible]
    return tuple(plan for plan in fitting if not any(dominates(other, plan) for other in fitting))


def alternatives(best: Priced, rivals: Scan) -> tuple[Alternative, ...]:
    """Rivals of the best plan: the front of time, memory and device-hours, then the next best; best first.

    Of plans that differ only in what changes no step time the leanest stands for all.
    """
    ahead = [plan for plan in rivals.front(SHOWN) if plan.strategy != best.strategy][: SHOWN // 2]
    names = {plan.strategy.model_dump_json() for plan in ahead}
    chosen: list[Priced] = []
    for plan in chain(ahead, rivals.top(LOOKED_AT)):
        if not any(same_but_dearer(plan, other) for other in (best, *chosen)):
            chosen.append(plan)
        if len(chosen) == SHOWN:
            break
    on_front = {plan.strategy.model_dump_json() for plan in front((best, *chosen))} & names
    return tuple(
        Alternative(
            strategy=plan.strategy,
            step_ms=plan.cost.time.step_ms,
            reserved_bytes=plan.cost.memory.reserved_bytes,
            gpu_hours=plan.cost.gpu_hours,
            feasible=plan.cost.feasible,
            pareto=plan.strategy.model_dump_json() in on_front,
            lost_because=lost_because(best, plan),
        )
        for plan in sorted(chosen, key=lambda plan: plan.rank_key)
    )


def same_but_dearer(plan: Priced, other: Priced) -> bool:
    """Whether a plan has another's mesh and step time and no less memory: a choice that changes nothing else."""
    one, two = plan.cost, other.cost
    alike = plan.strategy.mesh == other.strategy.mesh and one.time.step_ms == two.time.step_ms
    return alike and one.memory.reserved_bytes >= two.memory.reserved_bytes


def lost_because(best: Priced, rival: Priced) -> str:
    """One sentence with the numbers that decided."""
    memory = rival.cost.memory
    if not rival.cost.feasible:
        fullest = max(memory.components, key=lambda c: c.bytes if memory.peak_moment in c.moments else -1)
        return (
            f"does not fit: it needs {gib(memory.reserved_bytes)} a rank and {gib(memory.budget_bytes)} are usable, "
            f"most of it is {term(fullest.name)} ({gib(fullest.bytes)})"
        )
    if not rival.within_margin and best.within_margin:
        return f"fills {memory.fraction:.0%} of memory, beyond the safety margin of 95%"
    extra = rival.cost.time.step_ms - best.cost.time.step_ms
    if extra == 0:
        more = memory.reserved_bytes - best.cost.memory.reserved_bytes
        return f"as fast, with {gib(more)} more memory" if more > 0 else "equal in time and memory; listed later"
    if extra < 0:
        return f"{milliseconds(-extra)} faster, with less memory margin"
    name, difference = slower_term(best, rival)
    return (
        f"{extra / best.cost.time.step_ms:.1%} slower ({milliseconds(extra)}): "
        f"{milliseconds(difference)} more for {term(name)}"
    )


def slower_term(best: Priced, rival: Priced) -> tuple[str, float]:
    """The time term that grew most from best to rival, and by how many milliseconds."""
    ours = {c.name: c.milliseconds for c in best.cost.time.components if c.kind != "hidden_communication"}
    theirs = {c.name: c.milliseconds for c in rival.cost.time.components if c.kind != "hidden_communication"}
    return max(((name, ms - ours.get(name, 0.0)) for name, ms in theirs.items()), key=lambda item: item[1])
