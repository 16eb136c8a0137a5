"""The review page in Chromium: a whole review by mouse and keyboard, speed, accessibility, no outside request."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import review_plans
import workflow_fakes as fakes
import yaml

pytest.importorskip("playwright", reason="browser tests need Playwright for Python")
pytest.importorskip("fastapi", reason="the review page needs the extra `review`")

import browser

from shardwright.schemas.approval import find_approval, verify_approval
from shardwright.schemas.plan import load_plan
from shardwright.schemas.policy import Policy

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium: apt-get install chromium")

AXE = Path(__file__).with_name("vendor") / "axe.min.js"
QUICK_S = 0.3
SLACK = float(os.environ.get("SHARDWRIGHT_TEST_SLACK", "1"))
"""Factor on time limits for a machine that does other work beside the tests."""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "review" / "plan.json"
    review_plans.plan_of(review_plans.many(32)).save(path)
    return path


def serious(page) -> list[str]:
    """Serious and critical findings of axe on the page as it is."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [
        f"{item['id']}: {item['nodes'][0]['html'][:160]}" for item in found if item["impact"] in ("serious", "critical")
    ]


def seconds_until(page, act, locator) -> float:
    """Time from an action to an element, as the browser's user sees it."""
    began = time.perf_counter()
    act()
    locator.wait_for()
    return time.perf_counter() - began


def test_a_whole_review(plan_file) -> None:
    """Open 32 proposals, read the memory, reject one, change EP, accept the rest, approve."""
    parent = load_plan(plan_file)
    policy = Policy(max_memory_fraction=0.9, approve=True)
    with browser.running(plan_file, fakes.fake_stages(), policy) as review, browser.browser() as seen:
        page = seen.page
        page.goto(review.address)
        assert page.locator("#fusions .deciding > .card").count() == 32
        assert page.locator("#fusions .card:visible").count() == 16
        assert "2 GiB reserved of 6 GiB" in page.locator(".waterfall > title").text_content()
        assert page.locator("#approve").is_disabled()

        card = page.locator(".card", has_text="norm.04").first
        card.locator("summary").click()
        assert card.locator("svg.region").count() == 2
        card.locator(".decide textarea").first.fill("not on this machine")
        card.get_by_role("button", name="Reject this fusion").click()
        page.get_by_text("Rejected: not on this machine").wait_for()

        took = []
        for degree, verdict in (("3", "This cannot run"), ("2", "Legal, and it fits")) * 3:
            words = page.locator("#diff h3", has_text=verdict)
            took.append(seconds_until(page, lambda d=degree: page.locator('[name="mesh.ep"]').fill(d), words))
        assert min(took) <= QUICK_S * SLACK, took
        assert "2 GiB" in page.locator("#diff").inner_text() and "4 GiB" in page.locator("#diff").inner_text()
        page.locator("#diff textarea").fill("fewer gathers")
        page.get_by_role("button", name="Make the child plan").click()
        page.locator(".edits", has_text="ada: fewer gathers").wait_for()

        page.get_by_role("button", name=re.compile("run eagerly")).click()
        page.get_by_text("17 of 32 decided").wait_for()
        for left in range(15, 0, -1):
            page.keyboard.press("u")
            page.keyboard.press("a")
            page.get_by_text(f"{33 - left} of 32 decided").wait_for()
        page.locator("#approve").click()
        page.locator(".progress .state", has_text="approved").wait_for()
        assert seen.errors == []
        assert all(url.startswith((review.base, "data:")) for url in seen.requests), seen.requests

    plan = load_plan(plan_file)
    verify_approval(plan, find_approval(plan_file.with_name("approvals.jsonl"), plan))
    assert plan.decision.strategy.mesh.ep == 2 and plan.decision.parent_hash not in (None, parent.hashes.decision)
    assert [f.proposal_id for f in plan.decision.fusions if f.rejected] == ["norm.04"]
    edits = {edit.field: edit.reason for edit in plan.decision.edits}
    assert edits["fusions.norm.04"] == "not on this machine" and edits["strategy.mesh.ep"] == "fewer gathers"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_accessibility_finding(plan_file, scheme) -> None:
    policy = Policy(max_memory_fraction=0.1, warn=("allow_providers",), allow_providers=("eager",))
    with browser.running(plan_file, fakes.fake_stages(), policy) as review, browser.browser() as seen:
        page = seen.page
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.goto(review.address)
        page.locator("#fusions details.body").first.evaluate("each => { each.open = true; }")
        assert serious(page) == []
        page.locator("#kept-cards > summary").click()
        page.locator('[name="mesh.ep"]').fill("3")
        page.locator("#diff h3").wait_for()
        assert serious(page) == []
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert serious(page) == []


