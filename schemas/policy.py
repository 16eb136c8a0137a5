"""The policy that may approve a plan when no person watches."""

from __future__ import annotations

from datetime import date
from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from shardwright.schemas.base import Model, added
from shardwright.schemas.fusion import ObligationName

RULES = (
    "max_memory_fraction",
    "max_step_ms",
    "max_gpu_hours",
    "min_speedup",
    "allow_providers",
    "allow_kernels",
    "allow_dtypes",
    "allow_axes",
    "allow_licences",
    "allow_remote_code",
    "require_measured",
    "require_obligations",
    "open_questions",
)
"""Rules by name, in the order in which they are applied."""


class Waiver(Model):
    """One rule set aside for a time, by somebody who answers for it."""

    rule: str
    """A rule's name, or the whole name of one finding (``require_obligations/re-trace``)."""
    owner: str = Field(min_length=1)
    until: str
    """Last day on which it holds, ``2026-12-31``."""
    reason: str = Field(min_length=1)

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        return known_rule(value)

    @field_validator("until")
    @classmethod
    def _a_day(cls, value: str) -> str:
        try:
            return date.fromisoformat(value).isoformat()
        except ValueError as error:
            raise ValueError("a day, written 2026-12-31") from error


class Policy(Model):
    """Rules over a plan. Everything that is not allowed here is denied; a rule that is left out asks nothing."""

    schema_version: Literal[1] = 1
    max_memory_fraction: float = Field(default=0.95, gt=0, le=1)
    """Predicted reserved memory over the rank's budget."""
    max_step_ms: float | None = Field(default=None, gt=0)
    """Predicted time of one optimizer step."""
    max_gpu_hours: float | None = Field(default=None, gt=0)
    """Predicted device-hours of the whole run."""
    min_speedup: float | None = Field(default=None, ge=1)
    """Time beside eager that every installed fusion must save, as a factor."""
    allow_providers: tuple[str, ...] = ("eager", "shardwright", "compile")
    allow_kernels: tuple[str, ...] | None = None
    """Operators that fusions may install (``rms_norm``)."""
    allow_dtypes: tuple[str, ...] | None = None
    """Number formats of base, adapter and reduction."""
    allow_axes: dict[str, tuple[JsonValue, ...]] = {}
    """Axis → values it may take (``ep: [1, 2]``, ``checkpointing: [full]``); axes that are left out are free."""
    allow_licences: tuple[str, ...] | None = None
    """Licences the checkpoint may state (``apache-2.0``); a checkpoint that states none is denied."""
    allow_remote_code: bool = False
    """Whether a plan that runs the checkpoint's own code may be approved; the command names that code by its hash."""
    allow_written_kernels: bool = added(False)
    """Whether ``kernels write`` may let a language model write a kernel for a region; no plan uses one unread."""
    require_measured: tuple[Literal["gains", "memory", "time"], ...] = ()
    """What must be measured, not modelled: gains of installed fusions, every memory term, every time term."""
    require_obligations: tuple[ObligationName, ...] = ()
    """Obligations that each installed fusion's certificate must list as proved."""
    warn: tuple[str, ...] = ()
    """Rules that only warn; all others deny."""
    waivers: tuple[Waiver, ...] = ()
    approver_is_not_author: bool = False
    """Whether a plan that a person edited needs the approval of another person."""
    approve: bool = False
    """Whether a plan without violation may be approved by this policy at all."""

    @field_validator("warn")
    @classmethod
    def _known_rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known_rule(item) for item in value)

    @model_validator(mode="after")
    def _axes_have_values(self) -> Policy:
        if empty := [axis for axis, values in self.allow_axes.items() if not values]:
            raise ValueError(f"allow_axes: {', '.join(empty)} has no value")
        return self


def known_rule(name: str) -> str:
    """The name of a rule, or of one finding of it.

    Raises:
        ValueError: no rule is called so.
    """
    if name.split("/", 1)[0] not in RULES:
        raise ValueError(f"no rule {name!r}; rules: {', '.join(RULES)}")
    return name


class PolicyFinding(Model):
    """One rule and what it found."""

    rule: str
    passed: bool
    found: str
    allowed: str
    severity: Literal["deny", "warn"] = "deny"
    waived: str = ""
    """Owner, last day and reason of the waiver that sets this finding aside; empty without one."""

    @property
    def denies(self) -> bool:
        """Whether this finding stands in the way of an approval."""
        return not self.passed and self.severity == "deny" and not self.waived


class PolicyResult(Model):
    """All rules applied to one plan."""

    policy_sha256: str
    findings: tuple[PolicyFinding, ...]
    approves: bool

    @property
    def violations(self) -> tuple[PolicyFinding, ...]:
        return tuple(finding for finding in self.findings if finding.denies)

    @property
    def warnings(self) -> tuple[PolicyFinding, ...]:
        """Broken rules that do not stand in the way: they warn, or they are waived."""
        return tuple(finding for finding in self.findings if not finding.passed and not finding.denies)
