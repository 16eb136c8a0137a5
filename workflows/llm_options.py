"""Budgets, prices and address of a language model: from a file, with single values over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from shardwright.schemas.base import Model, NonNegative
from shardwright.schemas.errors import UsageError
from shardwright.schemas.llm import LlmLimits
from shardwright.schemas.validation import explain, parse_yaml
from shardwright.workflows.texts import read_text

PRICES = ("price_in", "price_out")
WHOLE = ("calls", "tokens", "reply_bytes", "turns")


class LlmOptions(Model):
    """What ``--llm-config`` may hold; the key itself stays in the environment."""

    base_url: str = ""
    model: str = ""
    key_variable: str = Field(default="SHARDWRIGHT_LLM_KEY", pattern=r"^[A-Z][A-Z0-9_]*$")
    """Environment variable that holds the key."""
    price_in: NonNegative | None = None
    """Per million prompt tokens."""
    price_out: NonNegative | None = None
    """Per million completion tokens."""
    limits: LlmLimits = LlmLimits()


def llm_options(config: Path | None = None, words: Sequence[str] = ()) -> LlmOptions:
    """Read the file, then ``NAME=VALUE`` words over it.

    Raises:
        UsageError: ``missing``, ``unreadable`` or ``invalid`` of the file; ``bad-llm-limit`` of a word;
            ``no-prices`` for a money limit that cannot be counted.
    """
    options = LlmOptions()
    if config is not None:
        if not config.is_file():
            raise UsageError(
                "missing", "no such file", where=str(config), next_action="name a YAML file with --llm-config"
            )
        options = parse_yaml(LlmOptions, read_text(config, UsageError), where=str(config), error=UsageError)
    prices: dict[str, float] = {}
    limits: dict[str, float] = {}
    for word in words:
        name, value = _parsed(word)
        (prices if name in PRICES else limits)[name] = value
    merged = {**options.limits.model_dump(), **{n: int(v) if n in WHOLE else v for n, v in limits.items()}}
    try:
        options = options.model_copy(update={**prices, "limits": LlmLimits.model_validate(merged)})
    except ValidationError as error:
        raise UsageError(
            "bad-llm-limit", explain(error), where="--llm-limit", next_action="see --llm-config in docs/llm.md"
        ) from error
    if options.limits.money is not None and None in (options.price_in, options.price_out):
        raise UsageError(
            "no-prices",
            "a limit on money needs the prices of a million tokens",
            where="--llm-limit money",
            next_action="add --llm-limit price_in=X --llm-limit price_out=Y",
        )
    return options


def _parsed(word: str) -> tuple[str, float]:
    name, _, text = word.partition("=")
    names = (*LlmLimits.model_fields, *PRICES)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    fits = name in names and math.isfinite(value) and value >= 0 and (name not in WHOLE or value == int(value))
    if not fits:
        raise UsageError(
            "bad-llm-limit",
            f"{word!r} is not NAME=VALUE of a known name and a number of at least 0, whole where it counts",
            where="--llm-limit",
            next_action=f"write tokens=50000, for example; names: {', '.join(names)}",
        )
    return name, value