def test_a_plan_with_ten_thousand_nodes_opens_quickly(tmp_path) -> None:
    path = tmp_path / "plan.json"
    review_plans.plan_of(review_plans.many(40, nodes=250)).save(path)
    plan = load_plan(path)
    assert sum(len(p.subgraph) for p in plan.evidence.proposals) == 10_000
    with browser.running(path, fakes.fake_stages()) as review, browser.browser() as seen:
        page = seen.page
        page.goto(review.address)
        took = []
        for _ in range(3):
            began = time.perf_counter()
            page.goto(review.base)
            page.locator("#approve").wait_for()
            took.append(time.perf_counter() - began)
        assert min(took) <= 2 * SLACK, took
        first = page.locator("#fusions details.body").first
        first.locator("summary").click()
        first.locator("svg.region").first.wait_for()
        assert "190 more nodes are not drawn" in first.text_content()


def test_text_from_outside_runs_nothing(tmp_path) -> None:
    evil = review_plans.EVIL
    path = tmp_path / "plan.json"
    review_plans.plan_of(review_plans.many(3, evil=evil), evil).save(path)
    with browser.running(path, fakes.fake_stages(), actor=evil) as review, browser.browser() as seen:
        page = seen.page
        page.goto(review.address)
        page.locator("details").evaluate_all("all => all.forEach(each => { each.open = true; })")
        page.locator(".card").first.get_by_role("button", name="Accept").click()
        page.get_by_text("1 of 3 decided").wait_for()
        assert page.evaluate("window.pwned") is None and seen.errors == []
        assert page.locator("img").count() == 0


def test_typed_reasons_outlive_a_closed_page_and_the_keyboard_reaches_all(plan_file) -> None:
    with browser.running(plan_file, fakes.fake_stages()) as review, browser.browser() as seen:
        page = seen.page
        page.goto(review.address)
        for key in "jjk":
            page.keyboard.press(key)
        page.keyboard.press("r")
        page.keyboard.type("half a reason")
        page.goto(review.base)
        assert page.locator(".card textarea").first.input_value() == "half a reason"
        page.get_by_role("button", name=re.compile("undecided")).click()
        page.keyboard.press("j")
        page.keyboard.press("a")
        page.get_by_text("1 of 32 decided").wait_for()


LARGE_PX = 15_000
"""Taller than this, a page of 54 regions hid the few that a reviewer looks at."""


def test_regions_that_stay_eager_are_folded_and_every_way_to_one_unfolds_it(tmp_path) -> None:
    """A link, an address, keys and the summary open the group; decisions inside it leave it open."""
    path = tmp_path / "plan.json"
    proposals = review_plans.many(64)
    review_plans.plan_of((*proposals[:4], *proposals[5::2])).save(path)
    plan = load_plan(path)
    index = {proposal.id: n for n, proposal in enumerate(plan.evidence.proposals)}
    first, last = f"#card-{index['norm.01']}", f"#card-{index['norm.63']}"
    with browser.running(path, fakes.fake_stages()) as review, browser.browser() as seen:
        page = seen.page
        page.emulate_media(reduced_motion="reduce")
        page.goto(review.address)
        folded = page.evaluate("document.documentElement.scrollHeight")
        assert page.locator("#fusions .card:visible").count() == 2 and page.locator("#kept .card").count() == 32
        page.get_by_role("link", name=re.compile("stay eager")).click()
        page.locator(first).wait_for()
        assert folded + 32 * 100 < page.evaluate("document.documentElement.scrollHeight")
        assert folded < LARGE_PX / 2

        page.goto(f"{review.base}/{last}")
        page.locator(last).wait_for()
        page.wait_for_function("id => document.querySelector(id).getBoundingClientRect().top < innerHeight", arg=last)

        page.goto(review.base)
        assert not page.locator(first).is_visible()
        page.evaluate("id => { location.hash = id; }", last)
        page.locator(last).wait_for()

        page.goto(f"{review.base}/?")
        page.keyboard.press("j")
        page.keyboard.press("j")
        assert not page.locator(first).is_visible()
        page.keyboard.press("j")
        page.locator(f"{first}.here").wait_for()
        assert page.evaluate("document.activeElement.closest('.card').id") == first[1:]
        page.keyboard.press("a")
        page.get_by_text("1 of 34 decided").wait_for()
        page.get_by_role("button", name="Accept the 31 that run eagerly").wait_for()

        card = page.locator(last)
        card.locator("summary").click()
        card.locator(".decide textarea").first.fill("look again")
        card.get_by_role("button", name="Reject this fusion").click()
        page.get_by_text("Rejected: look again").wait_for()
        assert page.locator("#kept .card").count() == 31 and page.locator(first).is_visible()
        assert page.locator(f"#fusions > .cards > {last}").count() == 1

        page.get_by_role("button", name=re.compile("^fused")).click()
        assert page.locator("#fusions .card:visible").count() == 2 and not page.locator("#kept").is_visible()
        page.get_by_role("button", name=re.compile("^undecided 32$")).click()
        assert page.locator("#fusions .card:visible").count() == 32 and not page.locator(first).is_visible()
        page.get_by_role("button", name="Accept the 30 that run eagerly").click()
        page.get_by_text("32 of 34 decided").wait_for()
        assert page.locator("#kept-do").inner_text().strip() == "✓ all decided"
        assert seen.errors == []


