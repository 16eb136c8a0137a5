"""What stands first in a plan's report and on its page: verdict, price, what is signed; the picture of its ranks."""

from __future__ import annotations

import re

import pytest
import review_plans
import workflow_fakes as fakes

from shardwright.schemas.strategy import Mesh
from shardwright.workflows.report.html import html_plan
from shardwright.workflows.report.markdown import markdown_plan
from shardwright.workflows.report.plan_verdict import beyond_times, signed_rows, verdict, way
from shardwright.workflows.report.svg import bars
from shardwright.workflows.report.units import share
from shardwright.workflows.review.figures.mesh import MOST, coordinates, experts_of, mesh_grid
from shardwright.workflows.review.terminal import plan_text


@pytest.fixture(scope="module")
def plan():
    return review_plans.plan_of(review_plans.many(4))


def test_the_verdict_stands_before_everything_else(plan) -> None:
    said = verdict(plan)
    assert " fits " in said and "2 fused operators" in said
    for text in (html_plan(plan), markdown_plan(plan), plan_text(plan)):
        first = text.index(said)
        assert (
            first < text.index(plan.hashes.decision) < text.lower().index("fusions", text.index(plan.hashes.decision))
        )
    assert html_plan(plan).count("<figure>") == 2 and html_plan(plan).count("<h1>") == 1


def test_what_is_signed_names_all_that_workers_do(plan) -> None:
    rows = dict(signed_rows(plan))
    assert rows["decision hash"] == f"`{plan.hashes.decision}`" and rows["evidence hash"] == f"`{plan.hashes.evidence}`"
    assert rows["fusions"] == "2 of 4 run fused, the others eagerly"
    assert rows["strategy"] == f"`{plan.decision.strategy.text()}`" and "still open" not in rows


@pytest.mark.parametrize(
    ("reason", "left"),
    [
        ("kernel: 0.663 → 0.0592 ms a call (modelled), ×11.20", ""),
        ("kernel-cut-at-dispatch: 13.1 → 9.92 ms a call (measured), ×1.32", ""),
        ("kernel: 5.82 → 4.55 ms a call (modelled), ×1.28; rows of 4096 run sparse", "rows of 4096 run sparse"),
        ("eager: nothing else applies", "eager: nothing else applies"),
        (
            "eager: kernel is not faster (22.5 → 22.5 ms a call (modelled), ×1.00)",
            "eager: kernel is not faster (22.5 → 22.5 ms a call (modelled), ×1.00)",
        ),
    ],
)
def test_a_reason_does_not_repeat_the_times_beside_it(reason: str, left: str) -> None:
    assert beyond_times(reason) == left


def test_a_way_is_named_once() -> None:
    assert [way("compile", "compile"), way("shardwright", "kernel"), way("eager", "eager")] == [
        "compile",
        "shardwright · kernel",
        "eager",
    ]


def test_shares_and_parts_that_round_to_nothing() -> None:
    assert [share(0.826), share(0), share(1e-5), share(0.0006)] == ["82.6%", "0.0%", "under 0.1%", "0.1%"]
    drawn = bars(("predicted", [("most", 1e6), ("a", 2.0), ("b", 1.0)], "1 MB"), None, None, "bytes")
    assert "2 more under 0.1%" in drawn and " 0.0%" not in drawn
    alone = bars(("predicted", [("most", 1e6), ("a", 2.0)], "1 MB"), None, None, "bytes")
    assert "a under 0.1%" in alone and "1 more" not in alone


def test_the_picture_of_ranks_is_the_runtimes_mesh() -> None:
    """``((r · shard + s) · ep + e) · cp + c``, as ``runtime/mesh.py`` lays ranks out."""
    mesh = Mesh(replicate=2, shard=2, ep=4, cp=2)
    for rank in range(mesh.world_size):
        r, s, e, c = coordinates(mesh, rank)
        assert ((r * mesh.shard + s) * mesh.ep + e) * mesh.cp + c == rank
        assert experts_of(mesh, 16, rank) == (4 * e, 4 * e + 4)
    drawn = mesh_grid(mesh, 8, 16)
    assert drawn.count('class="rank') == 32 and "rank 31: replicate 1, shard 1, ep 3, cp 1, experts 12–15" in drawn
    large = mesh_grid(Mesh(shard=4, ep=8, cp=4), 8, 256)
    assert large.count('class="rank') == MOST and "and 64 more ranks in the same pattern" in large


def test_a_page_says_what_is_signed_and_prints_no_empty_reason(tmp_path) -> None:
    from fastapi.testclient import TestClient

    from shardwright.workflows.review.app import ReviewServer, build_app
    from shardwright.workflows.review.guard import Guard
    from shardwright.workflows.review.session import ReviewSession

    file = tmp_path / "plan.json"
    made = review_plans.plan_of(review_plans.many(2))
    made.save(file)
    guard = Guard(8123)
    server = ReviewServer(ReviewSession.open(file, actor="ada", stages=fakes.fake_stages()), guard, None, "")
    client = TestClient(build_app(server), base_url="http://127.0.0.1:8123")
    page = client.get(f"/open?token={guard.token}").text
    signed = page.split("What you sign")[1].split("</dl>")[0]
    assert made.hashes.decision in signed and made.hashes.evidence in signed
    assert not re.search(r'<p class="reason">\s*</p>', page)
