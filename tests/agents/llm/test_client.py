"""Endpoint, schema, budget, wire, repair, probe, recording: hostile servers included."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from shardwright.agents.llm.budget import Budget
from shardwright.agents.llm.chat import Chat
from shardwright.agents.llm.endpoint import endpoint_from, key_of
from shardwright.agents.llm.probe import probe
from shardwright.agents.llm.recording import Recorder, Replay
from shardwright.agents.llm.reply import json_of, read_reply
from shardwright.agents.llm.scripted import Answer, Raw, Request, in_turn, message, serve
from shardwright.agents.llm.strict_schema import strict_schema
from shardwright.agents.llm.wire import OpenAIWire
from shardwright.schemas.errors import LlmError, LlmUnavailableError, UsageError
from shardwright.schemas.llm import LlmEndpoint, LlmLimits

ASK = [{"role": "user", "content": "which?"}]


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int | None = Field(default=None, ge=1, description="a size")


class Choice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pick: Literal["one", "two"]
    parts: list[Inner] = []


class FreeKeys(BaseModel):
    table: dict[str, int]


def test_strict_schema_is_closed_all_the_way_down() -> None:
    schema = strict_schema(Choice)
    assert schema["additionalProperties"] is False and schema["required"] == ["pick", "parts"]
    inner = schema["properties"]["parts"]["items"]
    assert inner["additionalProperties"] is False and inner["required"] == ["size"]
    assert inner["properties"]["size"] == {
        "anyOf": [{"type": "integer"}, {"type": "null"}],
        "description": "a size",
    }, "bounds and defaults are checked after parsing, not by the server"
    with pytest.raises(TypeError, match="free keys"):
        strict_schema(FreeKeys)


def test_an_endpoint_must_be_named_and_may_hold_no_password() -> None:
    with pytest.raises(LlmUnavailableError, match="SHARDWRIGHT_LLM_URL is not set"):
        endpoint_from({})
    with pytest.raises(UsageError):
        endpoint_from({}, url="http://user:secret@host/v1", model="m")
    local = endpoint_from({}, url="http://127.0.0.1:1/v1", model="m")
    assert key_of(local, {}) == "none"
    away = endpoint_from({"SHARDWRIGHT_LLM_URL": "https://llm.example/v1", "SHARDWRIGHT_LLM_MODEL": "m"})
    with pytest.raises(LlmUnavailableError, match="no-key"):
        key_of(away, {})
    assert key_of(away, {"SHARDWRIGHT_LLM_KEY": "k"}) == "k"


def test_a_reply_outside_the_schema_is_sent_back_with_what_is_wrong(talk: Callable[..., Any]) -> None:
    wrong, right = message('{"pick": "three"}'), message('Here: {"pick": "two", "parts": [{"size": 3}]}')
    chat, served = talk(in_turn([message("no idea"), wrong, right]))
    assert chat.ask(ASK, Choice) == Choice(pick="two", parts=[Inner(size=3)])
    assert "no JSON object" in served.requests[1]["messages"][-1]["content"]
    assert "pick" in served.requests[2]["messages"][-1]["content"]
    assert served.requests[0]["response_format"]["json_schema"]["strict"] is True


def test_repairs_end(talk: Callable[..., Any]) -> None:
    chat, served = talk(in_turn([message("no")]))
    with pytest.raises(LlmError, match="off-schema"):
        chat.ask(ASK, Choice)
    assert len(served.requests) == 3


@pytest.mark.parametrize(
    ("answer", "code", "calls"),
    [
        (Raw(b"{not json"), "not-json", 1),
        (Raw(b'{"choices": NaN}'), "not-json", 1),
        (Raw(b'{"choices": 1e400}'), "not-json", 1),
        (Raw(b'{"choices": [], "choices": [{"message": {"content": "x"}}]}'), "not-json", 1),
        (Raw(b'{"usage": ' + b"9" * 5000 + b"}"), "not-json", 1),
        (Raw(gzip.compress(b"[" + b" " * 50_000_000), headers=(("Content-Encoding", "gzip"),)), "not-json", 1),
        (Raw(b"<html>", headers=(("Content-Type", "text/html"),)), "not-json", 1),
        (Raw(b"{}", status=429, headers=(("Retry-After", "86400"),)), "status", 3),
        (Raw(b"[]"), "not-json", 1),
        (Raw(b'{"choices": []}'), "bad-reply", 1),
        (Raw(b'{"choices": [{"message": {"content": {"a": 1}}}]}'), "bad-reply", 1),
        (Raw(b"[" * 100_000), "not-json", 1),
        (Raw(b"x" * 65_536, pieces=64), "too-large", 1),
        (Raw(b" ", pause_s=0.2, pieces=1000), "too-slow", 1),
        (Raw(b"{}", status=500), "status", 3),
        (Raw(b"{}", status=400), "status", 1),
        (Raw(pieces=0), "unreachable", 3),
        (Raw(b'{"choices"', promised_bytes=5000), "unreachable", 3),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_hostile_server_gives_one_typed_error(talk: Callable[..., Any], answer: Raw, code: str, calls: int) -> None:
    chat, served = talk(lambda request: answer, reply_bytes=1_000_000, reply_seconds=3)
    with pytest.raises(LlmError) as caught:
        chat.send(ASK)
    assert caught.value.code == f"advice/{code}"
    assert len(served.requests) == calls


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(talk: Callable[..., Any], status: int) -> None:
    """Neither to a file nor to another server, which would get the prompt."""
    for_other = []
    with serve(lambda request: for_other.append(request) or message("caught")) as other:
        for target in (other.base_url + "/chat/completions", "file:///etc/passwd", "http://169.254.169.254/"):
            answer = Raw(b"", status=status, headers=(("Location", target),))
            chat, served = talk(lambda request, answer=answer: answer)
            with pytest.raises(LlmError, match=f"status.*{status}"):
                chat.send(ASK)
            assert len(served.requests) == 1
    assert for_other == []


def test_half_a_character_in_a_reply_can_be_sent_back(talk: Callable[..., Any]) -> None:
    """JSON can name a lone surrogate; no request could hold it."""
    right = message('{"pick": "two", "parts": [{"size": 3}]}')
    chat, served = talk(in_turn([message("no \ud800 idea"), right]))
    assert chat.ask(ASK, Choice).pick == "two"
    assert "no ? idea" in served.requests[1]["messages"][-2]["content"]


@pytest.mark.parametrize("text", ['{"size": NaN}', '{"size": 1e999}', '{"size": 1, "size": 2}', "[" * 50_000])
def test_a_models_json_is_read_strictly(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        json_of(text)


def test_a_count_of_tokens_that_is_none_is_charged_by_size() -> None:
    body = message("x")
    body["usage"] = {"prompt_tokens": 10**4000, "completion_tokens": 1}
    assert read_reply(body).usage is None
    endpoint = LlmEndpoint(base_url="http://127.0.0.1/v1", model="m", price_in=1.0, price_out=1.0)
    budget = Budget(endpoint)
    budget.charge(400, 400, read_reply(body).usage)
    assert budget.prompt_tokens == 100 and budget.spent() == ""


def test_the_environment_tells_a_server_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "our-organisation")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "our-project")
    wire = OpenAIWire(LlmEndpoint(base_url="http://127.0.0.1:1/v1", model="m"), "key")
    assert "our-" not in str(dict(wire.client.default_headers))


def test_no_server_at_all() -> None:
    endpoint = LlmEndpoint(base_url="http://127.0.0.1:9/v1", model="m", limits=LlmLimits(reply_seconds=3))
    chat = Chat(Recorder(OpenAIWire(endpoint, "k", sleep=lambda s: None)), Budget(endpoint))
    with pytest.raises(LlmError, match="unreachable"):
        chat.send(ASK)


def test_every_budget_ends_the_calls() -> None:
    now = [0.0]

    def budget(**limits: Any) -> Budget:
        endpoint = LlmEndpoint(
            base_url="http://127.0.0.1/v1", model="m", price_in=2.0, price_out=8.0, limits=LlmLimits(**limits)
        )
        return Budget(endpoint, clock=lambda: now[0])

    calls = budget(calls=2)
    calls.open_call()
    calls.open_call()
    with pytest.raises(LlmError, match="all 2 calls"):
        calls.open_call()
    tokens = budget(tokens=100)
    tokens.charge(400, 4, None)
    assert (tokens.prompt_tokens, tokens.completion_tokens) == (100, 1), "counted by size without usage"
    with pytest.raises(LlmError, match="101 of 100 tokens"):
        tokens.open_call()
    money = budget(money=0.001)
    money.charge(0, 0, (100, 100))
    assert str(money.money) == "0.001"
    with pytest.raises(LlmError, match=r"0\.0010 of 0\.001"):
        money.open_call()
    seconds = budget(seconds=10)
    now[0] = 10.5
    with pytest.raises(LlmError, match="10 seconds"):
        seconds.open_call()


def test_the_probe_sees_what_a_server_can(talk: Callable[..., Any]) -> None:
    chat, _ = talk(in_turn([message("x")]))
    assert probe(chat).model_dump() == {"schema_replies": True, "tool_calls": True, "usage": True, "sampling": True}

    def plain(request: Request) -> Answer:
        if "tools" in request or "response_format" in request or "temperature" in request:
            return Raw(b'{"error": "unknown field"}', status=400)
        return message("ready!", usage=False)

    chat, served = talk(plain)
    assert not any(probe(chat).model_dump().values())
    assert len(served.requests) == 4
    assert served.requests[0]["max_tokens"] <= 64, "a model that does not stop must not spend a budget on a probe"


@pytest.mark.parametrize("broken", [b"<html>", b'{"choices": []}'])
def test_a_server_that_answers_tools_with_nonsense_has_none(talk: Callable[..., Any], broken: bytes) -> None:
    chat, _ = talk(lambda request: Raw(broken) if "tools" in request else message('{"state": "ready"}'))
    can = probe(chat)
    assert can.schema_replies and not can.tool_calls


def test_a_recording_replays_and_refuses_anything_else(talk: Callable[..., Any], tmp_path: Path) -> None:
    chat, _ = talk(in_turn([message('{"pick": "one", "parts": []}')]))
    first = chat.ask(ASK, Choice)
    chat.wire.save(tmp_path / "llm.jsonl")
    again = Chat(Recorder(Replay.load(tmp_path / "llm.jsonl")), Budget(chat.budget.endpoint))
    assert again.ask(ASK, Choice) == first
    assert again.wire.sha256 == chat.wire.sha256
    other = Chat(Recorder(Replay.load(tmp_path / "llm.jsonl")), Budget(chat.budget.endpoint))
    with pytest.raises(LlmError, match="replay-differs"):
        other.ask([{"role": "user", "content": "another?"}], Choice)
    (tmp_path / "bad.jsonl").write_text((tmp_path / "llm.jsonl").read_text().replace("which?", "whose?"))
    with pytest.raises(LlmError, match="bad-recording"):
        Replay.load(tmp_path / "bad.jsonl")


def test_recorded_failures_fail_again(talk: Callable[..., Any], tmp_path: Path) -> None:
    chat, _ = talk(lambda request: Raw(b"{}", status=400))
    with pytest.raises(LlmError):
        chat.send(ASK)
    chat.wire.save(tmp_path / "llm.jsonl")
    again = Chat(Recorder(Replay.load(tmp_path / "llm.jsonl")), Budget(chat.budget.endpoint))
    with pytest.raises(LlmError, match="the server answered 400"):
        again.send(ASK)
    assert again.wire.sha256 == chat.wire.sha256


def test_the_key_reaches_the_server_and_no_recording(tmp_path: Path) -> None:
    with serve(in_turn([message("{}")])) as served:
        endpoint = LlmEndpoint(base_url=served.base_url, model="m")
        recorder = Recorder(OpenAIWire(endpoint, "canary-key-7f3a"))
        Chat(recorder, Budget(endpoint)).send(ASK)
        recorder.save(tmp_path / "llm.jsonl")
    assert "canary-key-7f3a" not in (tmp_path / "llm.jsonl").read_text()
