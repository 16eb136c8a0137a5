"""What a page hears while it is open, and open questions: asked, answered, and in the way of an approval."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import review_plans
import workflow_fakes as fakes

from shardwright.schemas.errors import ApprovalError, UsageError
from shardwright.schemas.plan import AdaptationPlan, Question, load_plan
from shardwright.workflows.drive import drive
from shardwright.workflows.lock import RunLock
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.review.terminal import ask_until_decided, plan_text

pytest.importorskip("fastapi", reason="the review page needs the extra `review`")

import browser
from fastapi.testclient import TestClient

from shardwright.workflows.review import live
from shardwright.workflows.review.app import ReviewServer, build_app
from shardwright.workflows.review.guard import Guard

PORT = 8124
ASKED = Question(id="tied.head", text="Train the <b>tied</b> head too?", choices=("yes", "no"))


@pytest.fixture
def asking(tmp_path: Path) -> Path:
    """A plan with one open question."""
    plan = review_plans.plan_of(review_plans.many(2))
    decision = plan.decision.model_copy(update={"questions": (ASKED,)})
    path = tmp_path / "review" / "plan.json"
    AdaptationPlan.seal(decision, plan.evidence).save(path)
    return path


def opened(path: Path) -> tuple[ReviewServer, TestClient]:
    server = ReviewServer(ReviewSession.open(path, actor="ada", stages=fakes.fake_stages()), Guard(PORT))
    client = TestClient(build_app(server), base_url=f"http://127.0.0.1:{PORT}")
    assert client.get("/open", params={"token": server.guard.token}).status_code == 200
    return server, client


def act(server: ReviewServer, client: TestClient, verb: str, **fields: str):
    form = {"csrf": server.guard.csrf, "plan": server.session.plan.hashes.decision, **fields}
    return client.post(f"/act/{verb}", data=form, headers={"HX-Request": "true"})


def test_an_open_question_is_in_the_way_until_it_is_answered(asking) -> None:
    server, client = opened(asking)
    page = client.get("/").text
    assert "Train the &lt;b&gt;tied&lt;/b&gt; head too?" in page and 'value="yes"' in page
    act(server, client, "accept", proposal="0")
    act(server, client, "accept", proposal="1")
    assert "1 question is open" in client.get("/").text
    assert "approval/open-question" in act(server, client, "approve").text
    parent = server.session.plan
    assert "Answered tied.head: no." in act(server, client, "answer", question="0", answer="no", reason="frozen").text
    child = load_plan(asking)
    assert child.decision.questions[0].answer == "no" and child.decision.parent_hash == parent.hashes.decision
    assert child.decision.edits[-1].field == "questions.tied.head" and child.decision.edits[-1].reason == "frozen"
    assert child.evidence == parent.evidence
    assert act(server, client, "approve").status_code == 200, "acceptances were carried over"
    assert client.get("/").text.count("approved the plan") == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"question": "0", "answer": "maybe", "reason": "x"}, "usage/bad-answer"),
        ({"question": "0", "answer": "yes", "reason": " "}, "usage/no-reason"),
        ({"question": "7", "answer": "yes", "reason": "x"}, "usage/unknown-question"),
        ({"question": "../0", "answer": "yes", "reason": "x"}, "usage/unknown-question"),
    ],
)
def test_an_answer_that_is_none_changes_nothing(asking, fields, code) -> None:
    server, client = opened(asking)
    before = asking.read_bytes()
    answer = act(server, client, "answer", **fields)
    assert answer.status_code == 409 and code in answer.text and asking.read_bytes() == before


def test_the_same_in_a_terminal_and_by_options(asking, cli) -> None:
    assert "Train the <b>tied</b> head too?" in plan_text(load_plan(asking))
    said: list[str] = []
    lines = iter(["answer tied.head=later because", "answer tied.head=yes because", "quit"])
    ask_until_decided(ReviewSession.open(asking, stages=fakes.fake_stages()), lambda prompt: next(lines), said.append)
    assert any("usage/bad-answer" in line for line in said) and "Answered tied.head: yes." in said
    done = cli("review", asking, "--answer", "tied.head=no", "--reason", "second thought")
    assert done.code == 3 and load_plan(asking).decision.questions[0].answer == "no"
    assert cli("review", asking, "--answer", "tied.head", "--reason", "x").code == 2
    session = ReviewSession.open(asking, stages=fakes.fake_stages())
    with pytest.raises(UsageError, match="no-change"):
        session.answer("tied.head", "no", "again")


async def heard(path: Path, look, until, limit_s: float = 20.0) -> list[str]:
    """Events until one of them ends it."""
    found: list[str] = []

    async def listen() -> None:
        async def never() -> bool:
            return False

        async for text in live.news(path, look, never):
            found.append(text)
            if until(found):
                return

    await asyncio.wait_for(listen(), limit_s)
    return found


def test_a_page_hears_of_the_run_and_of_another_reviewer(tmp_path, request_of, monkeypatch) -> None:
    monkeypatch.setattr(live, "POLL_S", 0.02)
    run = tmp_path / "run"
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=fakes.fake_stages())
    server = ReviewServer(ReviewSession.open(run / "plan.json", stages=fakes.fake_stages()), Guard(PORT))
    first = server.session.plan.hashes.decision

    def until(found: list[str]) -> bool:
        if len(found) == 2:  # both kinds have been told once
            other = ReviewSession.open(run / "plan.json", actor="bo", stages=fakes.fake_stages())
            other.edit({"mesh.ep": "2", "mesh.shard": "1"}, "faster")
            with RunLock(run):
                assert f"running (process {live.holder(run)})" in server.look()["run"]
        return len(found) >= 3

    found = asyncio.run(heard(run / "plan.json", server.look, until))
    assert found[0] == f"event: plan\ndata: {first}\n\n"
    assert found[1].startswith("event: run\ndata: <section") and "paused" in found[1]
    second = load_plan(run / "plan.json").hashes.decision
    assert found[2] == f"event: plan\ndata: {second}\n\n" and first != second
    assert all(line.startswith(("event: ", "data: ", "")) for text in found for line in text.splitlines())


def test_a_connection_without_news_is_kept_and_then_let_go(asking, monkeypatch) -> None:
    monkeypatch.setattr(live, "POLL_S", 0.01)
    monkeypatch.setattr(live, "STILL_S", 0.05)
    found = asyncio.run(heard(asking, lambda: {"plan": "x"}, lambda texts: len(texts) == 3))
    assert found == ["event: plan\ndata: x\n\n", ": still here\n\n", ": still here\n\n"]

    async def ended() -> list[str]:
        async def over() -> bool:
            return True

        return [text async for text in live.news(asking, dict, over)]

    assert asyncio.run(ended()) == []


def test_a_plan_outside_of_a_run_folder_shows_no_run(asking) -> None:
    _, client = opened(asking)
    assert live.run_of(asking) is None and 'id="run" aria-labelledby="run-h" hidden' in client.get("/").text


def test_events_need_the_session(asking) -> None:
    server = ReviewServer(ReviewSession.open(asking, stages=fakes.fake_stages()), Guard(PORT))
    client = TestClient(build_app(server), base_url=f"http://127.0.0.1:{PORT}")
    assert client.get("/events").status_code == 403


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_an_open_page_follows_the_run_and_is_told_of_an_edit(tmp_path, request_of) -> None:
    pytest.importorskip("playwright", reason="browser tests need Playwright for Python")
    run = tmp_path / "run"
    with pytest.raises(ApprovalError):
        drive(request_of(), run, stages=fakes.fake_stages())
    with browser.running(run / "plan.json", fakes.fake_stages()) as review, browser.browser() as seen:
        page = seen.page
        page.goto(review.address)
        assert "paused" in page.locator("#run .lead").inner_text()
        with open(run / "events.jsonl", "a") as stream:
            stream.write(json.dumps({"time": "t", "node": "review", "kind": "finished", "detail": ""}) + "\n")
        page.locator("#run .nodes li.done", has_text="review").wait_for()
        other = ReviewSession.open(run / "plan.json", actor="bo", stages=fakes.fake_stages())
        other.edit({"mesh.ep": "2", "mesh.shard": "1"}, "faster")
        page.get_by_text("The plan was changed elsewhere").wait_for()
        page.get_by_role("link", name="Load it as it stands now").click()
        page.locator(".edits", has_text="bo: faster").wait_for()
        assert seen.errors == [] and all(url.startswith((review.base, "data:")) for url in seen.requests)
