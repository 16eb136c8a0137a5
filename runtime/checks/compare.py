"""How a check is written down and when two numbers count as equal."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.schemas.errors import CheckFailed
from shardwright.schemas.run import CheckResult, CheckStage

LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative difference allowed between two losses, by format of computation."""
NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative difference allowed between two gradient norms."""

ROUTES_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Share of experts that two runs of the same rows may choose differently. Logits of bf16 rounding differ by some
thousandths; the two experts at the border of 16 of 896 stand a few hundredths apart."""


def relative(ours: float, theirs: float) -> float:
    """|ours − theirs| over |theirs|."""
    return abs(ours - theirs) / max(abs(theirs), 1e-12)


def equal_numbers(
    stage: CheckStage, name: str, ours: float, theirs: float, tolerance: float, what: str, scope: str = "whole_model"
) -> CheckResult:
    """A check that two numbers agree to a relative tolerance; NaN never does."""
    error = relative(ours, theirs)
    return CheckResult.model_validate(
        {
            "stage": stage,
            "name": name,
            "passed": error <= tolerance,
            "evidence": f"{what}: {ours:.7g} against {theirs:.7g}, relative difference {error:.1e}, "
            f"allowed {tolerance:.0e}",
            "scope": scope,
        }
    )


def require(checks: Iterable[CheckResult], where: str) -> None:
    """End the run where a check failed.

    Raises:
        CheckFailed: with the name of the first failed check as code.
    """
    failed = [check for check in checks if not check.passed]
    if failed:
        raise CheckFailed(
            failed[0].name,
            "; ".join(f"{check.name}: {check.evidence}" for check in failed),
            where=where,
            next_action=NEXT.get(failed[0].name, NEXT.get(failed[0].stage, "report this")),
        )


NEXT = {
    "load": "do not train: the loaded model is not the checkpoint's; fetch it again, or reject the fusions",
    "documents-apart": "set recipe.data.packing to false (one document a sequence) and plan again",
    "step": "do not use this run: its gradients are not the model's; reject the fusions or choose a smaller mesh",
    "export": "do not serve this adapter; keep the run directory and report the evidence above",
}
"""Stage or, where one has its own, name of a check → what to do where it failed."""
