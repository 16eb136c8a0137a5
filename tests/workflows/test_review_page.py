"""The review page without a browser: what it shows, what each action does, and whom it refuses."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import review_plans
import workflow_fakes as fakes

from shardwright.agents.structure.choose import choose
from shardwright.schemas.approval import find_approval, verify_approval
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.llm import LlmRecord, Suggestion
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.policy import Policy
from shardwright.schemas.strategy import Mesh
from shardwright.workflows.review.session import ReviewSession

pytest.importorskip("fastapi", reason="the review page needs the extra `review`")

from fastapi.testclient import TestClient

from shardwright.workflows.review.app import ReviewServer, build_app
from shardwright.workflows.review.cards import Card
from shardwright.workflows.review.guard import Guard
from shardwright.workflows.review.kept import OTHER, grouped, why_eager

PORT = 8123
BASE = f"http://127.0.0.1:{PORT}"


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "review" / "plan.json"
    review_plans.plan_of(review_plans.many(6)).save(path)
    return path


def serving(path: Path, actor: str = "ada", policy: Policy | None = None) -> ReviewServer:
    session = ReviewSession.open(path, actor=actor, stages=fakes.fake_stages())
    return ReviewServer(session, Guard(PORT), policy, "policy.yaml")


def browsing(server: ReviewServer) -> TestClient:
    client = TestClient(build_app(server), base_url=BASE)
    assert client.get("/open", params={"token": server.guard.token}).status_code == 200
    return client


@pytest.fixture
def server(plan_file: Path) -> ReviewServer:
    return serving(plan_file, policy=Policy(max_memory_fraction=0.9, approve=True))


@pytest.fixture
def client(server: ReviewServer) -> TestClient:
    return browsing(server)


def form(server: ReviewServer, **fields: str) -> dict[str, str]:
    return {"csrf": server.guard.csrf, "plan": server.session.plan.hashes.decision, **fields}


def post(client: TestClient, server: ReviewServer, verb: str, **fields: str):
    return client.post(f"/act/{verb}", data=form(server, **fields), headers={"HX-Request": "true"})


def index_of(server: ReviewServer, proposal_id: str) -> str:
    return str([p.id for p in server.session.plan.evidence.proposals].index(proposal_id))


VENDORED = {
    "workflows/review/static/htmx.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "tests/workflows/vendor/axe.min.js": "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
}
"""htmx 2.0.11 (0BSD) is served to the page; axe-core 4.14.1 (MPL-2.0) is for tests alone."""


def test_vendored_files_are_the_published_ones() -> None:
    root = Path(__file__).parents[2]
    assert {name: sha256_file(root / name) for name in VENDORED} == VENDORED


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    return parser.tags


def test_the_page_shows_what_a_reviewer_needs(client, server) -> None:
    text = client.get("/").text
    plan = server.session.plan
    for needed in (
        "2 GiB of 6 GiB a rank, 10 ms a step, 3 fused operators",
        plan.hashes.decision[:16],
        "×2",
        "modelled; 2 ms → 1 ms a call, floor 0.5 ms",
        "0 of 5 nodes are random",
        "modeling.py:1",
        "12 ms beside 10 ms",
        "shard 2 halves the weights",
        "0 of 6 decided",
        "6 fusions wait for a decision",
        "max_memory_fraction",
        "budget 6 GiB",
        "rank 1: replicate 0, shard 1, ep 0",
    ):
        assert needed in text, needed
    buttons = [attrs for tag, attrs in tags(text) if tag == "button" and attrs.get("id") == "approve"]
    assert len(buttons) == 1 and "disabled" in buttons[0]


class Folds(HTMLParser):
    """For every element with an id, the ids of the closed ``details`` around it; text of the group's head."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[tuple[str, dict[str, str | None]]] = []
        self.around: dict[str, list[str]] = {}
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag, attrs) -> None:
        values = dict(attrs)
        if name := values.get("id"):
            self.around[name] = [a.get("id") or "" for t, a in self.path if t == "details" and "open" not in a]
        if tag not in ("meta", "link", "input", "br", "img"):
            self.path.append((tag, values))

    def handle_endtag(self, tag) -> None:
        while self.path and self.path.pop()[0] != tag:
            pass

    def handle_data(self, data) -> None:
        for _, attrs in self.path:
            if name := attrs.get("id"):
                self.texts[name] = " ".join(f"{self.texts.get(name, '')} {data}".split())


