"""JUnit XML: one case for each policy rule, legality obligation and check. Every CI reads it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from shardwright.schemas.errors import ShardwrightError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import PolicyFinding, PolicyResult
from shardwright.schemas.run import RunRecord


def junit(
    plan: AdaptationPlan | None,
    policy: PolicyResult | None = None,
    record: RunRecord | None = None,
    error: ShardwrightError | None = None,
) -> str:
    """A ``testsuites`` document.

    Args:
        plan: certificates become the suite ``certificates``; only obligations of chosen fusions can fail.
        policy: its rules become the suite ``policy``.
        record: its checks become the suite ``checks``.
        error: what ended the run, as a failed case of the suite ``run``.
    """
    root = ElementTree.Element("testsuites", name="shardwright")
    if plan is not None:
        installed = {f.proposal_id for f in plan.decision.fusions if f.provider != "eager" and not f.rejected}
        cases = [
            (
                proposal.id,
                o.name,
                None if o.status == "proved" or proposal.id not in installed else f"{o.status}: {o.evidence}",
            )
            for proposal in plan.evidence.proposals
            for o in proposal.certificate.obligations
        ]
        _suite(root, "certificates", cases)
    if policy is not None:
        _suite(root, "policy", [("policy", *_rule(finding)) for finding in policy.findings])
    if record is not None:
        _suite(root, "checks", [(c.stage, c.name, None if c.passed else c.evidence) for c in record.checks])
    _suite(root, "run", [("run", "finished", None if error is None else error.text())])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def junit_policies(results: Sequence[tuple[str, PolicyResult]]) -> str:
    """A suite for each plan with a case for each rule."""
    root = ElementTree.Element("testsuites", name="shardwright policy")
    for name, result in results:
        _suite(root, name, [("policy", *_rule(finding)) for finding in result.findings])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _rule(finding: PolicyFinding) -> tuple[str, str | None]:
    """A rule's name and why it denies; a warning or a waived rule is no failure."""
    return finding.rule, f"found {finding.found}, allowed {finding.allowed}" if finding.denies else None


def _suite(root: ElementTree.Element, name: str, cases: Sequence[tuple[str, str, str | None]]) -> None:
    failures = sum(problem is not None for _, _, problem in cases)
    suite = ElementTree.SubElement(root, "testsuite", name=name, tests=str(len(cases)), failures=str(failures))
    for group, case, problem in cases:
        element = ElementTree.SubElement(suite, "testcase", classname=f"{name}.{group}", name=case)
        if problem is not None:
            ElementTree.SubElement(element, "failure", message=_legal(problem.splitlines()[0])).text = _legal(problem)


def _legal(text: str) -> str:
    """Without control characters, which XML cannot hold."""
    return "".join(ch for ch in text if ch in "\t\n" or ord(ch) >= 32)
