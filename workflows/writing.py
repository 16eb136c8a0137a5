"""A written kernel for one region of a plan: the gates again, torch.compile first, then a model under a policy.

What passes is kept as a candidate; a person approves it by its hash, and no plan installs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.errors import CheckFailed, LegalityError, LlmError, PolicyDenied, StalePlanError, UsageError
from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import Policy
from shardwright.schemas.words import plural
from shardwright.workflows.advising import wire_for
from shardwright.workflows.request import LlmRequest, load_request, request_path

if TYPE_CHECKING:
    from shardwright.agents.llm.kernel_writer.candidates import Candidate
    from shardwright.agents.llm.kernel_writer.compiled import Compiled
    from shardwright.agents.structure.patterns import Match

TOKENS = {"cpu": 64, "cuda": 8192}
"""T at which torch.compile is timed; on a CUDA device that of the judge."""


@dataclass(frozen=True)
class Written:
    """What came of it."""

    path: Path
    candidate: Candidate
    compiled: Compiled
    attempts: int
    spent: tuple[str, ...]


def demand_policy(policy: Policy, where: str) -> None:
    """Refuse where the policy does not let a model write kernels.

    Raises:
        PolicyDenied: ``written-kernels``.
    """
    if not policy.allow_written_kernels:
        raise PolicyDenied(
            "written-kernels",
            "allow_written_kernels: found false, allowed only true",
            where=where,
            next_action="set `allow_written_kernels: true` in the policy, if a model may write kernels here",
        )


def writable(plan: AdaptationPlan, proposal_id: str) -> FusionProposal:
    """The proposal, where it is accepted and no kernel of ours computes it.

    Raises:
        UsageError: ``no-proposal``, or ``has-kernel``.
        LegalityError: ``refused``: its certificate refuses it.
    """
    proposals = {one.id: one for one in plan.evidence.proposals}
    open_ones = [one.id for one in proposals.values() if one.certificate.legal and not _kernels(one)]
    advice = f"regions without a kernel: {', '.join(open_ones) or 'none in this plan'}"
    found = proposals.get(proposal_id)
    if found is None:
        raise UsageError(
            "no-proposal", f"the plan has no proposal {proposal_id!r}", where="--region", next_action=advice
        )
    if not found.certificate.legal:
        raise LegalityError("refused", found.certificate.refused_because(), where=proposal_id, next_action=advice)
    if kernels := _kernels(found):
        raise UsageError(
            "has-kernel", f"{', '.join(kernels)} computes it already", where=proposal_id, next_action=advice
        )
    return found


def _kernels(proposal: FusionProposal) -> list[str]:
    return [variant.op for variant in proposal.variants if variant.provider == "shardwright"]


def write_for_region(
    plan: AdaptationPlan,
    checkpoint: Path,
    proposal_id: str,
    asked: LlmRequest,
    out: Path,
    tell: Callable[[str], None],
) -> Written:
    """Find the region again, prove it again, compile it, and let a model write a kernel for it.

    Args:
        checkpoint: folder; only its config is read.
        out: folder of candidates; the exchanges are kept there, too.
        tell: what is being done.

    Raises:
        UsageError, LegalityError: as ``writable``; ``one-shape``; or it is illegal on this machine's versions.
        StalePlanError: ``region``: the captured graph no longer has it.
        LlmUnavailableError: the server cannot be used.
        CheckFailed: ``kernel-refused``: no attempt passed.
        LlmError: a spent budget, a failed server, or no sandbox.
    """
    import torch

    from shardwright.agents.llm.advise import Session
    from shardwright.agents.llm.chat import Chat
    from shardwright.agents.llm.kernel_writer.candidates import keep, record
    from shardwright.agents.llm.kernel_writer.compiled import compile_region
    from shardwright.agents.llm.kernel_writer.task import Task
    from shardwright.agents.llm.kernel_writer.writer import write_kernel

    match = _found_again(plan, checkpoint, writable(plan, proposal_id))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task = Task.of(match)
    if not task.follows_tokens:
        raise LegalityError(
            "one-shape",
            "its shapes do not follow the number of tokens, so a kernel could be judged on one shape alone",
            where=proposal_id,
            next_action="torch.compile serves this region; write the kernel by hand, as docs/guide says",
        )
    compiled = compile_region(task, device, TOKENS[device])
    tell(
        f"torch.compile on {device}: {compiled.ms:.4g} ms, eager {compiled.eager_ms:.4g} ms, "
        f"error {compiled.over_eager:.3g} of eager's{'' if compiled.right else ': wrong here'}"
    )
    name = sha256_of([proposal_id])[:16]
    session = Session("required", asked.endpoint, wire_for(asked), out / f"{name}.llm.jsonl")
    try:
        session.open()
        assert session.can is not None, "a required model was probed"
        bandwidth = plan.evidence.cluster.device.memory_bandwidth_bytes_per_s
        floor_ms = 1e3 * compiled.floor_bytes / bandwidth if device == "cuda" else 0.0
        chat = Chat(session.recorder, session.budget, session.can)
        outcome = write_kernel(chat, task, device=device, floor_ms=floor_ms)
    except LlmError as error:
        tell(f"after {plural(session.budget.calls, 'call')}: {error.what}")
        raise
    finally:
        spent = session.record([]).spent()
    if not outcome.verdict.accepted:
        raise CheckFailed(
            "kernel-refused",
            f"{plural(outcome.attempts, 'attempt')}, none passed; the last: {outcome.verdict.because}",
            where=proposal_id,
            next_action="torch.compile serves this region; ask another model, or write the kernel by hand",
        )
    digest = sha256_of([match.region.canonical.digest, *match.region.canonical_ids])
    candidate = record(outcome.source, proposal_id, digest, asked.endpoint.model, device, outcome.verdict, compiled.ms)
    return Written(keep(out, outcome.source, candidate), candidate, compiled, outcome.attempts, spent)


def _found_again(plan: AdaptationPlan, checkpoint: Path, proposal: FusionProposal) -> Match:
    """The proposal's nodes in a new capture, certified with this machine's versions."""
    from shardwright.agents.llm.open_regions import OpenRegion
    from shardwright.agents.llm.proposed import as_match
    from shardwright.agents.structure.certify import certify
    from shardwright.agents.structure.run import open_structure

    opened = open_structure(checkpoint, plan.evidence.profile, plan.evidence.cluster, plan.decision.recipe)
    wanted = proposal.certificate.matched_nodes
    for captured, canonical in opened.pairs:
        if canonical is None or captured.kind != proposal.region.layer_kind:
            continue
        if set(wanted) <= set(canonical.by_id):
            match = as_match(OpenRegion(captured, canonical, wanted))
            certificate = certify(match, opened.facts)
            if not certificate.legal:
                raise LegalityError(
                    "refused",
                    certificate.refused_because(),
                    where=proposal.id,
                    next_action="plan again with this machine's versions",
                )
            if certificate.graph_digest != proposal.certificate.graph_digest:
                break
            return match
    raise StalePlanError(
        "region",
        "the captured graph is not the one that the plan's region lies in",
        where=proposal.id,
        next_action="plan again: the checkpoint's config or a library's version has changed",
    )


def checkpoint_of(plan_file: Path, given: Path | None) -> Path:
    """The checkpoint's folder: the one given, or that of the run that the plan lies in.

    Raises:
        UsageError: ``no-checkpoint``.
    """
    if given is not None:
        return given
    if request_path(plan_file.parent).is_file():
        return Path(load_request(plan_file.parent).checkpoint)
    raise UsageError(
        "no-checkpoint",
        "the plan lies in no run folder",
        where=str(plan_file),
        next_action="name the checkpoint's folder with --checkpoint",
    )


def demand_fingerprint(plan: AdaptationPlan, checkpoint: Path) -> None:
    """Refuse another checkpoint than the plan's.

    Raises:
        CheckpointError: the folder cannot be read.
        StalePlanError: ``checkpoint``.
    """
    from shardwright.checkpoints.fingerprint import fingerprint

    seen, made = fingerprint(checkpoint).digest, plan.decision.checkpoint.digest
    if seen != made:
        raise StalePlanError(
            "checkpoint",
            f"the folder's fingerprint is {seen[:16]}…, the plan's {made[:16]}…",
            where=str(checkpoint),
            next_action="name the checkpoint that the plan was made for",
        )
