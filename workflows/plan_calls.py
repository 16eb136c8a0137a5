"""The operator calls that a plan's fusions were priced with: cases to time them, and which have a time already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.schemas.errors import PlanError
from shardwright.schemas.fusion import Gain, Variant
from shardwright.schemas.ops import OperatorCall
from shardwright.schemas.plan import AdaptationPlan

if TYPE_CHECKING:
    from shardwright.agents.structure.measured import Seen
    from shardwright.kernels.called import Called

HEADS = ("operator", "dtype", "sizes", "pass", "time")


def own_gains(plan: AdaptationPlan) -> Iterator[tuple[str, Variant, Gain]]:
    """Proposal, variant and gain of whatever of ours could run where a fusion was accepted.

    A region that runs eagerly or compiled because ours is priced no faster counts too: a time may change that. One that
    was refused, superseded or rejected does not.
    """
    rejected = {fusion.proposal_id for fusion in plan.decision.fusions if fusion.rejected}
    for proposal in plan.evidence.proposals:
        if proposal.chosen is None or proposal.id in rejected:
            continue
        for variant in proposal.variants:
            if variant.available and variant.provider == "shardwright" and variant.gain is not None:
                yield proposal.id, variant, variant.gain


def calls_of(plan: AdaptationPlan, *, where: str) -> tuple[OperatorCall, ...]:
    """Each call once, in the plan's order; of two under the same key of a measured time the first.

    Raises:
        PlanError: ``no-sizes``: the plan was made before plans kept them.
    """
    from shardwright.kernels.evidence import shape_bucket

    found: dict[tuple[str, str, str], OperatorCall] = {}
    for proposal, variant, gain in own_gains(plan):
        if not gain.calls:
            raise PlanError(
                "no-sizes",
                f"made by an earlier version: it does not say at which sizes {variant.name} of {proposal} was priced",
                where=where,
                next_action="plan again with `shardwright plan`, and name the new plan",
            )
        for call in gain.calls:
            found.setdefault((call.op, call.dtype, shape_bucket(call.sizes)), call)
    return tuple(found.values())


def unmeasured(plan: AdaptationPlan, files: Sequence[Path]) -> int:
    """How many of the fusions that a plan runs call an operator at a size that nothing has measured.

    Args:
        files: measured times beside those that come with the package.
    """
    chosen = {proposal.id: proposal.chosen for proposal in plan.evidence.proposals}
    device = plan.evidence.cluster.device.name
    return sum(
        any(time_of(call, device, files) is None for call in gain.calls)
        for name, variant, gain in own_gains(plan)
        if chosen[name] == variant.name
    )


def time_of(call: OperatorCall, device: str, files: Sequence[Path]) -> Seen | None:
    """A time of a call on a device, at the operator's present source: the one that a plan for it would take.

    Args:
        files: measured times beside those that come with the package, the last first.
    """
    from shardwright.agents.structure.measured import find, shipped_evidence

    return find(call.op, "shardwright", call.sizes, device, call.dtype, (*shipped_evidence(), *files))


def cases_of(calls: Sequence[OperatorCall], ops: Sequence[str] | None, prefixes: Sequence[str]) -> tuple[Called, ...]:
    """Every call with its case, or with why it has none.

    Args:
        ops: operators to keep; all where ``None``.
        prefixes: beginnings of the names of the cases to keep; a call without a case is kept.
    """
    from shardwright.agents.structure.measured import MEASURED_PASSES
    from shardwright.kernels.called import called

    found = [called(call, MEASURED_PASSES) for call in calls if ops is None or call.op in ops]
    return tuple(one for one in found if one.case is None or one.case.case.startswith(tuple(prefixes)))


def listing(calls: Sequence[Called], device: str, evidence: Path | None) -> str:
    """One row a call: what would be timed, and which file has a time of the present source for this device."""
    from shardwright.kernels.evidence import shape_bucket

    files = (evidence,) if evidence is not None and evidence.is_file() else ()
    rows = [HEADS]
    for one in calls:
        call = one.call
        seen = time_of(call, device, files)
        there = "none" if seen is None else f"{seen.time.pass_name}, {'shipped' if not seen.file else evidence}"
        passes = "not timed" if one.case is None else ", ".join(one.case.passes)
        rows.append((call.op, call.dtype, shape_bucket(call.sizes), passes, there))
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
