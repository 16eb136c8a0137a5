"""The head of a plan: whether it fits, what it costs, what an approval signs."""

from __future__ import annotations

import re

from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.words import plural
from shardwright.workflows.report.blocks import Block, Heading, Table, Text, Tile, Tiles
from shardwright.workflows.report.units import count, duration, share, short, size

_TIMES = re.compile(r"^[\w-]+: \S+(?: m?s)? → \S+ m?s a call \(\w+\), ×[\d.]+(?:; |$)")
"""How a reason begins that says the times of the chosen variant first."""


def installed(plan: AdaptationPlan) -> tuple[FusionDecision, ...]:
    """Fusions that run otherwise than eagerly."""
    return tuple(f for f in plan.decision.fusions if not f.rejected and f.provider != "eager")


def verdict(plan: AdaptationPlan) -> str:
    """The plan in one sentence."""
    cost, decision = plan.evidence.cost, plan.decision
    fits = "fits" if cost.memory.fits else "does not fit"
    return (
        f"{decision.architecture} {fits} {decision.cluster.world_size} × {decision.cluster.device_name}: "
        f"{size(cost.memory.reserved_bytes)} of {size(cost.memory.budget_bytes)} a rank, "
        f"{duration(cost.time.step_ms)} a step, {plural(len(installed(plan)), 'fused operator')}."
    )


def tiles(plan: AdaptationPlan) -> Tiles:
    """The figures that decide, each with what it means."""
    cost = plan.evidence.cost
    memory, time = cost.memory, cost.time
    steps = plural(plan.decision.recipe.schedule.steps, "step")
    first = f"{steps}; the first ends after {duration(cost.time_to_first_step_s * 1000)}"
    return Tiles(
        (
            Tile("step", duration(time.step_ms), f"bound by {time.bound_by.replace('_', ' ')}"),
            Tile(
                "memory a rank",
                size(memory.reserved_bytes),
                f"{share(memory.fraction)} of {size(memory.budget_bytes)}; {'fits' if memory.fits else 'does not fit'}",
                "good" if memory.fits else "bad",
            ),
            Tile("throughput", f"{time.tokens_per_s:,.0f}", "tokens a second"),
            Tile("whole run", f"{cost.gpu_hours:.3g}", f"device-hours; {first}"),
        )
    )


def signed_section(plan: AdaptationPlan) -> tuple[Block, ...]:
    """What workers will do, exactly as an approval pins it."""
    return (
        Heading("What an approval signs"),
        Text("Workers do this and nothing else; they stop where the files, versions or devices differ."),
        Table(("", ""), signed_rows(plan)),
    )


def signed_rows(plan: AdaptationPlan) -> tuple[tuple[str, str], ...]:
    """Name and value of everything that an approval covers, in a reader's words."""
    decision, profile = plan.decision, plan.evidence.profile
    batch, cluster, targets = decision.recipe.batch, decision.cluster, decision.lora_targets
    adapters = count(sum(target.adapter_parameters for target in targets))
    roles = ", ".join(sorted({target.role for target in targets}))
    ranks, steps = plural(cluster.world_size, "rank"), plural(decision.recipe.schedule.steps, "step")
    files = plural(profile.files, "file")
    fused, all_of = len(installed(plan)), len(decision.fusions)
    rows = [
        ("model", f"{decision.architecture}, {count(profile.parameters.total)} parameters in {files}"),
        ("checkpoint", f"`{short(decision.checkpoint.digest)}`"),
        ("cluster", f"{cluster.name}: {ranks} of {cluster.device_name}, {cluster.backend}"),
        ("strategy", f"`{decision.strategy.text()}`"),
        ("LoRA", f"{roles}; {plural(len(targets), 'weight')}, {adapters} adapter parameters"),
        ("batch", f"{plural(batch.global_batch_sequences, 'sequence')} × {batch.sequence_tokens:,} tokens, {steps}"),
        ("fusions", f"{fused} of {all_of} run fused, the others eagerly" if all_of else "none"),
        *_code(plan),
        ("decision hash", f"`{plan.hashes.decision}`"),
        ("evidence hash", f"`{plan.hashes.evidence}`"),
    ]
    open_questions = sum(question.answer is None for question in decision.questions)
    if open_questions:
        rows.append(("still open", f"{plural(open_questions, 'question')}: no approval before it is answered"))
    return tuple(rows)


def _code(plan: AdaptationPlan) -> tuple[tuple[str, str], ...]:
    """What of the checkpoint's own code would run; nothing where none does."""
    code = plan.decision.remote_code
    if code is None:
        return ()
    return (("runs code of the checkpoint", f"{', '.join(sorted(code.files))}; hash `{code.sha256}`"),)


def way(provider: str, variant: str) -> str:
    """How a region runs, in one or two words: ``shardwright · kernel``, ``compile``, ``eager``."""
    return provider if variant in ("", provider) else f"{provider} · {variant}"


def beyond_times(reason: str) -> str:
    """A reason without the times that stand beside it as the gain."""
    return _TIMES.sub("", reason, count=1)
