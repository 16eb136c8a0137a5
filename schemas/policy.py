"""The policy that may approve a plan when no person watches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwright.schemas.base import Model
from shardwright.schemas.fusion import ObligationName


class Policy(Model):
    """Rules over a plan. Everything that is not allowed here is denied."""

    schema_version: Literal[1] = 1
    max_memory_fraction: float = Field(default=0.95, gt=0, le=1)
    """Predicted reserved memory over the rank's budget."""
    allow_providers: tuple[str, ...] = ("eager", "shardwright", "compile")
    require_obligations: tuple[ObligationName, ...] = ()
    """Obligations that each installed fusion's certificate must list as proved."""
    approve: bool = False
    """Whether a plan without violation may be approved by this policy at all."""


class PolicyFinding(Model):
    """One rule and what it found."""

    rule: str
    passed: bool
    found: str
    allowed: str


class PolicyResult(Model):
    """All rules applied to one plan."""

    policy_sha256: str
    findings: tuple[PolicyFinding, ...]
    approves: bool

    @property
    def violations(self) -> tuple[PolicyFinding, ...]:
        return tuple(finding for finding in self.findings if not finding.passed)
