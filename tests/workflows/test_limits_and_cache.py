"""Branches side by side, time limits with typed causes, and what one run has worked out for another."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import workflow_fakes as fakes

from shardwright.schemas.errors import InfeasibleError, RunError, UsageError
from shardwright.schemas.plan import load_plan
from shardwright.workflows import cache as caching
from shardwright.workflows.adapt import AFTER, NODES, descendants
from shardwright.workflows.cache import NodeCache, default_cache
from shardwright.workflows.drive import drive
from shardwright.workflows.events import read_events
from shardwright.workflows.limits import DEFAULT_S, LEFT_BEHIND, parse_limits


def test_structure_and_search_run_beside_each_other(tmp_path, request_of, approving) -> None:
    """Each waits for the other to have begun: one after the other they would never end."""
    meet = threading.Barrier(2, timeout=20)

    def structure(*arguments):
        meet.wait()
        return fakes.structured()

    def search(*arguments, **named):
        meet.wait()
        return fakes.searched()

    stages = fakes.fake_stages(structure=structure, search=search)
    assert drive(request_of(), tmp_path / "run", stages=stages, policy=approving).status == "finished"


def test_branches_give_the_bytes_of_either_order(tmp_path, request_of, approving) -> None:
    plans = []
    for slow in ("structure", "search"):

        def late(*arguments, name=slow, **named):
            time.sleep(0.3)
            return fakes.structured() if name == "structure" else fakes.searched()

        run = tmp_path / slow
        drive(request_of(), run, stages=fakes.fake_stages(**{slow: late}), policy=approving)
        plans.append((run / "plan.json").read_bytes())
    assert plans[0] == plans[1]


def test_one_failing_branch_is_named_and_the_other_is_kept(tmp_path, request_of, approving) -> None:
    run, calls = tmp_path / "run", Counter()

    def structure(*arguments):
        calls["structure"] += 1
        time.sleep(0.2)
        return fakes.structured()

    def search(*arguments, **named):
        calls["search"] += 1
        if calls["search"] == 1:
            raise RunError("broken", "no disk", where="search", next_action="mend it")
        return fakes.searched()

    stages = fakes.fake_stages(structure=structure, search=search)
    with pytest.raises(RunError, match="no disk"):
        drive(request_of(), run, stages=stages, policy=approving)
    failed = [event["node"] for event in read_events(run) if event["kind"] == "failed"]
    assert failed == ["search"]
    assert drive(request_of(), run, stages=stages, policy=approving).status == "finished"
    assert calls == {"structure": 1, "search": 2}


def test_what_no_other_try_can_mend_ends_the_node_beside_it(tmp_path, request_of, approving) -> None:
    """Where nothing fits nobody waits for the structure agent: it is left behind, and told so."""
    run, free, begun = tmp_path / "run", threading.Event(), threading.Event()

    def structure(*arguments):
        begun.set()
        free.wait(60)
        return fakes.structured()

    def search(*arguments, **named):
        begun.wait(20)
        raise InfeasibleError("memory", "nothing fits", where="search", next_action="more devices")

    stages, began = fakes.fake_stages(structure=structure, search=search), time.monotonic()
    with pytest.raises(InfeasibleError, match="nothing fits") as caught:
        drive(request_of("plan"), run, stages=stages, policy=approving)
    assert time.monotonic() - began < 30 and caught.value.exit_code == 7
    told = [(event["node"], event["kind"], event["detail"]) for event in read_events(run)]
    assert [one for one in told if one[1] == "failed"] == [("search", "failed", "infeasible/memory")]
    assert ("structure", "note", "structure was ended: infeasible/memory beside it") in told
    assert any(thread.is_alive() for thread in LEFT_BEHIND)
    free.set()
    for thread in LEFT_BEHIND:
        thread.join(20)
    LEFT_BEHIND.clear()
    again = fakes.fake_stages()
    assert drive(request_of("plan"), run, stages=again, policy=approving).status == "planned"


def test_the_order_of_nodes_is_that_of_their_dependencies() -> None:
    names = list(NODES)
    assert all(names.index(before) < names.index(node) for node in names for before in AFTER[node])
    assert descendants("search") == set(names[names.index("join") :])
    assert descendants("structure") == {"propose", *names[names.index("join") :]}


def test_a_node_that_takes_too_long_ends_with_its_cause_and_goes_on_later(tmp_path, request_of, approving) -> None:
    run, free = tmp_path / "run", threading.Event()

    def structure(*arguments):
        free.wait(30)
        return fakes.structured()

    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        drive(
            request_of(),
            run,
            stages=fakes.fake_stages(structure=structure),
            policy=approving,
            limits={"structure": 0.2},
        )
    free.set()
    assert time.monotonic() - began < 20
    assert caught.value.code == "run/timed-out" and "--time-limit structure=SECONDS" in caught.value.next_action
    assert ("structure", "failed", "run/timed-out") in [(e["node"], e["kind"], e["detail"]) for e in read_events(run)]
    assert drive(request_of(), run, stages=fakes.fake_stages(), policy=approving).status == "finished"


@pytest.mark.parametrize("heard", [True, False], ids=["foreground", "background"])
def test_training_past_its_time_is_interrupted_and_can_be_resumed(tmp_path, request_of, approving, heard) -> None:
    """The main thread gets what Ctrl-C gives it, so that workers save; the cause is the time, not the user."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler if heard else signal.SIG_IGN)
    try:
        past_its_time(tmp_path, request_of, approving)
        assert heard or signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def past_its_time(tmp_path, request_of, approving) -> None:
    run, seen = tmp_path / "run", []

    def launch(*arguments):
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            seen.append("saved")
            raise
        return 0

    with pytest.raises(RunError, match="execute took longer"):
        drive(request_of(), run, stages=fakes.fake_stages(launch=launch), policy=approving, limits={"execute": 0.3})
    assert seen == ["saved"]
    assert drive(request_of(), run, stages=fakes.fake_stages(), policy=approving).status == "finished"


