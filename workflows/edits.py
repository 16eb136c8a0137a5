"""A reviewer's changes: each makes a child plan, re-certified and re-costed, to be approved anew."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwright.schemas.errors import UsageError
from shardwright.schemas.plan import AdaptationPlan, Edit
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.schemas.validation import explain
from shardwright.workflows.planning import join
from shardwright.workflows.stages import Stages


def edit_axes(
    stages: Stages, plan: AdaptationPlan, values: dict[str, str], *, reason: str, actor: str
) -> AdaptationPlan:
    """A child plan with other values on some axes.

    Where the mesh or the micro-batch changes and ``accumulation_steps`` is not named, it follows from the global batch.

    Args:
        values: axis → new value as text, for example ``{"mesh.ep": "2", "mesh.shard": "1"}``.

    Raises:
        UsageError: ``unknown-axis``, ``bad-value`` or ``no-reason``.
        LegalityError, InfeasibleError: the edited strategy cannot run; the nearest legal value is named.
    """
    _need_reason(reason)
    before = plan.decision.strategy
    after = _accumulated(plan, edited(before, values), values)
    return _child(stages, plan, after, _differences(before, after, reason, actor), rejections(plan))


def reject_proposal(
    stages: Stages, plan: AdaptationPlan, proposal_id: str, *, reason: str, actor: str
) -> AdaptationPlan:
    """A child plan in which one fusion's region runs eagerly.

    Raises:
        UsageError: ``unknown-proposal``, ``already-rejected`` or ``no-reason``.
    """
    _need_reason(reason)
    current = {fusion.proposal_id: fusion for fusion in plan.decision.fusions}
    if proposal_id not in current:
        raise UsageError(
            "unknown-proposal",
            f"no fusion {proposal_id!r} in this plan",
            where=f"plan {plan.hashes.decision[:16]}…",
            next_action=f"name one of: {', '.join(current) or 'none, the plan has no fusion'}",
        )
    if current[proposal_id].rejected:
        raise UsageError(
            "already-rejected",
            f"{proposal_id} is rejected already: {current[proposal_id].reason}",
            where=f"plan {plan.hashes.decision[:16]}…",
            next_action="nothing to do",
        )
    edit = Edit(
        field=f"fusions.{proposal_id}", old=current[proposal_id].provider, new="eager", reason=reason, actor=actor
    )
    return _child(stages, plan, plan.decision.strategy, (edit,), {**rejections(plan), proposal_id: reason})


def rejections(plan: AdaptationPlan) -> dict[str, str]:
    """Proposal id → reason, of every fusion rejected so far."""
    return {fusion.proposal_id: fusion.reason for fusion in plan.decision.fusions if fusion.rejected}


def edited(strategy: ParallelStrategy, values: dict[str, str]) -> ParallelStrategy:
    """The strategy with other values; types and ranges are checked, legality is not."""
    raw: dict[str, Any] = strategy.model_dump()
    for axis, text in values.items():
        group, _, name = axis.rpartition(".")
        target = raw["mesh"] if group == "mesh" else raw if not group else {}
        if name not in target or name == "mesh":
            known = [f"mesh.{field}" for field in Mesh.model_fields] + [f for f in raw if f != "mesh"]
            raise UsageError(
                "unknown-axis", f"no axis {axis!r}", where="--edit", next_action=f"name one of: {', '.join(known)}"
            )
        target[name] = text
    try:
        return TypeAdapter(ParallelStrategy).validate_python(raw)
    except ValidationError as error:
        raise UsageError("bad-value", explain(error), where="--edit", next_action="correct the value") from error


def _accumulated(plan: AdaptationPlan, strategy: ParallelStrategy, values: dict[str, str]) -> ParallelStrategy:
    if "accumulation_steps" in values:
        return strategy
    wanted = plan.decision.recipe.batch.global_batch_sequences
    steps, rest = divmod(wanted, strategy.mesh.data_ranks * strategy.micro_batch_sequences)
    return strategy.model_copy(update={"accumulation_steps": steps}) if steps and not rest else strategy


def _differences(before: ParallelStrategy, after: ParallelStrategy, reason: str, actor: str) -> tuple[Edit, ...]:
    old, new = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    changed = [key for key in new if old[key] != new[key]]
    if not changed:
        raise UsageError(
            "no-change", "the edit changes nothing", where="--edit", next_action="approve the plan as it is"
        )
    return tuple(
        Edit(field=f"strategy.{key}", old=old[key], new=new[key], reason=reason, actor=actor) for key in changed
    )


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping of dotted names."""
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            leaves.update(flat(item, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = item
    return leaves


def _need_reason(reason: str) -> None:
    if not reason.strip():
        raise UsageError("no-reason", "a change needs a reason", where="--reason", next_action="say why with --reason")


def _child(
    stages: Stages,
    plan: AdaptationPlan,
    strategy: ParallelStrategy,
    edits: tuple[Edit, ...],
    rejected: dict[str, str],
) -> AdaptationPlan:
    evidence, decision = plan.evidence, plan.decision
    joined = join(
        stages,
        evidence.profile,
        decision.recipe,
        evidence.cluster,
        decision.lora_targets,
        evidence.proposals,
        strategy,
        rejected,
    )
    child = decision.model_copy(
        update={
            "parent_hash": plan.hashes.decision,
            "strategy": joined.strategy,
            "fusions": joined.fusions,
            "edits": (*decision.edits, *edits),
        }
    )
    why = evidence.model_copy(update={"proposals": joined.proposals, "cost": joined.cost})
    return AdaptationPlan.seal(child, why)
