"""The plan's story in plain sentences, from the model's terms alone."""

from __future__ import annotations

from shardwright.agents.strategy.oracle import Priced
from shardwright.agents.strategy.words import gib, milliseconds, moment, rate, term
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.plan import Alternative, SearchRecord
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.schemas.words import plural
from shardwright.search_spaces.axes import AXES
from shardwright.search_spaces.axes.base import draws_of
from shardwright.search_spaces.executable import runs


def explain(
    best: Priced,
    alternatives: tuple[Alternative, ...],
    record: SearchRecord,
    cluster: ClusterSpec,
    *,
    fused: bool = False,
) -> tuple[str, ...]:
    """What was chosen, what fills memory, what bounds the step, what the next best costs.

    Args:
        fused: plans are priced with their own fused operators; what the search found is not.
    """
    sentences = [_chosen(best, cluster), _memory(best), _time(best), _search(record, fused)]
    if not best.within_margin:
        priced = " priced with fused operators" if fused else ""
        sentences.insert(2, f"No plan{priced} keeps the safety margin of 5%; this one needs the least memory.")
    if alternatives:
        rival = min(alternatives, key=lambda one: (not one.feasible, one.as_run[0]))
        sentences.append(f"The next best, {rival.strategy.text()}, lost: {rival.lost_because}.")
    unproved = unproved_choices(best.strategy)
    if unproved:
        sentences.append(f"To explore only, the runtime does not run this plan yet: {', '.join(unproved)}.")
    return tuple(sentences)


def unproved_choices(strategy: ParallelStrategy) -> tuple[str, ...]:
    """Axis values of the plan that the runtime does not run."""
    draws = draws_of(strategy)
    return tuple(f"{axis.name} = {draws[axis.name]}" for axis in AXES if not runs(axis.name, draws[axis.name]))


def _chosen(best: Priced, cluster: ClusterSpec) -> str:
    strategy, mesh = best.strategy, best.strategy.mesh
    experts = f"experts placed on {mesh.ep} expert-parallel ranks" if mesh.ep > 1 else "no expert parallelism"
    some = f"recomputes {plural(len(strategy.checkpointed_layers), 'layer')} in backward"
    kept = {"full": "recomputes each layer in backward", "none": "keeps activations", "layers": some}
    holders = mesh.shard * mesh.ep * mesh.cp
    weights = "drops gathered weights after each layer" if strategy.reshard_after_forward else "keeps gathered weights"
    weights = "gathers nothing" if holders * mesh.tp == 1 else weights
    held = "whole on every rank" if holders == 1 else f"sharded over {plural(holders, 'rank')}"
    return (
        f"{strategy.text()} on {cluster.world_size} × {cluster.device.name}: weights "
        f"{held}, {experts}, {plural(strategy.micro_batch_sequences, 'sequence')} a rank at once, "
        f"{plural(strategy.accumulation_steps, 'micro-batch')} a step; it {kept[strategy.checkpointing]} and {weights}."
    )


def _memory(best: Priced) -> str:
    memory = best.cost.memory
    alive = [c for c in memory.components if memory.peak_moment in c.moments]
    top = sorted(alive, key=lambda c: (-c.bytes, c.name))[:3]
    parts = ", ".join(f"{term(c.name)} {gib(c.bytes)}" for c in top)
    return (
        f"Memory peaks {moment(memory.peak_moment)} with {gib(memory.peak_bytes)}: {parts}. With reserves "
        f"it is {gib(memory.reserved_bytes)} of {gib(memory.budget_bytes)} a rank ({memory.fraction:.0%})."
    )


def _time(best: Priced) -> str:
    time = best.cost.time
    spent = sorted(
        (c for c in time.components if c.kind != "hidden_communication"), key=lambda c: (-c.milliseconds, c.name)
    )[:3]
    parts = ", ".join(f"{term(c.name)} {c.milliseconds / time.step_ms:.0%}" for c in spent)
    exposed = sum(c.milliseconds for c in time.components if c.kind == "exposed_communication")
    moved = any("communication" in c.kind for c in time.components)
    apart = (
        f"communication that nothing hides is {exposed / time.step_ms:.0%}" if moved else "no rank waits for another"
    )
    return (
        f"A step takes {milliseconds(time.step_ms)} ({rate(time.tokens_per_s)} tokens/s), bound by "
        f"{term(time.bound_by)}: {parts}; {apart}."
    )


def _search(record: SearchRecord, fused: bool) -> str:
    """How many strategies were priced, and what the best of them takes."""
    legal, fit = f"All {record.legal_strategies:,} legal strategies were priced", f"{record.feasible_strategies:,} fit"
    if not record.oracle_step_ms:
        found = "none fits"
    else:
        study = f"a study of {record.trials} trials over the joint space "
        study += f"came to {milliseconds(record.study_step_ms)}" if record.study_step_ms else "found none that fits"
        found = f"{fit}, the best takes {milliseconds(record.oracle_step_ms)}, {study}"
    if not fused:
        return f"{legal}: {found}."
    again = f"each with those certified for it {record.fused_feasible_strategies or 0:,} fit"
    return f"{legal} twice. Without fused operators {found}; {again}, of which this one is chosen."