def test_without_scripts_an_address_unfolds_a_card_and_forms_decide(plan_file) -> None:
    with browser.running(plan_file, fakes.fake_stages()) as review, browser.browser(scripts=False) as seen:
        page = seen.page
        page.goto(review.address)
        names = [proposal.id for proposal in review.server.session.plan.evidence.proposals]
        card = page.locator(f"#card-{names.index('norm.31')}")
        assert not card.is_visible()
        page.goto(f"{review.base}/#card-{names.index('norm.31')}")
        card.locator("button.accept").click()
        page.get_by_text("1 of 32 decided").wait_for()
        assert page.url.endswith(f"/#card-{names.index('norm.31')}") and card.is_visible()
        page.get_by_role("button", name="Accept the 15 that run eagerly").click()
        page.get_by_text("16 of 32 decided").wait_for()


@pytest.mark.slow
def test_apply_runs_exactly_what_the_page_approved(tiny) -> None:
    """The real agents, cost model, page and workers on examples/tiny-moe."""
    recipe = yaml.safe_load((tiny / "recipe.yaml").read_text())
    recipe["schedule"] |= {"steps": 2, "warmup_steps": 0, "save_every_steps": 0}
    (tiny / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def command(*words: object) -> list[str]:
        program = [sys.executable, "-m", "shardwright.workflows.cli.main"]
        return ["timeout", "-k", "5", "300", *program, *map(str, words)]

    plan_file = tiny / "plan.json"
    made = command("plan", tiny / "checkpoint", "-c", "cpu-2", "-r", tiny / "recipe.yaml", "-o", plan_file)
    subprocess.run(made, check=True, capture_output=True, env=environment)
    words = ["review", plan_file, "--serve", "--actor", "ada", "--policy", tiny / "policy.yaml"]
    server = subprocess.Popen(command(*words)[4:], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        address = re.search(r"http://\S+", server.stderr.readline()).group()
        with browser.browser() as seen:
            page = seen.page
            page.set_default_timeout(240_000)
            page.goto(address)
            field, words = page.locator('[name="mesh.ep"]'), page.locator("#diff h3", has_text="Legal, and it fits")
            field.fill("2")
            words.wait_for()
            took = []
            for _ in range(4):
                field.fill("1")
                page.locator("#diff p", has_text="No axis differs").wait_for()
                took.append(seconds_until(page, lambda: field.fill("2"), words))
            assert min(took) <= QUICK_S * SLACK, took
            page.locator("#diff textarea").fill("try expert parallelism")
            page.get_by_role("button", name="Make the child plan").click()
            page.get_by_text("A child plan: what reviewers changed").wait_for()
            page.get_by_role("button", name=re.compile("run eagerly")).click()
            page.locator("#approve:not([disabled])").click()
            page.locator(".progress .state", has_text="approved").wait_for()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    approved = load_plan(plan_file)
    assert approved.decision.strategy.mesh.ep == 2
    applied = command("apply", plan_file, "--checkpoint", tiny / "checkpoint", "--run-dir", tiny / "run")
    done = subprocess.run(applied, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tiny / "run" / "run.json").read_bytes())
    assert record["decision_sha256"] == approved.hashes.decision and record["status"] == "exported"


def test_a_plans_report_reads_on_a_phone_and_by_keyboard(tmp_path: Path) -> None:
    """The page itself never scrolls sideways, sentences stay in view, and what scrolls can be reached by Tab."""
    from shardwright.workflows.report.html import html_plan

    path = tmp_path / "plan.html"
    path.write_text(html_plan(review_plans.plan_of(review_plans.many(8))), encoding="utf-8")
    with browser.browser(390, 844) as seen:
        page = seen.page
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert serious(page) == []
        right = page.evaluate(
            "Math.max(...[...document.querySelectorAll('tr.prose div')].map(e => e.getBoundingClientRect().right))"
        )
        assert 0 < right <= 390
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "wide"
        assert seen.errors == [] and [url for url in seen.requests if not url.startswith("file:")] == []
