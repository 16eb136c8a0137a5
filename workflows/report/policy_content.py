"""What a policy found, as blocks for every writer."""

from __future__ import annotations

from shardwright.schemas.policy import PolicyFinding, PolicyResult
from shardwright.workflows.report.blocks import Block, Document, Heading, Table


def verdict_text(result: PolicyResult) -> str:
    """``approves``, ``denies (2 rules)`` or ``leaves it to a person``, in words."""
    if result.violations:
        return f"denies ({len(result.violations)} of {len(result.findings)} rules)"
    return "approves" if result.approves else "leaves it to a person"


def finding_mark(finding: PolicyFinding) -> str:
    """A mark and a word for one rule."""
    if finding.passed:
        return "✓ passes"
    if finding.denies:
        return "✗ denies"
    return "~ waived" if finding.waived else "! warns"


def policy_document(results: list[tuple[str, PolicyResult]]) -> Document:
    """A table of rules for each plan."""
    blocks: list[Block] = []
    for name, result in results:
        rows = tuple(
            (f"`{f.rule}`", finding_mark(f), f"{f.found}{f'; {f.waived}' if f.waived else ''}", f.allowed)
            for f in result.findings
        )
        blocks += [Heading(f"{name}: {verdict_text(result)}", 3), Table(("rule", "result", "found", "allowed"), rows)]
    return tuple(blocks)
