"""Budgets and prices: from a file, single values over it, counted, and shown in the plan's provenance."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.schemas.errors import UsageError
from shardwright.schemas.llm import LlmLimits, LlmRecord
from shardwright.workflows.advice import Advice
from shardwright.workflows.advising import llm_request
from shardwright.workflows.llm_options import LlmOptions, llm_options

FILE = """base_url: http://127.0.0.1:9/v1
model: small
key_variable: OTHER_KEY
price_in: 0.5
price_out: 1.5
limits: {calls: 7, seconds: 60}
"""


def test_words_stand_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "llm.yaml"
    path.write_text(FILE)
    options = llm_options(path, ["calls=3", "money=0.25", "price_in=2"])
    assert options.limits == LlmLimits(calls=3, seconds=60, money=0.25)
    assert (options.price_in, options.price_out) == (2, 1.5)
    assert llm_options() == LlmOptions() and llm_options().limits == LlmLimits()
    asked, _ = llm_request(Advice.advise, model="flag", options=options, environment={"OTHER_KEY": "k"})
    assert asked is not None
    end = asked.endpoint
    assert (end.base_url, end.model, end.key_variable) == ("http://127.0.0.1:9/v1", "flag", "OTHER_KEY")
    assert (end.price_in, end.price_out, end.limits.calls) == (2, 1.5, 3)


@pytest.mark.parametrize(
    "word",
    ["calls", "calls=", "calls=-1", "calls=1.5", "calls=nan", "seconds=inf", "coffee=3", "=3", "tokens=many"],
)
def test_a_word_that_is_no_budget_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="bad-llm-limit"):
        llm_options(None, [word])


def test_a_money_limit_needs_both_prices() -> None:
    with pytest.raises(UsageError, match="no-prices"):
        llm_options(None, ["money=1", "price_in=1"])
    assert llm_options(None, ["money=1", "price_in=1", "price_out=1"]).limits.money == 1


@pytest.mark.parametrize("text", ["model: [", "budget: 3\n", "limits: {calls: -1}\n", "key_variable: lower\n"])
def test_a_wrong_file_is_refused_and_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "llm.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as seen:
        llm_options(path)
    assert str(path) in seen.value.text()


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing"):
        llm_options(tmp_path / "none.yaml")


def test_a_record_says_what_was_spent_of_what() -> None:
    record = LlmRecord(mode="advise", model="m", end="complete", said="", calls=3, prompt_tokens=1000, money="0.01")
    assert record.spent() == ("3 calls", "1,000 tokens", "money 0.01")
    limited = record.model_copy(update={"limits": LlmLimits(calls=4, tokens=2000, money=1, seconds=9)})
    assert limited.spent() == ("3 of 4 calls", "1,000 of 2,000 tokens", "money 0.01 of 1", "at most 9 s")
