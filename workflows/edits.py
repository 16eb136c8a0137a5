"""A reviewer's changes: each makes a child plan, re-certified and re-costed, to be approved anew."""

from __future__ import annotations

from shardwright.schemas.errors import LegalityError, UsageError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.plan import AdaptationPlan, Edit
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.workflows.certifying import certify, fitting
from shardwright.workflows.edited_strategy import completed, flat
from shardwright.workflows.stages import Stages

EDITED = "A reviewer edited this plan; the words that follow are about the one that the search chose."


def edit_axes(
    stages: Stages, plan: AdaptationPlan, values: dict[str, str], *, reason: str, actor: str
) -> AdaptationPlan:
    """A child plan with other values on some axes.

    What is not named follows: ``mesh.shard`` and ``mesh.replicate`` the number of ranks, ``accumulation_steps`` the
    global batch, ``overlap`` and its chunks, ``checkpointing`` and its layers each other, the experts' places the loads
    that the plan was made with.

    Args:
        values: axis → new value as text, for example ``{"mesh.ep": "2", "mesh.shard": "1"}``.

    Raises:
        UsageError: ``unknown-axis``, ``bad-value`` or ``no-reason``.
        LegalityError, InfeasibleError: the edited strategy cannot run; the nearest legal value is named;
            ``placement-needs-loads`` where experts are to be placed by loads, and the plan was made without any.
    """
    _need_reason(reason)
    before = plan.decision.strategy
    after = _placed(stages, plan, completed(plan, values))
    return _child(stages, plan, after, _differences(before, after, reason, actor), rejections(plan))


def _placed(stages: Stages, plan: AdaptationPlan, after: ParallelStrategy) -> ParallelStrategy:
    """The strategy with places for its experts, where it places them and has none, or those of another mesh.

    Raises:
        LegalityError: ``placement-needs-loads``.
    """
    before, evidence = plan.decision.strategy, plan.evidence
    same = (before.mesh.ep, before.redundant_experts) == (after.mesh.ep, after.redundant_experts)
    if after.expert_placement != "balanced" or after.mesh.ep == 1 or (after.expert_slots and same):
        return after
    if stages.place is None:
        raise LegalityError(
            "placement-needs-loads",
            f"experts placed by loads over ep {after.mesh.ep}, and this plan was made without loads to place them by",
            where="--edit expert_placement",
            next_action="plan again with `shardwright plan --load-profile RUN`, or choose expert_placement=contiguous",
        )
    bare = after.model_copy(update={"expert_slots": ()})
    broken = stages.violations(evidence.profile, plan.decision.recipe, evidence.cluster, bare)
    return bare if broken else stages.place(bare)


def choose_variant(
    stages: Stages, plan: AdaptationPlan, proposal_id: str, variant: str, *, reason: str, actor: str
) -> AdaptationPlan:
    """A child plan in which one fusion's region runs by another of its variants.

    Raises:
        UsageError: ``unknown-proposal``, ``unknown-variant``, ``no-change`` or ``no-reason``.
        LegalityError: ``variant-does-not-apply`` on the plan's mesh and device.
    """
    _need_reason(reason)
    current = _fusion(plan, proposal_id)
    proposal = next((p for p in plan.evidence.proposals if p.id == proposal_id), None)
    known = {v.name: v for v in proposal.variants} if proposal is not None else {}
    if variant not in known or not known[variant].available:
        usable = ", ".join(name for name, v in known.items() if v.available)
        raise UsageError(
            "unknown-variant",
            f"no usable variant {variant!r} of {proposal_id}",
            where=f"plan {plan.hashes.decision[:16]}…",
            next_action=f"name one of: {usable or 'none'}",
        )
    if current.variant == variant and not current.rejected:
        raise UsageError("no-change", f"{variant} runs already", where=proposal_id, next_action="accept it as it is")
    edit = Edit(field=f"fusions.{proposal_id}.variant", old=current.variant, new=variant, reason=reason, actor=actor)
    kept = {name: why for name, why in rejections(plan).items() if name != proposal_id}
    return _child(stages, plan, plan.decision.strategy, (edit,), kept, {**choices(plan), proposal_id: variant})


def choices(plan: AdaptationPlan) -> dict[str, str]:
    """Proposal id → variant that a reviewer chose, the last word of each; rejected ones are left out."""
    found = {}
    for edit in plan.decision.edits:
        if edit.field.startswith("fusions.") and edit.field.endswith(".variant"):
            found[edit.field.removeprefix("fusions.").removesuffix(".variant")] = str(edit.new)
    return {name: variant for name, variant in found.items() if name not in rejections(plan)}