def folds(text: str) -> Folds:
    parser = Folds()
    parser.feed(text)
    return parser


def test_what_the_plan_leaves_eager_is_folded_and_what_it_changes_stands_open_before_it(client, server) -> None:
    """Even proposals run by a kernel, odd ones eagerly; a reviewer's own word brings a card out of the fold."""
    text = client.get("/").text
    seen = folds(text)
    assert {n: seen.around[f"card-{n}"] for n in range(6)} == {n: ["kept-cards"] if n % 2 else [] for n in range(6)}
    assert max(text.index(f'id="card-{n}"') for n in (0, 2, 4)) < text.index('id="kept"')
    assert seen.texts["kept"].startswith(
        "3 regions stay eager 3 no other way applies here Accept the 3 that run eagerly"
    )
    assert "Accept the 2 that run eagerly" in post(client, server, "accept", proposal="1").text
    assert "Accept the 3 that run eagerly" in post(client, server, "reopen", proposal="1").text
    seen = folds(post(client, server, "reject", proposal="3", reason="look again").text)
    assert seen.around["card-3"] == [] and seen.around["card-5"] == ["kept-cards"]
    assert seen.texts["kept"].startswith("2 regions stay eager")
    seen = folds(post(client, server, "choose", proposal="0", variant="eager", reason="compare first").text)
    assert seen.around["card-0"] == [], "a reviewer left it eager, not the plan"
    done = post(client, server, "accept-eager").text
    assert "Accepted 2 regions to run eagerly" in done and folds(done).texts["kept-do"] == "✓ all decided"
    for index in ("2", "4"):
        post(client, server, "accept", proposal=index)
    assert "Everything is decided" in client.get("/").text


def test_a_plan_without_a_fusion_has_no_group(tmp_path) -> None:
    path = tmp_path / "review" / "plan.json"
    review_plans.plan_of(()).save(path)
    seen = folds(browsing(serving(path)).get("/").text)
    assert "there is nothing to decide here" in seen.texts["fusions"] and not {"kept", "kept-do"} & set(seen.around)


def eager_reasons() -> dict[str, str]:
    """Every reason that the chooser itself gives for leaving a legal region eager, by what makes it so."""
    item = fakes.proposal("norm", "proved", provider="compile")
    everywhere = item.variants[0].predicate.model_copy(update={"device_types": ("cpu", "cuda")})
    fused, eager = (variant.model_copy(update={"predicate": everywhere}) for variant in item.variants)
    assert fused.gain is not None
    cpu = fakes.cluster_spec()
    cuda = cpu.model_copy(update={"device": cpu.device.model_copy(update={"type": "cuda"})})
    slow = fused.model_copy(update={"gain": fused.gain.model_copy(update={"time_ms": 2.0, "speedup": 1.0})})
    absent = fused.model_copy(update={"available": False, "unavailable_because": "no operator computes this"})
    cases = {
        "cpu": (cpu, (fused, eager)),
        "slow": (cuda, (slow, eager)),
        "absent": (cuda, (absent, eager)),
        "alone": (cuda, (eager,)),
    }
    found = {}
    for name, (cluster, variants) in cases.items():
        choice = choose(item.model_copy(update={"variants": variants}), cluster, Mesh(shard=2))
        assert choice.variant is eager
        found[name] = choice.reason
    return found


def test_every_reason_of_the_chooser_has_a_group_of_its_own() -> None:
    assert {name: why_eager(reason) for name, reason in eager_reasons().items()} == {
        "cpu": "compiling is not repaid on a CPU cluster",
        "slow": "no other way is faster",
        "absent": "no other way applies here",
        "alone": "no other way exists yet",
    }
    assert why_eager("kept for a comparison") == OTHER


def test_groups_come_by_size_and_cards_of_unknown_reason_last() -> None:
    reasons = ["x", "y", "z", "eager: nothing else exists yet", *["eager: nothing else applies (a: b)"] * 2]
    cards = [
        Card(n, fakes.proposal(f"norm.{n}", "proved").model_copy(update={"reason": why}), None, None)
        for n, why in enumerate(reasons)
    ]
    assert [(group.why, [card.index for card in group.cards]) for group in grouped(cards)] == [
        ("no other way applies here", [4, 5]),
        ("no other way exists yet", [3]),
        (OTHER, [0, 1, 2]),
    ]


