"""A plan of the suite in calls that may end at any moment: what was done is written at once and never done again.

Every part of a verification and every timed pass is one piece. A piece is done where a record names it with the
operator's present sources and this device; a source that changed makes its pieces open again. A call begins no piece
that it does not expect to end in time, and the next call goes on there. Pieces of an operator with anything wrong
are not timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwright.kernels.cases import BenchCase, OpSuite
from shardwright.kernels.registry import operator, source_sha256
from shardwright.kernels.suite_plan import SuiteStep
from shardwright.kernels.verify import VerifyResult
from shardwright.kernels.verify_jobs import FAILURES, Keep, Part, parts
from shardwright.schemas.files import write_atomic

RECORDS = "suite-records.jsonl"
VERIFY, TIME = "verify ", "time "
"""How the names of both kinds of pieces begin."""


class Record(NamedTuple):
    """One piece that is done."""

    piece: str
    source: str
    device: str
    ok: bool
    seconds: float
    detail: str = ""
    """What was wrong, or what was measured."""


class Records:
    """Records of this call's folder and of earlier calls', the newest last; the file is always whole."""

    def __init__(self, out: Path, before: Iterable[Path] = ()) -> None:
        self.path = out / RECORDS
        self._all = [record for folder in (*before, out) for record in _read(folder / RECORDS)]

    def add(self, record: Record) -> None:
        self._all.append(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, "".join(json.dumps(found._asdict()) + "\n" for found in self._all).encode())

    def done(self, piece: str, source: str, device: str) -> Record | None:
        """The record of a piece with these sources on this device."""
        same = (r for r in reversed(self._all) if (r.piece, r.source, r.device) == (piece, source, device))
        return next(same, None)

    def seconds(self, piece: str, device: str) -> float | None:
        """What the piece took last on this device, with whatever sources."""
        return next((r.seconds for r in reversed(self._all) if (r.piece, r.device) == (piece, device)), None)


def _read(path: Path) -> list[Record]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Record(**json.loads(line)) for line in lines if line.strip()]


class TimedPass(NamedTuple):
    """One pass of one case."""

    suite: OpSuite
    case: BenchCase
    name: str

    def __str__(self) -> str:
        return f"{TIME}{self.case.case} {self.name}"


@dataclass(frozen=True)
class Tools:
    """What a call does its work with; a rehearsal puts its own in."""

    verify: Callable[[Sequence[Part], Keep, Callable[[], bool]], object]
    """Verifies parts: calls the first function with each part's results, and begins none once the second is true."""
    time: Callable[[TimedPass], str]
    """Times one pass, writes its line and evidence, and gives a word on it."""
    clock: Callable[[], float]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    done: tuple[str, ...]
    left: tuple[str, ...]
    wrong: tuple[str, ...]
    """Operators with anything wrong, whose passes are neither done nor left; and passes that failed."""


def passes_of(step: SuiteStep) -> list[TimedPass]:
    """The passes of a step, in the order of its cases."""
    suites = [suite for op in step.verify for suite in operator(op).load_suites()]
    return [
        TimedPass(suite, case, name)
        for prefix in step.cases
        for suite in suites
        for case in suite.bench
        if case.case.startswith(prefix)
        for name in case.passes
    ]


class Call:
    """One call: pieces in the plan's order until they are done or the time is over."""

    def __init__(self, records: Records, device: str, limit_s: float, tools: Tools) -> None:
        self.records, self.device, self.tools = records, device, tools
        self.ends = tools.clock() + limit_s
        self.finished: dict[str, bool] = {}
        """Pieces that this plan has met and that are done; whether they are right."""
        self.left: dict[str, None] = {}

    def run(self, steps: Sequence[SuiteStep], place: str) -> Outcome:
        """All steps, or as many as the time allows; ``place``: where verification runs (``cuda``, ``cpu``)."""
        for step in steps:
            self.verify(step, place)
            for timed in passes_of(step):
                self.time(timed, step.pass_s)
        bad = {piece for piece, ok in self.finished.items() if not ok}
        failed = {piece for piece in bad if piece.startswith(TIME)}
        return Outcome(tuple(self.finished), tuple(self.left), tuple(sorted(self.wrong() | failed)))

    def wrong(self) -> set[str]:
        """Operators of which a part is wrong."""
        bad = (piece for piece, ok in self.finished.items() if not ok and piece.startswith(VERIFY))
        return {piece.removeprefix(VERIFY).partition("[")[0] for piece in bad}

    def verify(self, step: SuiteStep, place: str) -> None:
        """The open parts of a step. Beside others a part's own time is not known: the plan's is the least."""
        work = [part for part in parts(step.verify, place) if not self.known(f"{VERIFY}{part}", part.op)]
        needs = max((self.expected(f"{VERIFY}{part}", step.part_s) for part in work), default=0.0)
        needs = max(needs, step.part_s)
        self.left.update(dict.fromkeys(f"{VERIFY}{part}" for part in work))
        if not work or self.over(needs):
            return
        began = [self.tools.clock()]

        def keep(part: Part, results: list[VerifyResult]) -> None:
            took, began[0] = self.tools.clock() - began[0], self.tools.clock()
            bad = [f"{r.case} {r.value}: {r.error} of {r.allowed:.2e} {r.detail}" for r in results if not r.ok]
            self.add(f"{VERIFY}{part}", part.op, not bad, took, "; ".join(bad)[:2000])

        self.tools.verify(work, keep, lambda: self.over(needs))

    def time(self, timed: TimedPass, seconds: float) -> None:
        piece, op = str(timed), timed.suite.op
        if piece in self.left or self.known(piece, op) or op in self.wrong():
            return
        unverified = any(left.startswith(f"{VERIFY}{op}[") for left in self.left)
        if unverified or self.over(self.expected(piece, seconds)):
            self.left[piece] = None
            return
        began = self.tools.clock()
        try:
            ok, detail = True, self.tools.time(timed)
        except FAILURES as error:
            ok, detail = False, f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self.add(piece, op, ok, self.tools.clock() - began, detail)

    def known(self, piece: str, op: str) -> bool:
        """Whether a piece is done, in this call or in one before; a pass that failed before is tried again."""
        record = None if piece in self.finished else self.records.done(piece, source_sha256(op), self.device)
        if record is not None and (record.ok or piece.startswith(VERIFY)):
            self.finished[piece] = record.ok
        return piece in self.finished

    def add(self, piece: str, op: str, ok: bool, seconds: float, detail: str) -> None:
        self.records.add(Record(piece, source_sha256(op), self.device, ok, round(seconds, 2), detail))
        self.finished[piece] = ok
        self.left.pop(piece, None)
        self.tools.say(f"{piece}: {'right' if ok else 'WRONG'}, {seconds:.1f} s {detail}".rstrip())

    def expected(self, piece: str, assumed: float) -> float:
        measured = self.records.seconds(piece, self.device)
        return assumed if measured is None else measured

    def over(self, seconds: float) -> bool:
        """Whether a piece of this length would end too late."""
        return self.tools.clock() + seconds > self.ends
