"""Budgets: calls, tokens, seconds and money, counted before and after every call."""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal

from shardwright.schemas.errors import LlmError
from shardwright.schemas.llm import LlmEndpoint
from shardwright.schemas.words import plural

MILLION = Decimal(1_000_000)
BYTES_A_TOKEN = 4
"""Assumed where a server does not count: English and JSON need three to five."""


class Budget:
    """What one run has spent, and whether it may go on.

    Args:
        endpoint: its limits and prices.
        clock: seconds, monotonic.
    """

    def __init__(self, endpoint: LlmEndpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint, self.clock = endpoint, clock
        self.begun = clock()
        self.calls = self.prompt_tokens = self.completion_tokens = 0

    @property
    def money(self) -> Decimal | None:
        """Spent so far; ``None`` without prices."""
        one, other = self.endpoint.price_in, self.endpoint.price_out
        if one is None or other is None:
            return None
        spent = Decimal(str(one)) * self.prompt_tokens + Decimal(str(other)) * self.completion_tokens
        return spent / MILLION

    def seconds_left(self) -> float:
        """Until the run's time is spent, never below zero."""
        return max(0.0, self.endpoint.limits.seconds - (self.clock() - self.begun))

    def spent(self) -> str:
        """Which budget is spent, in words; empty where none is."""
        limits = self.endpoint.limits
        if self.calls >= limits.calls:
            return f"all {plural(limits.calls, 'call')} are spent"
        if (tokens := self.prompt_tokens + self.completion_tokens) >= limits.tokens:
            return f"{tokens} of {limits.tokens} tokens are spent"
        if self.seconds_left() <= 0:
            return f"{limits.seconds:g} seconds are spent"
        if limits.money is not None:
            money = self.money
            if money is None:
                return "a money limit is set, but no prices"
            if money >= Decimal(str(limits.money)):
                return f"{money:.4f} of {limits.money:g} is spent"
        return ""

    def open_call(self) -> None:
        """Count one call, before it is made.

        Raises:
            LlmError: ``budget`` where something is spent.
        """
        if words := self.spent():
            raise LlmError(
                "budget", words, where=self.endpoint.model, next_action="raise the limit, or take the rules' result"
            )
        self.calls += 1

    def charge(self, request_bytes: int, reply_bytes: int, usage: tuple[int, int] | None) -> None:
        """Count the tokens of one call; by size where the server does not say."""
        counted = usage or (-(-request_bytes // BYTES_A_TOKEN), -(-reply_bytes // BYTES_A_TOKEN))
        self.prompt_tokens += counted[0]
        self.completion_tokens += counted[1]
