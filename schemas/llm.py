"""What a language model may spend, what it said, and what became of it. No clock and no host in any of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwright.schemas.base import CountInt, DecimalText, Model, NonNegative, Sha256, added

LlmMode = Literal["off", "advise", "required"]
LlmEnd = Literal["complete", "budget", "failed"]
SuggestionKind = Literal["rank", "name-region", "propose-region", "narrow-axis", "try-plan", "explain"]

WORDS = 600
"""Characters of a model's own text that are kept of one suggestion."""


class LlmLimits(Model):
    """Budgets of one run. The first that is spent ends the advice; the rules' result stands."""

    calls: CountInt = 40
    tokens: CountInt = 120_000
    """Prompt and completion together, as the server counts them; four bytes a token where it does not."""
    seconds: NonNegative = 300.0
    money: NonNegative | None = None
    """In the currency of the prices; needs both of them."""
    reply_bytes: CountInt = 262_144
    """Largest body of one reply."""
    reply_seconds: NonNegative = 90.0
    """Longest wait for one whole reply."""
    turns: CountInt = 24
    """Replies that one agent may give."""


class LlmEndpoint(Model):
    """An OpenAI-compatible server. The key itself stays in the environment."""

    base_url: str = Field(pattern=r"^https?://[^\s@]+$")
    model: str = Field(min_length=1, max_length=200)
    key_variable: str = Field(default="SHARDWRIGHT_LLM_KEY", pattern=r"^[A-Z][A-Z0-9_]*$")
    price_in: NonNegative | None = None
    """Per million prompt tokens."""
    price_out: NonNegative | None = None
    """Per million completion tokens."""
    limits: LlmLimits = LlmLimits()


class Capabilities(Model):
    """What a server was seen to do when it was asked."""

    schema_replies: bool
    """A reply under a strict JSON Schema followed it."""
    tool_calls: bool
    usage: bool
    """Token counts come with a reply."""
    sampling: bool
    """``temperature`` and ``max_tokens`` are accepted."""


class Suggestion(Model):
    """One thing that a model suggested, and what the gates made of it."""

    kind: SuggestionKind
    subject: str
    """Our own name of what it is about: a region, an axis, a plan."""
    words: str = Field(default="", max_length=WORDS)
    """The model's text, printable characters only; everything else in a plan is ours."""
    accepted: bool
    because: str
    """Which gate decided, in our words."""


class LlmRecord(Model):
    """A model's part in one plan."""

    mode: LlmMode
    model: str
    capabilities: Capabilities | None = None
    end: LlmEnd
    said: str
    """What happened, in our words: complete, which budget was spent, or what failed."""
    calls: CountInt = 0
    prompt_tokens: CountInt = 0
    completion_tokens: CountInt = 0
    money: DecimalText | None = None
    recording_sha256: Sha256 | None = None
    """Hash of the exchanges; a replay of them gives this record again."""
    suggestions: tuple[Suggestion, ...] = ()
    limits: LlmLimits | None = added(None)
    """The budgets under which it worked; ``None`` in plans of before they could be set."""
    price_in: NonNegative | None = added(None)
    """Per million prompt tokens."""
    price_out: NonNegative | None = added(None)
    """Per million completion tokens."""

    def spent(self) -> tuple[str, ...]:
        """What was spent of each budget that is counted in the plan; seconds are not, they differ from run to run."""
        tokens = self.prompt_tokens + self.completion_tokens
        limits = self.limits
        spent = [f"{self.calls:,}{'' if limits is None else f' of {limits.calls:,}'} calls"]
        spent.append(f"{tokens:,}{'' if limits is None else f' of {limits.tokens:,}'} tokens")
        if self.money is not None:
            most = "" if limits is None or limits.money is None else f" of {limits.money:g}"
            spent.append(f"money {self.money}{most}")
        if limits is not None:
            spent.append(f"at most {limits.seconds:g} s")
        return tuple(spent)

    def text(self) -> str:
        """One line for provenance and reports."""
        taken = sum(one.accepted for one in self.suggestions)
        return f"{self.mode}, {self.model}: {self.said}; {taken} of {len(self.suggestions)} suggestions accepted"
