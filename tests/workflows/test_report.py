"""Reports: same words for the same input, nothing from outside, nothing unescaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import workflow_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schemas.approval import Approval, ProposalVerdict
from shardwright.schemas.errors import CheckFailed
from shardwright.schemas.run import LoadFacts, WayTaken
from shardwright.workflows.policy import evaluate
from shardwright.workflows.report import svg
from shardwright.workflows.report.blocks import Code, Table, Text
from shardwright.workflows.report.html import html_plan, html_report
from shardwright.workflows.report.html import page as html_page
from shardwright.workflows.report.junit import junit
from shardwright.workflows.report.markdown import markdown_plan, markdown_report, render
from shardwright.workflows.report.plan_content import plan_report
from shardwright.workflows.report.plan_fusions import fusion_section
from shardwright.workflows.report.run_outcome import approval_section, check_section, load_section
from shardwright.workflows.report.units import change, duration, off_by, size
from shardwright.workflows.runs import load_record

EVIL = "<script>alert(1)</script>|`x`"


@pytest.fixture
def record(finished):
    return load_record(finished.run_dir)


class Strict(HTMLParser):
    """Checks that tags nest, and collects what a page could load."""

    VOID = {"meta", "br", "wbr"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset", "action") or k.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def parsed(page: str) -> Strict:
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_html_report_is_self_contained(finished, record) -> None:
    page = html_report(finished.plan, record)
    found = parsed(page)
    assert found.loads == [] and "script" not in found.tags and {"svg", "style", "table"} <= found.tags
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)


def test_both_reports_say_what_matters(finished, record) -> None:
    for text in (markdown_report(finished.plan, record), html_report(finished.plan, record)):
        for needed in (
            finished.plan.hashes.decision,
            finished.plan.hashes.evidence,
            "5.9000 → 4.4000",
            "−25.4%",  # (4.4 − 5.9) / 5.9
            "3 of 3 passed",
            "0 of 1 tensors changed",
            "norm.good",
            "✓ 1 of 1",
            "×2 (modelled)",
            str(finished.run_dir / "adapter"),
            "PeftModel.from_pretrained",
            "500 ms",
            "predicted 2 GiB",
        ):
            assert needed in text, needed


def test_a_run_report_says_which_way_an_operator_ran_and_what_was_planned(finished, record) -> None:
    assert "Ways taken" not in markdown_report(finished.plan, record)
    way = WayTaken(
        op="dsa",
        path="dense",
        row_tokens=1024,
        modules=("layers.0.self_attn", "layers.1.self_attn"),
        reason="no document is longer than the 2048 selected keys",
        planned="rows of 1024 tokens run dense",
    )
    ran = record.model_copy(update={"ways": (way,)})
    for text in (markdown_report(finished.plan, ran), html_report(finished.plan, ran)):
        for needed in ("Ways taken", "1,024", "dense", way.reason, f"Planned: {way.planned}"):
            assert needed in text, needed


def test_checks_stand_in_the_order_of_the_run(finished, record) -> None:
    """However they were recorded: after load, after step 1, after export."""
    mixed = record.model_copy(update={"checks": tuple(reversed(record.checks))})
    (table,) = (block for block in check_section(mixed) if isinstance(block, Table))
    stages = [row[0] for row in table.rows]
    assert len(set(stages)) == 3 and stages == sorted(stages, key=["load", "step", "export"].index)


def test_many_decided_fusions_are_counted_by_kind(finished) -> None:
    def decided(ids: list[str]) -> str:
        verdicts = tuple(ProposalVerdict(proposal_id=one) for one in ids)
        approval = Approval.model_construct(
            actor="p", actor_kind="person", policy_sha256=None, reason="", proposals=verdicts
        )
        (table,) = (block for block in approval_section(approval) if isinstance(block, Table))
        return dict(table.rows)["fusions decided"].replace("\u00a0", " ")

    assert decided([]) == "none"
    assert decided(["router:a", "norm:b"]) == "`router:a`, `norm:b`"
    assert decided([f"norm:{n}" for n in range(5)] + ["router:a", "router:b"]) == "7: 5 × `norm`, 2 × `router`"


def test_transformers_is_not_told_to_load_a_class_that_it_lacks(finished, record) -> None:
    decision = finished.plan.decision.model_copy(update={"architecture": "KimiK3ForConditionalGeneration"})
    ours = finished.plan.model_copy(update={"decision": decision})
    for write in (markdown_report, html_report):
        assert "AutoModelForCausalLM" in write(finished.plan, record)
        assert "AutoModelForCausalLM" not in write(ours, record)
        assert "shardwright generate CHECKPOINT --adapter ADAPTER" in write(ours, record)


def test_what_stays_eager_is_folded_behind_what_runs_fused(finished) -> None:
    """One row open for each region that changes the model; a plan without any says so."""
    first = finished.plan.decision.fusions[0]

    def tables(provider: str) -> dict[str, Table]:
        changed = finished.plan.decision.model_copy(
            update={"fusions": (first.model_copy(update={"provider": provider, "rejected": False}),)}
        )
        blocks = fusion_section(finished.plan.model_copy(update={"decision": changed}))
        assert (Text("None runs fused on this cluster.") in blocks) == (provider == "eager")
        return {block.caption: block for block in blocks if isinstance(block, Table)}

    fused, eager = tables("compile"), tables("eager")
    caption = "Regions that stay eager, and why"
    assert [len(fused[""].rows), len(fused[caption].rows)] == [1, 0]
    assert [len(eager[""].rows), len(eager[caption].rows)] == [0, 1] and eager[caption].closed


def test_both_writers_render_one_report_of_a_plan(finished) -> None:
    document = plan_report(finished.plan)
    assert markdown_plan(finished.plan) == render(document) and html_plan(finished.plan) == html_page(document)


def test_reports_repeat_byte_for_byte(finished, record) -> None:
    for write in (markdown_report, html_report):
        assert write(finished.plan, record) == write(finished.plan, record)
    for write in (markdown_plan, html_plan):
        assert write(finished.plan) == write(finished.plan)


def test_a_record_from_run_json_and_from_the_store_print_alike(finished, record) -> None:
    """42.2499996 keeps all digits in run.json and is 42.25 in the store; one decimal would tell them apart."""
    full = record.model_copy(update={"measured_step_ms": 42.2499996})
    stored = record.model_copy(update={"measured_step_ms": 42.25})
    assert duration(42.2499996) != duration(42.2500004)
    assert markdown_report(finished.plan, full) == markdown_report(finished.plan, stored)


def test_text_from_outside_is_escaped(finished, record) -> None:
    good = finished.plan.evidence.proposals[0]
    proposals = (good.model_copy(update={"reason": EVIL}),)
    evidence = finished.plan.evidence.model_copy(update={"proposals": proposals, "explanation": (EVIL,)})
    decision = finished.plan.decision.model_copy(
        update={
            "architecture": EVIL,
            "fusions": tuple(f.model_copy(update={"reason": EVIL}) for f in finished.plan.decision.fusions),
        }
    )
    plan = type(finished.plan).seal(decision, evidence)
    page, text = html_report(plan, record), markdown_report(plan, record)
    assert "script" not in parsed(page).tags
    assert "<script" not in text and "\\|" in text


def test_every_markdown_table_has_one_width(finished, record) -> None:
    rows: list[int] = []
    for line in [*markdown_report(finished.plan, record).splitlines(), ""]:
        if line.startswith("|"):
            rows.append(len(re.split(r"(?<!\\)\|", line)))
        elif rows:
            assert len(set(rows)) == 1
            rows = []


def test_junit_has_a_case_for_each_rule_obligation_and_check(finished, record, approving) -> None:
    result = evaluate(finished.plan, approving.model_copy(update={"max_memory_fraction": 0.1}))
    error = CheckFailed("failed", "0.5 beside 0", where="adapter", next_action="read")
    root = ElementTree.fromstring(junit(finished.plan, result, record, error))
    suites = {suite.get("name"): suite for suite in root}
    assert {name: (s.get("tests"), s.get("failures")) for name, s in suites.items()} == {
        "certificates": ("2", "0"),  # the unproved one is not installed, so it is no failure
        "policy": ("4", "1"),
        "checks": ("3", "0"),
        "run": ("1", "1"),
    }
    assert "check/failed" in suites["run"][0][0].get("message", "")


def test_junit_survives_control_characters() -> None:
    error = CheckFailed("failed", "a\x00b\x1b[0m", where="x", next_action="y")
    ElementTree.fromstring(junit(None, error=error))


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_curves_stay_inside_their_frame(losses: list[float]) -> None:
    points = [(float(i + 1), loss) for i, loss in enumerate(losses)]
    root = ElementTree.fromstring(svg.loss_curve(points, [(0.0, losses[0])]))
    space = "{http://www.w3.org/2000/svg}"
    for line in root.iter(f"{space}polyline"):
        for pair in line.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert svg.LEFT - 0.1 <= x <= svg.WIDTH - svg.RIGHT + 0.1
            assert svg.TOP - 0.1 <= y <= svg.HEIGHT - svg.BOTTOM + 0.1


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_span_their_range_evenly(low: float, width: float) -> None:
    found = svg.ticks(low, low + width)
    assert 2 <= len(found) <= 12
    slack = (abs(low) + width) * 1e-8 + 1e-9
    assert found[0] <= low + slack and found[-1] >= low + width - slack


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 << 30, 1010 << 20)] == ["0 B", "1023 B", "1 KiB", "5 GiB", "1010 MiB"]
    assert [duration(t) for t in (0.1234, 999.0, 1500, 7.2e6)] == ["0.123 ms", "999 ms", "1.5 s", "120 min"]
    assert (change(4, 5), change(4, 3), off_by(110, 100), off_by(1, None)) == (
        "+25.0%",
        "−25.0%",
        "+10.0%",
        "not measured",
    )
    assert fakes.cost(fakes.searched().best).memory.fits


def test_a_block_of_code_ends_where_it_should() -> None:
    text = render((Code("a ```\n```` b"), Text("after")))
    assert text == "`````\na ```\n```` b\n`````\n\nafter\n"


def test_tables_wider_than_the_page_scroll_by_keyboard(finished) -> None:
    page = html_plan(finished.plan)
    tables = re.findall(r'<div class="wide"([^>]*)>', page)
    assert tables and all(re.search(r'tabindex="0" role="group" aria-label="[^"]+"', words) for words in tables)


@pytest.mark.parametrize(
    ("readers", "told"), [(3, "3 reading threads a rank, buffers of 160 MiB"), (0, "tensors, peak")]
)
def test_how_weights_were_read(record, readers: int, told: str) -> None:
    """Threads and buffers of a load; a record from before they were counted names none."""
    load = LoadFacts(
        bytes_read=1 << 30, seconds=2.0, tensors=7, peak_host_bytes=1 << 29, readers=readers, staging_bytes=160 << 20
    )
    blocks = load_section(record.model_copy(update={"load": load}))
    (row,) = [row for block in blocks if isinstance(block, Table) for row in block.rows if row[0] == "weights read"]
    assert told in str(row[1]) and ("reading" in str(row[1])) is bool(readers)
