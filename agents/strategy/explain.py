"""The plan's story in plain sentences, from the model's terms alone."""

from __future__ import annotations

from shardwright.agents.strategy.oracle import Priced, Scan
from shardwright.agents.strategy.pareto import lost_because
from shardwright.agents.strategy.words import gib, milliseconds, term
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.plan import SearchRecord


def explain(scan: Scan, record: SearchRecord, cluster: ClusterSpec) -> tuple[str, ...]:
    """What was chosen, what fills memory, what bounds the step, what the next best costs."""
    sentences = [_chosen(scan.best, cluster), _memory(scan.best), _time(scan.best), _search(record)]
    if not scan.best.within_margin:
        sentences.insert(2, "No plan keeps the safety margin of 5%; this one needs the least memory.")
    if len(scan.ranked) > 1:
        rival = scan.ranked[1]
        sentences.append(f"The next best, {rival.strategy.text()}, lost: {lost_because(scan.best, rival)}.")
    return tuple(sentences)


def _chosen(best: Priced, cluster: ClusterSpec) -> str:
    strategy, mesh = best.strategy, best.strategy.mesh
    experts = f"experts placed on {mesh.ep} expert-parallel ranks" if mesh.ep > 1 else "no expert parallelism"
    kept = "recomputes each layer in backward" if strategy.checkpointing == "full" else "keeps activations"
    weights = "drops gathered weights after each layer" if strategy.reshard_after_forward else "keeps gathered weights"
    return (
        f"{strategy.text()} on {cluster.world_size} × {cluster.device.name}: weights sharded over "
        f"{mesh.shard * mesh.ep} ranks, {experts}, {strategy.micro_batch_sequences} sequence(s) a rank at once, "
        f"{strategy.accumulation_steps} micro-batch(es) a step; it {kept} and {weights}."
    )


def _memory(best: Priced) -> str:
    memory = best.cost.memory
    alive = [c for c in memory.components if memory.peak_moment in c.moments]
    top = sorted(alive, key=lambda c: (-c.bytes, c.name))[:3]
    parts = ", ".join(f"{term(c.name)} {gib(c.bytes)}" for c in top)
    return (
        f"Memory peaks at {memory.peak_moment.replace('_', ' ')} with {gib(memory.peak_bytes)}: {parts}. With reserves "
        f"it is {gib(memory.reserved_bytes)} of {gib(memory.budget_bytes)} a rank ({memory.fraction:.0%})."
    )


def _time(best: Priced) -> str:
    time = best.cost.time
    spent = sorted(
        (c for c in time.components if c.kind != "hidden_communication"), key=lambda c: (-c.milliseconds, c.name)
    )[:3]
    parts = ", ".join(f"{term(c.name)} {c.milliseconds / time.step_ms:.0%}" for c in spent)
    exposed = sum(c.milliseconds for c in time.components if c.kind == "exposed_communication")
    return (
        f"A step takes {milliseconds(time.step_ms)} ({time.tokens_per_s:.4g} tokens/s), bound by "
        f"{term(time.bound_by)}: {parts}; communication that nothing hides is {exposed / time.step_ms:.0%}."
    )


def _search(record: SearchRecord) -> str:
    found = (
        f"the study of {record.trials} trials came to {milliseconds(record.study_step_ms)} by itself"
        if record.study_step_ms
        else f"the study of {record.trials} trials found none that fits by itself"
    )
    return (
        f"All {record.legal_strategies} legal strategies were priced, {record.feasible_strategies} fit; the best takes "
        f"{milliseconds(record.oracle_step_ms)}, {found}."
    )
