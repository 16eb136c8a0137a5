"""A plan of the suite in calls: order, limits, what an ended call leaves, what changed sources open again.

Nothing is verified or timed: a rehearsal's clock goes on by what each piece is said to take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="suites name triton's kernels")

from shardwright.kernels import suite, suite_calls
from shardwright.kernels.floors import CEILING_BYTES_PER_S
from shardwright.kernels.suite_calls import RECORDS, Call, Outcome, Records, TimedPass, Tools, passes_of
from shardwright.kernels.suite_plan import EXPERTS, LIMIT_S, PLANS, SuiteStep, plan_of
from shardwright.kernels.verify import VerifyResult
from shardwright.kernels.verify_jobs import Keep, Part, parts
from shardwright.schemas.errors import KernelError

DEVICE = next(iter(CEILING_BYTES_PER_S))
STEPS = (
    SuiteStep(verify=("moe_layer",), cases=("moe/128e8", "moe-lora/128e8"), part_s=30, pass_s=50),
    SuiteStep(verify=("linear_cross_entropy",), cases=("linear-ce/8k",), part_s=30, pass_s=50),
)


class Rehearsal:
    """Work that takes the seconds it is given, may be wrong, and may end the process at a piece."""

    def __init__(self, part_s: float = 30, pass_s: float = 50, wrong: str = "", dies_at: str = "") -> None:
        self.now, self.part_s, self.pass_s, self.wrong, self.dies_at = 0.0, part_s, pass_s, wrong, dies_at
        self.done: list[str] = []

    def verify(self, work: Sequence[Part], keep: Keep, late: Callable[[], bool]) -> None:
        for part in work:
            if late():
                return
            self.spend(f"verify {part}", self.part_s)
            ok = str(part) != self.wrong
            one = VerifyResult(
                op=part.op, case="case", value="y", ok=ok, error=0.1, eager_error=0.1, allowed=0.2, detail=""
            )
            keep(part, [one])

    def time(self, timed: TimedPass) -> str:
        self.spend(str(timed), self.pass_s)
        return "1.0 ms"

    def spend(self, piece: str, seconds: float) -> None:
        if piece == self.dies_at:
            raise KeyboardInterrupt
        self.done.append(piece)
        self.now += seconds

    def call(
        self, out: Path, limit_s: float, before: Sequence[Path] = (), steps: Sequence[SuiteStep] = STEPS
    ) -> Outcome:
        tools = Tools(self.verify, self.time, lambda: self.now, lambda text: None)
        return Call(Records(out, before), DEVICE, limit_s, tools).run(steps, "cuda")


def every_piece(steps: Sequence[SuiteStep]) -> list[str]:
    found: dict[str, None] = {}
    for step in steps:
        found |= dict.fromkeys(f"verify {part}" for part in parts(step.verify, "cuda"))
        found |= dict.fromkeys(map(str, passes_of(step)))
    return list(found)


def test_one_long_call_does_everything_in_order(tmp_path: Path) -> None:
    work = Rehearsal()
    outcome = work.call(tmp_path, 1e9)
    assert work.done == every_piece(STEPS) and set(outcome.done) == set(work.done)
    assert outcome.left == outcome.wrong == ()
    again = Rehearsal()
    assert again.call(tmp_path, 0.0).left == () and again.done == []


@pytest.mark.parametrize("limit_s", [100.0, 170.0, 300.0])
def test_calls_go_on_where_the_last_one_ended(tmp_path: Path, limit_s: float) -> None:
    """No call passes its limit, no piece is done twice, records travel by folder; what fits no more is passed over."""
    folders: list[Path] = []
    everything: list[str] = []
    left: tuple[str, ...] = ("all",)
    while left:
        folders.append(tmp_path / str(len(folders)))
        work = Rehearsal()
        left = work.call(folders[-1], limit_s, folders[:-1]).left
        assert work.done and work.now <= limit_s
        everything += work.done
    assert sorted(everything) == sorted(every_piece(STEPS)) and len(folders) > 2


def test_a_call_that_dies_loses_only_its_piece(tmp_path: Path) -> None:
    pieces = every_piece(STEPS)
    for at in (1, 8, len(pieces) - 1):
        out = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            Rehearsal(dies_at=pieces[at]).call(out, 1e9)
        work = Rehearsal()
        work.call(out, 1e9)
        assert work.done == pieces[at:]


def test_what_is_wrong_is_not_timed_and_the_rest_goes_on(tmp_path: Path) -> None:
    work = Rehearsal(wrong=str(parts(("moe_layer",), "cuda")[1]))
    outcome = work.call(tmp_path, 1e9)
    assert outcome.wrong == ("moe_layer",) and outcome.left == ()
    timed = [piece for piece in work.done if piece.startswith("time ")]
    assert timed and all(piece.startswith("time linear-ce/8k") for piece in timed)
    again = Rehearsal()
    assert again.call(tmp_path, 1e9).wrong == ("moe_layer",) and again.done == []
    assert suite.told(outcome) == 1


def test_a_pass_that_fails_is_said_and_tried_again(tmp_path: Path) -> None:
    class Short(Rehearsal):
        def time(self, timed: TimedPass) -> str:
            if str(timed) == "time moe/128e8 fwd":
                raise torch.OutOfMemoryError("no room")
            return super().time(timed)

    outcome = Short().call(tmp_path, 1e9)
    assert outcome.wrong == ("time moe/128e8 fwd",) and outcome.left == () and suite.told(outcome) == 1
    again = Rehearsal()
    assert again.call(tmp_path, 1e9).wrong == () and again.done == ["time moe/128e8 fwd"]


def test_changed_sources_and_other_devices_open_pieces_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rehearsal().call(tmp_path, 1e9)
    real = suite_calls.source_sha256
    monkeypatch.setattr(suite_calls, "source_sha256", lambda op: real(op) + ("!" if op == "moe_layer" else ""))
    work = Rehearsal()
    work.call(tmp_path, 1e9)
    assert work.done == every_piece(STEPS[:1])


def test_a_verification_that_is_not_over_holds_back_its_passes(tmp_path: Path) -> None:
    work = Rehearsal(part_s=100)
    outcome = work.call(tmp_path, 250)
    assert all(piece.startswith("verify") for piece in work.done) and 0 < len(work.done) < len(every_piece(STEPS))
    assert "time moe/128e8 fwd" in outcome.left and suite.told(outcome) == suite.LEFT


def test_measured_seconds_decide_where_a_call_ends(tmp_path: Path) -> None:
    """A pass that took 400 s once, not the 50 that the plan assumes, is not begun with 300 s left."""
    first = tmp_path / "first"
    Rehearsal(pass_s=400).call(first, 1e9)
    text = (first / RECORDS).read_text().replace(DEVICE, "another").splitlines()
    kept = [json.dumps({**json.loads(line), "device": DEVICE, "source": "older"}) for line in text]
    (first / RECORDS).write_text("\n".join(kept))
    work = Rehearsal()
    outcome = work.call(tmp_path / "second", 300, [first])
    assert not any(piece.startswith("time") for piece in work.done) and outcome.left


def test_the_shipped_plan_holds_the_cases_that_count_first() -> None:
    """The experts' cases, then the loss, in calls of bounded length; every case of a step exists."""
    order = [timed.case.case for step in EXPERTS for timed in passes_of(step)]
    first = [case for at, case in enumerate(order) if case not in order[:at]]
    wanted = ["moe/128e8", "moe/896e16", "moe-lora/128e8", "moe-lora/896e16", "moe/k3-ep64", "moe-lora/k3-ep64"]
    assert first[:6] == wanted and {"moe/256e8", "moe-lora/256e8", "linear-ce/8k"} <= set(first)
    assert {"moe-mxfp4/k3-ep64-4k", "moe-mxfp4/k3-ep64-64k"} <= set(first)
    assert all(len(passes_of(step)) > 0 for step in EXPERTS)
    assert all(max(step.part_s, step.pass_s) < LIMIT_S for plan in PLANS.values() for step in plan)


def test_plans_from_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('[{"verify": ["router"], "cases": ["router/"]}]')
    assert plan_of(str(path)) == (SuiteStep(verify=("router",), cases=("router/",)),)
    bad = {"corrupt-plan": '[{"verifies": ["router"]}]', "unknown-operator": '[{"verify": ["softmax"]}]'}
    for code, text in bad.items():
        path.write_text(text)
        with pytest.raises(KernelError) as caught:
            plan_of(str(path))
        assert caught.value.code == f"kernel/{code}"
    with pytest.raises(KernelError, match="neither a plan nor a file"):
        plan_of("yesterday")