def _fusion(plan: AdaptationPlan, proposal_id: str) -> FusionDecision:
    current = {fusion.proposal_id: fusion for fusion in plan.decision.fusions}
    if proposal_id not in current:
        raise UsageError(
            "unknown-proposal",
            f"no fusion {proposal_id!r} in this plan",
            where=f"plan {plan.hashes.decision[:16]}…",
            next_action=f"name one of: {', '.join(current) or 'none, the plan has no fusion'}",
        )
    return current[proposal_id]


def reject_proposal(
    stages: Stages, plan: AdaptationPlan, proposal_id: str, *, reason: str, actor: str
) -> AdaptationPlan:
    """A child plan in which one fusion's region runs eagerly.

    Raises:
        UsageError: ``unknown-proposal``, ``already-rejected`` or ``no-reason``.
    """
    _need_reason(reason)
    current = _fusion(plan, proposal_id)
    if current.rejected:
        raise UsageError(
            "already-rejected",
            f"{proposal_id} is rejected already: {current.reason}",
            where=f"plan {plan.hashes.decision[:16]}…",
            next_action="nothing to do",
        )
    edit = Edit(field=f"fusions.{proposal_id}", old=current.provider, new="eager", reason=reason, actor=actor)
    return _child(stages, plan, plan.decision.strategy, (edit,), {**rejections(plan), proposal_id: reason})


def answer_question(plan: AdaptationPlan, question_id: str, answer: str, *, reason: str, actor: str) -> AdaptationPlan:
    """A child plan in which a question has its answer; cost and fusions stay as they are.

    Raises:
        UsageError: ``unknown-question``, ``bad-answer``, ``no-change`` or ``no-reason``.
    """
    _need_reason(reason)
    asked = {question.id: question for question in plan.decision.questions}
    where = f"plan {plan.hashes.decision[:16]}…"
    if question_id not in asked:
        known = f"name one of: {', '.join(asked)}" if asked else "the plan asks nothing"
        raise UsageError("unknown-question", f"no question {question_id!r}", where=where, next_action=known)
    question = asked[question_id]
    if answer not in question.choices:
        raise UsageError(
            "bad-answer",
            f"{answer!r} is no answer to {question.text!r}",
            where=question_id,
            next_action=f"choose one of: {', '.join(question.choices)}",
        )
    if answer == question.answer:
        raise UsageError("no-change", f"{answer} is the answer already", where=question_id, next_action="nothing to do")
    edit = Edit(field=f"questions.{question_id}", old=question.answer, new=answer, reason=reason, actor=actor)
    answered = tuple(
        item.model_copy(update={"answer": answer}) if item.id == question_id else item
        for item in plan.decision.questions
    )
    child = plan.decision.model_copy(
        update={
            "parent_hash": plan.hashes.decision,
            "questions": answered,
            "edits": (*plan.decision.edits, edit),
        }
    )
    return AdaptationPlan.seal(child, plan.evidence)


def rejections(plan: AdaptationPlan) -> dict[str, str]:
    """Proposal id → reason, of every fusion rejected so far."""
    return {fusion.proposal_id: fusion.reason for fusion in plan.decision.fusions if fusion.rejected}


def _differences(before: ParallelStrategy, after: ParallelStrategy, reason: str, actor: str) -> tuple[Edit, ...]:
    old, new = flat(before.whole()), flat(after.whole())
    changed = [key for key in new if old[key] != new[key]]
    if not changed:
        raise UsageError(
            "no-change", "the edit changes nothing", where="--edit", next_action="approve the plan as it is"
        )
    return tuple(
        Edit(field=f"strategy.{key}", old=old[key], new=new[key], reason=reason, actor=actor) for key in changed
    )


def _need_reason(reason: str) -> None:
    if not reason.strip():
        raise UsageError("no-reason", "a change needs a reason", where="--reason", next_action="say why with --reason")


def _child(
    stages: Stages,
    plan: AdaptationPlan,
    strategy: ParallelStrategy,
    edits: tuple[Edit, ...],
    rejected: dict[str, str],
    chosen: dict[str, str] | None = None,
) -> AdaptationPlan:
    evidence, decision = plan.evidence, plan.decision
    joined = fitting(
        certify(
            stages,
            evidence.profile,
            decision.recipe,
            evidence.cluster,
            decision.lora_targets,
            evidence.proposals,
            strategy,
            rejected,
            choices(plan) if chosen is None else chosen,
        )
    )
    child = decision.model_copy(
        update={
            "parent_hash": plan.hashes.decision,
            "strategy": joined.strategy,
            "fusions": joined.fusions,
            "edits": (*decision.edits, *edits),
        }
    )
    words = evidence.explanation
    if words and words[0] != EDITED:
        words = (EDITED, *words)
    priced = {"cost": joined.cost, "plain": joined.plain}
    why = evidence.model_copy(update={**priced, "proposals": joined.proposals, "explanation": words})
    return AdaptationPlan.seal(child, why)