def test_no_script_or_style_is_inline_and_nothing_is_foreign(client) -> None:
    response = client.get("/")
    policy = response.headers["content-security-policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for tag, attrs in tags(response.text):
        assert not any(name.startswith("on") or name == "style" for name in attrs), (tag, attrs)
        assert tag != "style" and (tag != "script" or attrs.get("src", "").startswith("/static/"))
        for name in ("src", "href", "action", "hx-get", "hx-post"):
            assert re.match(r"/|#|data:,$", attrs.get(name) or "/"), (tag, attrs)


def test_the_button_opens_when_all_is_decided_and_not_before(client, server) -> None:
    early = post(client, server, "approve")
    assert early.status_code == 409 and "neither accepted nor rejected" in early.text
    assert not server.session.log.exists()
    for index in range(5):
        done = post(client, server, "accept", proposal=str(index))
        assert done.status_code == 200 and f"{index + 1} of 6 decided" in done.text
    assert post(client, server, "approve").status_code == 409
    post(client, server, "reject", proposal=index_of(server, "norm.05"), reason="not on this machine")
    done = post(client, server, "approve", reason="read all of it")
    assert done.status_code == 200 and "approved by ada" in done.text
    plan = load_plan(server.session.file)
    approval = find_approval(server.session.log, plan)
    verify_approval(plan, approval)
    assert approval.reason == "read all of it" and len(approval.proposals) == 6
    assert [f.proposal_id for f in plan.decision.fusions if f.rejected] == ["norm.05"]


def test_a_child_keeps_the_decisions_that_it_does_not_touch(client, server) -> None:
    for index in range(6):
        post(client, server, "accept", proposal=str(index))
    shown = post(client, server, "reject", proposal=index_of(server, "norm.02"), reason="later")
    assert "6 of 6 decided" in shown.text and server.session.undecided() == ()
    assert server.session.plan.decision.parent_hash is not None
    shown = post(client, server, "choose", proposal=index_of(server, "norm.02"), variant="fused", reason="now")
    assert "6 of 6 decided" in shown.text
    fusion = next(f for f in server.session.plan.decision.fusions if f.proposal_id == "norm.02")
    assert (fusion.variant, fusion.rejected) == ("fused", False)


def test_a_chosen_variant_survives_later_edits(client, server) -> None:
    post(client, server, "choose", proposal=index_of(server, "norm.00"), variant="eager", reason="compare first")
    post(client, server, "edit", **{"mesh.ep": "2", "reason": "fewer gathers"})
    plan = server.session.plan
    assert plan.decision.strategy.mesh.ep == 2 and plan.decision.strategy.mesh.shard == 1
    assert next(f for f in plan.decision.fusions if f.proposal_id == "norm.00").variant == "eager"
    proposal = next(p for p in plan.evidence.proposals if p.id == "norm.00")
    assert all(v.available for v in proposal.variants), "evidence keeps every variant as it was"


def test_a_preview_shows_legality_cost_and_policy_and_writes_nothing(client, server) -> None:
    before = server.session.file.read_bytes()
    legal = client.post("/preview", data=form(server, **{"mesh.ep": "2"}))
    assert legal.status_code == 200 and "Legal, and it fits" in legal.text and "+100.0% worse" in legal.text
    assert "follows" in legal.text and "4 of 4 rules pass" in legal.text and "does not deny" in legal.text
    illegal = client.post("/preview", data=form(server, **{"mesh.ep": "3"}))
    assert "This cannot run" in illegal.text and "mesh-covers-world" in illegal.text
    nonsense = client.post("/preview", data=form(server, **{"mesh.ep": "two"}))
    assert "This cannot run" in nonsense.text
    too_large = client.post("/preview", data=form(server, **{"mesh.ep": "2", "micro_batch_sequences": "2"}))
    assert "bytes are needed" in too_large.text
    assert server.session.file.read_bytes() == before


def test_a_point_of_the_front_fills_the_form(client, server) -> None:
    text = client.get("/try/1").text
    assert "Legal, and it fits" in text
    chosen = [attrs for tag, attrs in tags(text) if tag == "input" and attrs.get("name") == "mesh.ep"]
    assert chosen[0]["value"] == "2"
    for wrong in ("0", "2", "-1", "x", "../1"):
        assert client.get(f"/try/{wrong}").status_code == 404


def test_without_scripts_a_form_redirects_back(client, server) -> None:
    answer = client.post("/act/accept", data=form(server, proposal="0", anchor="card-0"), follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/#card-0"
    answer = client.post("/act/reject", data=form(server, proposal="0", reason=" "))
    assert answer.status_code == 409 and "a change needs a reason" in answer.text


def test_two_reviewers_one_wins_and_the_other_is_told(plan_file) -> None:
    ada, bob = serving(plan_file, "ada"), serving(plan_file, "bob")
    first, second = browsing(ada), browsing(bob)
    assert post(first, ada, "accept", proposal="0").status_code == 200
    told = post(second, bob, "accept", proposal="0")
    assert told.status_code == 409 and "accepted already by ada" in told.text
    assert post(second, bob, "reject", proposal="1", reason="no").status_code == 200
    late = post(first, ada, "reject", proposal="1", reason="me too")
    assert late.status_code == 409 and "edited the plan" in late.text
    assert "Another reviewer changed the plan" in first.get("/").text
    for index in range(6):
        post(first, ada, "accept", proposal=str(index))
    assert post(first, ada, "approve").status_code == 200
    again = post(second, bob, "approve")
    assert again.status_code == 409 and "ada approved this plan" in again.text
    assert len(ada.session.verdicts()) == 1


def test_a_form_of_an_older_page_is_refused(client, server) -> None:
    old = form(server, proposal="0", reason="late")
    post(client, server, "reject", proposal="1", reason="no")
    answer = client.post("/act/reject", data=old, headers={"HX-Request": "true"})
    assert answer.status_code == 409 and "edited after this page was opened" in answer.text


def test_decisions_survive_the_page_being_closed(client, server, plan_file) -> None:
    post(client, server, "accept", proposal="0")
    again = browsing(serving(plan_file))
    assert "1 of 6 decided" in again.get("/").text


@pytest.mark.parametrize("damage", [b"not a database, and long enough to be looked at" * 40, None])
def test_a_lost_or_broken_table_of_decisions_is_said(client, server, damage) -> None:
    post(client, server, "accept", proposal="0")
    path = server.session.decisions.path
    if damage is None:
        path.unlink()
        assert "0 of 6 decided" in client.get("/").text
    else:
        path.write_bytes(damage)
        answer = client.get("/")
        assert answer.status_code == 409 and "approval/decisions-unavailable" in answer.text


def test_a_half_written_plan_is_said(client, server) -> None:
    data = server.session.file.read_bytes()
    server.session.file.write_bytes(data[: len(data) // 2])
    answer = client.get("/")
    assert answer.status_code == 409 and "plan/unreadable" in answer.text
    server.session.file.write_bytes(data)
    assert client.get("/").status_code == 200


# Security.


def test_the_token_works_once(server) -> None:
    client = TestClient(build_app(server), base_url=BASE)
    assert client.get("/").status_code == 403
    assert client.get("/open", params={"token": "forged"}).status_code == 403
    assert client.get("/open", params={"token": server.guard.token}).status_code == 200
    other = TestClient(build_app(server), base_url=BASE)
    assert other.get("/open", params={"token": server.guard.token}).status_code == 403
    assert other.get("/").status_code == 403
    cookie = next(iter(client.cookies.jar))
    assert cookie.has_nonstandard_attr("HttpOnly") and cookie.get_nonstandard_attr("SameSite").lower() == "strict"


def test_a_forged_session_is_refused_everywhere(server) -> None:
    client = TestClient(build_app(server), base_url=BASE, cookies={server.guard.cookie_name: "forged"})
    for path in ("/", "/card/0", "/try/1", "/static/review.js", "/nowhere"):
        assert client.get(path).status_code == 403, path
    for path in ("/preview", "/act/approve"):
        assert client.post(path, data=form(server)).status_code == 403, path


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"csrf": "forged"}),
        ({}, {"csrf": ""}),
        ({"Origin": "http://evil.example"}, {}),
        ({"Origin": "null"}, {}),
        ({"Sec-Fetch-Site": "cross-site"}, {}),
        ({"Host": "evil.example"}, {}),
        ({"Host": f"127.0.0.1.evil.example:{PORT}"}, {}),
        ({"Host": "127.0.0.1:1"}, {}),
    ],
)
def test_a_post_from_another_site_changes_nothing(client, server, headers, fields) -> None:
    answer = client.post("/act/accept", data={**form(server, proposal="0"), **fields}, headers=headers)
    assert answer.status_code == 403
    assert not server.session.decisions.path.exists()


