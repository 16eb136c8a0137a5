"""Apply a policy to a plan. Pure: same plan, policy and day, same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path

from shardwright.schemas.approval import open_questions
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.errors import PolicyDenied, UsageError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import RULES, Policy, PolicyFinding, PolicyResult, Waiver
from shardwright.schemas.validation import parse_yaml
from shardwright.schemas.words import plural
from shardwright.workflows.texts import read_text

Findings = Iterable[PolicyFinding]


def load_policy(path: Path) -> Policy:
    """Read a policy file.

    Raises:
        UsageError: ``missing``, ``unreadable`` or ``invalid``, naming the fields.
    """
    if not path.is_file():
        raise UsageError("missing", "no such policy file", where=str(path), next_action="name a policy with --policy")
    return parse_yaml(Policy, read_text(path, UsageError), where=str(path), error=UsageError)


def evaluate(plan: AdaptationPlan, policy: Policy, today: str | None = None) -> PolicyResult:
    """Every rule with what it found. The plan is approved only where none denies and ``approve`` is true.

    Args:
        today: day for the waivers' expiry, ``2026-01-31``; by default the machine's.
    """
    day = today or date.today().isoformat()
    findings = tuple(_weighed(finding, policy, day) for rule in RULES for finding in _EVALUATORS[rule](plan, policy))
    approves = policy.approve and not any(finding.denies for finding in findings)
    return PolicyResult(policy_sha256=sha256_of(policy), findings=findings, approves=approves)


def _weighed(finding: PolicyFinding, policy: Policy, day: str) -> PolicyFinding:
    """The finding with its severity and, where it is broken, the waiver that holds on this day."""
    names = (finding.rule, finding.rule.split("/", 1)[0])
    severity = "warn" if any(name in policy.warn for name in names) else "deny"
    update: dict[str, object] = {"severity": severity}
    waivers = [waiver for waiver in policy.waivers if waiver.rule in names] if not finding.passed else []
    if valid := [waiver for waiver in waivers if waiver.until >= day]:
        update["waived"] = _words(valid[0])
    elif waivers:
        update["found"] = f"{finding.found} (waiver of {waivers[0].owner} ended on {waivers[0].until})"
    return finding.model_copy(update=update)


def _words(waiver: Waiver) -> str:
    return f"waived by {waiver.owner} until {waiver.until}: {waiver.reason}"


def installed(plan: AdaptationPlan) -> tuple[FusionDecision, ...]:
    """Fusions that change the model: not rejected and not eager."""
    return tuple(f for f in plan.decision.fusions if not f.rejected and f.provider != "eager")


def _memory(plan: AdaptationPlan, policy: Policy) -> Findings:
    memory = plan.evidence.cost.memory
    yield PolicyFinding(
        rule="max_memory_fraction",
        passed=memory.fraction <= policy.max_memory_fraction,
        found=f"{memory.fraction:.4g} ({memory.reserved_bytes:,} of {memory.budget_bytes:,} bytes)",
        allowed=f"≤ {policy.max_memory_fraction:g}",
    )


def _step(plan: AdaptationPlan, policy: Policy) -> Findings:
    if policy.max_step_ms is not None:
        found = plan.evidence.cost.time.step_ms
        passed = found <= policy.max_step_ms
        yield PolicyFinding(
            rule="max_step_ms", passed=passed, found=f"{found:g} ms", allowed=f"≤ {policy.max_step_ms:g} ms"
        )


def _gpu_hours(plan: AdaptationPlan, policy: Policy) -> Findings:
    if policy.max_gpu_hours is not None:
        found = plan.evidence.cost.gpu_hours
        passed = found <= policy.max_gpu_hours
        yield PolicyFinding(
            rule="max_gpu_hours", passed=passed, found=f"{found:g}", allowed=f"≤ {policy.max_gpu_hours:g}"
        )


def gains(plan: AdaptationPlan) -> dict[str, tuple[float, str]]:
    """Installed fusion → speed-up beside eager and where the number comes from; 0 and ``unknown`` without one."""
    variants = {(p.id, v.name): v for p in plan.evidence.proposals for v in p.variants}
    found = {}
    for fusion in installed(plan):
        variant = variants.get((fusion.proposal_id, fusion.variant))
        gain = variant.gain if variant is not None else None
        found[fusion.proposal_id] = (gain.speedup, str(gain.origin)) if gain is not None else (0.0, "unknown")
    return found


def _speedup(plan: AdaptationPlan, policy: Policy) -> Findings:
    if policy.min_speedup is not None:
        slow = [f"{name} ×{x:.3g}" for name, (x, _) in gains(plan).items() if x < policy.min_speedup]
        found = ", ".join(slow) or f"all {len(gains(plan))} installed fusions reach it"
        yield PolicyFinding(rule="min_speedup", passed=not slow, found=found, allowed=f"≥ ×{policy.min_speedup:g} each")


def _listed(rule: str, used: Iterable[str], allowed: tuple[str, ...]) -> PolicyFinding:
    """A finding for values that must all stand in an allow-list."""
    names = sorted(set(used))
    refused = [name for name in names if name not in allowed]
    found = ", ".join(names) or "none"
    return PolicyFinding(
        rule=rule,
        passed=not refused,
        found=f"{found} (not allowed: {', '.join(refused)})" if refused else found,
        allowed=", ".join(allowed) or "none",
    )


def _providers(plan: AdaptationPlan, policy: Policy) -> Findings:
    used = (fusion.provider for fusion in plan.decision.fusions if not fusion.rejected)
    yield _listed("allow_providers", used, policy.allow_providers)


def _kernels(plan: AdaptationPlan, policy: Policy) -> Findings:
    if policy.allow_kernels is not None:
        used = (op for fusion in installed(plan) for op in (fusion.op, *fusion.beside) if op != "-")
        yield _listed("allow_kernels", used, policy.allow_kernels)


def _dtypes(plan: AdaptationPlan, policy: Policy) -> Findings:
    if policy.allow_dtypes is not None:
        yield _listed("allow_dtypes", plan.decision.recipe.precision.model_dump().values(), policy.allow_dtypes)


def _axes(plan: AdaptationPlan, policy: Policy) -> Findings:
    strategy = plan.decision.strategy
    values = {**strategy.whole(), **strategy.mesh.whole()}
    for axis, allowed in sorted(policy.allow_axes.items()):
        name = axis.removeprefix("mesh.")
        found = values.get(name, "no such axis")
        yield PolicyFinding(
            rule=f"allow_axes/{name}",
            passed=any(type(found) is type(value) and found == value for value in allowed),
            found=str(found),
            allowed=", ".join(map(str, allowed)),
        )


def _licences(plan: AdaptationPlan, policy: Policy) -> Findings:
    if policy.allow_licences is not None:
        stated = plan.evidence.profile.licence
        yield _listed("allow_licences", [stated or "none stated"], policy.allow_licences)


def _remote_code(plan: AdaptationPlan, policy: Policy) -> Findings:
    if not policy.allow_remote_code:
        code = plan.decision.remote_code
        needed = code is not None or not plan.evidence.profile.transformers_class
        yield PolicyFinding(
            rule="allow_remote_code",
            passed=not needed,
            found=f"the model needs the checkpoint's own code{f' {code.sha256}' if code is not None else ''}"
            if needed
            else "the installed transformers builds it",
            allowed="no code from a checkpoint",
        )


def _measured(plan: AdaptationPlan, policy: Policy) -> Findings:
    cost = plan.evidence.cost
    origins = {
        "gains": {name: origin for name, (_, origin) in gains(plan).items()},
        "memory": {c.name: str(c.origin) for c in cost.memory.components if c.bytes},
        "time": {c.name: str(c.origin) for c in cost.time.components if c.milliseconds},
    }
    for name in policy.require_measured:
        other = [f"{item} ({origin})" for item, origin in origins[name].items() if origin != "measured"]
        yield PolicyFinding(
            rule=f"require_measured/{name}",
            passed=not other,
            found=f"not measured: {', '.join(other)}" if other else f"all {len(origins[name])} measured",
            allowed="measured",
        )


def _obligations(plan: AdaptationPlan, policy: Policy) -> Findings:
    certificates = {p.id: p.certificate for p in plan.evidence.proposals}
    for name in policy.require_obligations:
        missing = []
        for fusion in installed(plan):
            certificate = certificates.get(fusion.proposal_id)
            proved = certificate is not None and any(
                o.name == name and o.status == "proved" for o in certificate.obligations
            )
            if not proved:
                missing.append(fusion.proposal_id)
        yield PolicyFinding(
            rule=f"require_obligations/{name}",
            passed=not missing,
            found=f"not proved for {', '.join(missing)}"
            if missing
            else f"proved for {plural(len(installed(plan)), 'fusion')}",
            allowed="proved for every installed fusion",
        )


def _questions(plan: AdaptationPlan, policy: Policy) -> Findings:
    waiting = open_questions(plan)
    yield PolicyFinding(rule="open_questions", passed=not waiting, found=", ".join(waiting) or "none", allowed="none")


_EVALUATORS: dict[str, Callable[[AdaptationPlan, Policy], Findings]] = {
    "max_memory_fraction": _memory,
    "max_step_ms": _step,
    "max_gpu_hours": _gpu_hours,
    "min_speedup": _speedup,
    "allow_providers": _providers,
    "allow_kernels": _kernels,
    "allow_dtypes": _dtypes,
    "allow_axes": _axes,
    "allow_licences": _licences,
    "allow_remote_code": _remote_code,
    "require_measured": _measured,
    "require_obligations": _obligations,
    "open_questions": _questions,
}


def denied(result: PolicyResult, *, where: str) -> PolicyDenied:
    """The error for a plan that breaks the policy."""
    broken = "; ".join(f"{f.rule}: found {f.found}, allowed {f.allowed}" for f in result.violations)
    return PolicyDenied(
        "violated",
        broken,
        where=where,
        next_action="change the policy, or edit the plan with `shardwright review` so that it complies",
    )
