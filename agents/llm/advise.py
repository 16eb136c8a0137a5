"""Advice for one run: probe, structure agent, strategy agent, under one budget and in one recording.

Whatever fails, the result is complete: the proposals and plans that got through the gates before, and a record that
says what happened. ``required`` turns a server that cannot be used at all into an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardwright.agents.llm.budget import Budget
from shardwright.agents.llm.chat import Chat
from shardwright.agents.llm.loop import Ended
from shardwright.agents.llm.probe import NOTHING, probe
from shardwright.agents.llm.recording import Recorder
from shardwright.agents.llm.wire import Wire
from shardwright.schemas.errors import LlmError, LlmUnavailableError
from shardwright.schemas.llm import Capabilities, LlmEnd, LlmEndpoint, LlmMode, LlmRecord, Suggestion
from shardwright.schemas.words import plural


class Advisor(Protocol):
    """An agent with tools."""

    advice: Any

    def run(self, chat: Chat) -> Ended: ...


@dataclass
class Session:
    """One run's conversation with one server.

    Args:
        recording: where the exchanges are saved, failed ones too.
    """

    mode: LlmMode
    endpoint: LlmEndpoint
    wire: Wire
    recording: Path | None = None
    can: Capabilities | None = None
    said: list[str] = field(default_factory=list)
    end: LlmEnd = "complete"

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.wire)
        self.budget = Budget(self.endpoint)

    def open(self) -> bool:
        """Probe the server; whether agents can work.

        Raises:
            LlmUnavailableError: ``unusable`` where a model is required.
        """
        try:
            self.can = probe(Chat(self.recorder, self.budget, NOTHING))
        except LlmError as error:
            if self.mode == "required":
                raise LlmUnavailableError(
                    "unusable",
                    f"a language model is required, and the server cannot be used: {error.what}",
                    where=self.endpoint.model,
                    next_action="mend the server, or use --llm advise or --llm off",
                ) from error
            self._ended("the probe", error)
            return False
        return True

    def consult(self, name: str, advisor: Advisor) -> None:
        """Let one agent work; a failure ends its work, and nothing else."""
        if self.end != "complete" or self.can is None:
            return
        try:
            ended = advisor.run(Chat(self.recorder, self.budget, self.can))
            self.said.append(f"{name}: {ended.why} after {plural(ended.turns, 'turn')}")
        except LlmError as error:
            self._ended(name, error)

    def _ended(self, name: str, error: LlmError) -> None:
        self.end = "budget" if error.code == "advice/budget" else "failed"
        self.said.append(f"{name}: {error.code.rpartition('/')[2]}: {error.what}; the rules' result stands")

    def record(self, suggestions: list[Suggestion]) -> LlmRecord:
        """What goes into the plan; saves the recording."""
        if self.recording is not None:
            self.recorder.save(self.recording)
        money = self.budget.money
        return LlmRecord(
            mode=self.mode,
            model=self.endpoint.model,
            capabilities=self.can,
            end=self.end,
            said="; ".join(self.said) or "nothing was asked",
            calls=self.budget.calls,
            prompt_tokens=self.budget.prompt_tokens,
            completion_tokens=self.budget.completion_tokens,
            money=None if money is None else str(money),
            recording_sha256=self.recorder.sha256,
            suggestions=tuple(suggestions),
            limits=self.endpoint.limits,
            price_in=self.endpoint.price_in,
            price_out=self.endpoint.price_out,
        )