def test_another_host_does_not_even_open(server) -> None:
    client = TestClient(build_app(server), base_url="http://evil.example")
    assert client.get("/open", params={"token": server.guard.token}).status_code == 403
    assert not server.guard._used


def test_odd_bodies_are_refused(client, server) -> None:
    for body in (b"\xff\xfe=1", b"csrf", b"a=" + b"x" * 100_000, b"&".join(b"a=1" for _ in range(500))):
        answer = client.post("/act/accept", content=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert answer.status_code == 403
    assert post(client, server, "no-such-verb").status_code == 409
    for proposal in ("", "-1", "99", "../0", "٣", "0; DROP TABLE decisions"):
        assert post(client, server, "accept", proposal=proposal).status_code == 409


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/docs"])
def test_no_file_outside_is_served(client, path) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "import" not in answer.text


def test_text_from_outside_never_becomes_markup(tmp_path) -> None:
    evil = review_plans.EVIL
    path = tmp_path / "plan.json"
    review_plans.plan_of(review_plans.many(3, evil=evil), evil).save(path)
    server = serving(path, actor=evil)
    client = browsing(server)
    post(client, server, "accept", proposal="0")
    post(client, server, "reject", proposal="1", reason=evil)
    pages = [client.get("/").text, client.get("/card/0").text, post(client, server, "choose", proposal="2").text]
    pages.append(client.post("/preview", data=form(server, **{"mesh.ep": evil})).text)
    for text in pages:
        found = tags(text)
        assert all(tag != "img" for tag, _ in found)
        assert all(attrs.get("src", "").startswith("/static/") for tag, attrs in found if tag == "script")
    assert "&lt;script&gt;" in pages[0] and "{{7*7}}" in pages[0], "no template is run over a plan's text"


def test_a_tampered_plan_and_a_tampered_log_stop_the_page(client, server) -> None:
    for index in range(6):
        post(client, server, "accept", proposal=str(index))
    assert post(client, server, "approve").status_code == 200
    log = server.session.log
    good = log.read_bytes()
    log.write_bytes(good.replace(b'"ada"', b'"eve"'))
    assert "approval/tampered" in client.get("/").text
    log.write_bytes(good)
    text = server.session.file.read_text()
    server.session.file.write_text(text.replace('"ep": 1', '"ep": 2', 1))
    answer = client.get("/")
    assert answer.status_code == 409 and "plan/decision-edited" in answer.text


def test_a_replayed_approval_opens_nothing(client, server) -> None:
    """The log of an approved plan beside its child: the child still waits."""
    for index in range(6):
        post(client, server, "accept", proposal=str(index))
    post(client, server, "approve")
    line = server.session.log.read_bytes()
    post(client, server, "edit", **{"mesh.ep": "2", "reason": "later"})
    with pytest.raises(ApprovalError, match="needs-approval"):
        find_approval(server.session.log, server.session.plan)
    server.session.log.write_bytes(line + line)
    assert "approval/broken-chain" in client.get("/").text


def test_a_models_words_are_shown_as_its_own_and_escaped(tmp_path: Path) -> None:
    plan = review_plans.plan_of(review_plans.many(2))
    said = Suggestion(
        kind="propose-region",
        subject="region",
        words="<script>alert(1)</script>",
        accepted=False,
        because="no-gain: 1.0",
    )
    record = LlmRecord(mode="advise", model="m", end="complete", said="fusions: complete", suggestions=(said,))
    provenance = plan.evidence.provenance.model_copy(update={"llm_record": record})
    path = tmp_path / "review" / "plan.json"
    AdaptationPlan.seal(plan.decision, plan.evidence.model_copy(update={"provenance": provenance})).save(path)
    page = browsing(serving(path)).get("/").text
    assert "A language model advised: advise, m: fusions: complete; 0 of 1 suggestions accepted" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script>alert" not in page
    assert "no-gain: 1.0" in page
