"""Typed errors: a stable code, what was found where, what to do next, and an exit code."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """The exit codes of the command line; a test freezes them."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NEEDS_APPROVAL = 3
    POLICY_DENIED = 4
    STALE_PLAN = 5
    LEGALITY_FAILED = 6
    INFEASIBLE = 7
    LLM_UNAVAILABLE = 8
    CHECK_FAILED = 9
    INTERRUPTED = 130


class ShardwrightError(Exception):
    """Base of all errors a user can meet.

    Args:
        code: stable, kebab-case; the class's ``area`` stands before it (``checkpoint/truncated-shard``).
        what: what was found.
        where: file, field or tensor name.
        next_action: what the reader should do now.
    """

    area: ClassVar[str] = "shardwright"
    exit_code: ClassVar[ExitCode] = ExitCode.ERROR

    def __init__(self, code: str, what: str, *, where: str, next_action: str) -> None:
        self.code = f"{self.area}/{code}"
        self.what, self.where, self.next_action = what, where, next_action
        super().__init__(self.text())

    def text(self) -> str:
        return f"[{self.code}] {self.what}\n  where: {self.where}\n  next:  {self.next_action}"

    def as_dict(self) -> dict[str, str | int]:
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "next": self.next_action,
            "exit_code": int(self.exit_code),
        }

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.code.split("/", 1)[1], self.what, self.where, self.next_action))


def _rebuild(cls: type[ShardwrightError], code: str, what: str, where: str, next_action: str) -> ShardwrightError:
    return cls(code, what, where=where, next_action=next_action)


class UsageError(ShardwrightError):
    """A flag, file or value that the user gave cannot be used."""

    area = "usage"
    exit_code = ExitCode.USAGE


class CheckpointError(ShardwrightError):
    """A checkpoint's files are missing, damaged, contradictory or unknown."""

    area = "checkpoint"


class RecipeError(ShardwrightError):
    """A recipe or its data cannot run."""

    area = "recipe"
    exit_code = ExitCode.USAGE


class ClusterError(ShardwrightError):
    """A cluster file is wrong, or the cluster is not the one planned for."""

    area = "cluster"
    exit_code = ExitCode.USAGE


class PlanError(ShardwrightError):
    """A plan's bytes are not what they claim to be."""

    area = "plan"
    exit_code = ExitCode.STALE_PLAN


class StalePlanError(PlanError):
    """The world has changed since the plan was made."""

    area = "stale"


class ApprovalError(ShardwrightError):
    """A plan is not approved, or its approval does not fit it."""

    area = "approval"
    exit_code = ExitCode.NEEDS_APPROVAL


class PolicyDenied(ShardwrightError):
    """The policy refuses the plan."""

    area = "policy"
    exit_code = ExitCode.POLICY_DENIED


class LegalityError(ShardwrightError):
    """A mesh, fusion or target is illegal for this model."""

    area = "legality"
    exit_code = ExitCode.LEGALITY_FAILED


class InfeasibleError(ShardwrightError):
    """No legal plan fits the cluster."""

    area = "infeasible"
    exit_code = ExitCode.INFEASIBLE


class LlmUnavailableError(ShardwrightError):
    """A language model was required and could not be reached."""

    area = "llm"
    exit_code = ExitCode.LLM_UNAVAILABLE


class LlmError(ShardwrightError):
    """A language model's server, reply or budget failed; advice ends and the rules' result stands."""

    area = "advice"


class CheckFailed(ShardwrightError):
    """A check after load, after a step or after export failed."""

    area = "check"
    exit_code = ExitCode.CHECK_FAILED


class KernelError(ShardwrightError):
    """A fused operator got an input outside its contract."""

    area = "kernel"


class RunError(ShardwrightError):
    """A run could not start, go on or be resumed."""

    area = "run"


class RunInterrupted(ShardwrightError):
    """A run was asked to stop, has saved its state, and can go on."""

    area = "interrupted"
    exit_code = ExitCode.INTERRUPTED