def test_time_limits_are_read_over_the_defaults() -> None:
    limits = parse_limits(["search=5", "execute=86400"], tuple(NODES))
    assert limits == {**DEFAULT_S, "search": 5.0, "execute": 86400.0}
    assert "review" not in limits, "a person takes the time that it takes"
    for wrong in ("search", "search=", "search=-1", "search=nan", "search=inf", "review=5", "nothing=5"):
        with pytest.raises(UsageError, match="bad-time-limit"):
            parse_limits([wrong], tuple(NODES))


def test_a_process_with_a_left_thread_ends_at_once_and_cleanly() -> None:
    """A thread in native code at the interpreter's end would abort the process."""
    script = (
        "import sys, time\nfrom shardwright.workflows import limits\nfrom shardwright.workflows.cli import main\n"
        "def app(): limits.limited('search', 0.05, lambda: time.sleep(60))\n"
        "main.app = app\nmain.main()"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and "run/timed-out" in done.stderr and time.monotonic() - began < 45


@pytest.fixture
def counted():
    """Structure parsing that counts how often it is done."""
    calls: list[int] = []

    def structure(*arguments):
        calls.append(1)
        return fakes.structured()

    return calls, fakes.fake_stages(structure=structure)


def test_an_unchanged_checkpoint_is_not_parsed_twice(tmp_path, request_of, approving, counted) -> None:
    calls, stages = counted
    cache = NodeCache(tmp_path / "cache")
    for name in "ab":
        drive(request_of(), tmp_path / name, stages=stages, policy=approving, cache=cache)
    assert len(calls) == 1
    assert "cached" in [e["kind"] for e in read_events(tmp_path / "b") if e["node"] == "structure"]
    assert (tmp_path / "a" / "plan.json").read_bytes() == (tmp_path / "b" / "plan.json").read_bytes()
    drive(request_of(), tmp_path / "c", stages=stages, policy=approving)
    assert len(calls) == 2, "without a cache nothing is shared"


@pytest.mark.parametrize("change", ["checkpoint", "code", "artifact", "entry"])
def test_whatever_changes_is_parsed_again(tmp_path, request_of, approving, counted, monkeypatch, change) -> None:
    calls, stages = counted
    cache = NodeCache(tmp_path / "cache")
    drive(request_of(), tmp_path / "a", stages=stages, policy=approving, cache=cache)
    if change == "checkpoint":
        other = fakes.profile().model_copy(update={"tensors": 2})
        stages = fakes.fake_stages(structure=stages.structure, profile=lambda folder: other)
    elif change == "code":
        monkeypatch.setattr(caching, "code_sha256", lambda: "cd" * 32)
    elif change == "artifact":
        for path in (cache.folder / "artifacts").iterdir():
            path.write_bytes(path.read_bytes()[:-1])
    else:
        for path in cache.folder.glob("*.json"):
            path.write_text("{")
    drive(request_of(), tmp_path / "b", stages=stages, policy=approving, cache=cache)
    assert len(calls) == 2
    load_plan(tmp_path / "b" / "plan.json")


def test_the_cache_stands_where_the_user_says(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(caching.VARIABLE, "off")
    assert default_cache() is None
    monkeypatch.setenv(caching.VARIABLE, str(tmp_path))
    found = default_cache()
    assert found is not None and found.folder == tmp_path
    monkeypatch.delenv(caching.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = default_cache()
    assert found is not None and found.folder == tmp_path / "shardwright" / "nodes"
