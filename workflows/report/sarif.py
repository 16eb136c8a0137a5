"""SARIF 2.1.0: what the policy found, and what ended a run, for code-scanning pages."""

from __future__ import annotations

import json
from typing import Any

from shardwright import __version__
from shardwright.schemas.errors import ShardwrightError
from shardwright.schemas.policy import PolicyFinding, PolicyResult
from shardwright.schemas.run import RunRecord

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST = 5000
"""Results that code-scanning pages show; more are left out, and the last one says so."""


def sarif(
    results: list[tuple[str, PolicyResult]],
    *,
    policy_file: str,
    record: RunRecord | None = None,
    error: ShardwrightError | None = None,
) -> str:
    """One run with a result for each broken rule, failed check, and the error.

    Args:
        results: plan file and what the policy found in it.
        policy_file: where the rules stand; results without another place point there.
    """
    found: list[dict[str, Any]] = []
    for plan_file, result in results:
        found += [_finding(item, plan_file) for item in result.findings if not item.passed]
    if record is not None:
        found += [
            _result(f"check/{c.stage}/{c.name}", "error", c.evidence, "run.json") for c in record.checks if not c.passed
        ]
    if error is not None:
        found.append(_result(error.code, "error", f"{error.what} Next: {error.next_action}", error.where))
    if len(found) > MOST:
        left = len(found) - MOST + 1
        found = [*found[: MOST - 1], _result("left-out", "note", f"{left} more results are left out", policy_file)]
    rules = sorted({item["ruleId"] for item in found})
    driver = {
        "name": "shardwright",
        "semanticVersion": __version__,
        "rules": [{"id": rule, "shortDescription": {"text": rule}} for rule in rules],
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": found}]}
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _finding(item: PolicyFinding, plan_file: str) -> dict[str, Any]:
    words = f"found {item.found}, allowed {item.allowed}"
    if item.waived:
        words = f"{words}; {item.waived}"
    result = _result(f"policy/{item.rule}", "error" if item.denies else "warning", words, plan_file)
    if item.waived:
        result["suppressions"] = [{"kind": "external", "justification": item.waived}]
    return result


def _result(rule: str, level: str, text: str, where: str) -> dict[str, Any]:
    place = {"physicalLocation": {"artifactLocation": {"uri": where.replace("\\", "/").replace(" ", "%20")}}}
    return {"ruleId": rule, "level": level, "message": {"text": text}, "locations": [place]}
