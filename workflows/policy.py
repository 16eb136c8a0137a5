"""Apply a policy to a plan. Pure: same plan and policy, same result."""

from __future__ import annotations

from pathlib import Path

from shardwright.schemas.approval import open_questions
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.errors import PolicyDenied, UsageError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import Policy, PolicyFinding, PolicyResult
from shardwright.schemas.validation import parse_yaml


def load_policy(path: Path) -> Policy:
    """Read a policy file.

    Raises:
        UsageError: ``missing``, ``unreadable`` or ``invalid``, naming the fields.
    """
    if not path.is_file():
        raise UsageError("missing", "no such policy file", where=str(path), next_action="name a policy with --policy")
    return parse_yaml(Policy, path.read_text(encoding="utf-8"), where=str(path), error=UsageError)


def evaluate(plan: AdaptationPlan, policy: Policy) -> PolicyResult:
    """Every rule with what it found. The plan is approved only where all pass and ``approve`` is true."""
    findings = (_memory(plan, policy), _providers(plan, policy), *_obligations(plan, policy), _questions(plan))
    approves = policy.approve and all(finding.passed for finding in findings)
    return PolicyResult(policy_sha256=sha256_of(policy), findings=findings, approves=approves)


def installed(plan: AdaptationPlan) -> tuple[FusionDecision, ...]:
    """Fusions that change the model: not rejected and not eager."""
    return tuple(f for f in plan.decision.fusions if not f.rejected and f.provider != "eager")


def _memory(plan: AdaptationPlan, policy: Policy) -> PolicyFinding:
    memory = plan.evidence.cost.memory
    return PolicyFinding(
        rule="max_memory_fraction",
        passed=memory.fraction <= policy.max_memory_fraction,
        found=f"{memory.fraction:.4g} ({memory.reserved_bytes:,} of {memory.budget_bytes:,} bytes)",
        allowed=f"≤ {policy.max_memory_fraction:g}",
    )


def _providers(plan: AdaptationPlan, policy: Policy) -> PolicyFinding:
    used = sorted({fusion.provider for fusion in plan.decision.fusions if not fusion.rejected})
    refused = [provider for provider in used if provider not in policy.allow_providers]
    found = ", ".join(used) or "none"
    return PolicyFinding(
        rule="allow_providers",
        passed=not refused,
        found=f"{found} (not allowed: {', '.join(refused)})" if refused else found,
        allowed=", ".join(policy.allow_providers) or "none",
    )


def _obligations(plan: AdaptationPlan, policy: Policy) -> tuple[PolicyFinding, ...]:
    certificates = {p.id: p.certificate for p in plan.evidence.proposals}
    findings = []
    for name in policy.require_obligations:
        missing = []
        for fusion in installed(plan):
            certificate = certificates.get(fusion.proposal_id)
            proved = certificate is not None and any(
                o.name == name and o.status == "proved" for o in certificate.obligations
            )
            if not proved:
                missing.append(fusion.proposal_id)
        findings.append(
            PolicyFinding(
                rule=f"require_obligations/{name}",
                passed=not missing,
                found=f"not proved for {', '.join(missing)}"
                if missing
                else f"proved for {len(installed(plan))} fusions",
                allowed="proved for every installed fusion",
            )
        )
    return tuple(findings)


def _questions(plan: AdaptationPlan) -> PolicyFinding:
    waiting = open_questions(plan)
    return PolicyFinding(rule="open_questions", passed=not waiting, found=", ".join(waiting) or "none", allowed="none")


def denied(result: PolicyResult, *, where: str) -> PolicyDenied:
    """The error for a plan that breaks the policy."""
    broken = "; ".join(f"{f.rule}: found {f.found}, allowed {f.allowed}" for f in result.violations)
    return PolicyDenied(
        "violated",
        broken,
        where=where,
        next_action="change the policy, or edit the plan with `shardwright review` so that it complies",
    )
