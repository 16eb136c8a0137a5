"""What a run keeps of the approvals log, and what a later start of it refuses."""

from __future__ import annotations

import json
import shutil
from typing import Any

from shardwright.runtime import failure
from shardwright.schemas.approval import Approval, append_to_log, read_log
from shardwright.schemas.log_head import LogHead, head_path, write_head

RECIPE = {"schedule": {"steps": 4, "save_every_steps": 2}}


def test_a_resumed_run_misses_a_verdict_that_it_began_with(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    """The log had two lines when the run began; later it has one, and a head that fits it."""
    job = make_job(tiny, strategy(), recipe=RECIPE)
    (first,) = read_log(job.approvals)
    fields = first.model_dump(exclude={"sha256"}) | {"actor": "another", "previous_sha256": first.sha256}
    append_to_log(job.approvals, Approval.seal(**fields))
    assert single_rank(job) == 0
    kept = json.loads((job.run_dir / "run.json").read_bytes())["approvals"]
    assert kept == {"schema_version": 1, "lines": 2, "sha256": read_log(job.approvals)[1].sha256}
    shutil.rmtree(job.run_dir / "checkpoints" / "step-4")
    whole = job.approvals.read_bytes()
    job.approvals.write_bytes(whole.splitlines(keepends=True)[0])
    write_head(job.approvals, LogHead.of([first.sha256]))
    assert single_rank(job) == 3
    left = failure.read_failure(job.run_dir)
    assert left is not None and left["code"] == "approval/cut-log" and "it has 1" in left["what"]
    failure.clear_failure(job.run_dir)
    job.approvals.write_bytes(whole)
    assert single_rank(job) == 0
    assert job.record.resumed_from_steps == (2,)


def test_a_log_from_before_heads_runs_and_the_record_says_so_once(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    job = make_job(tiny, strategy(), recipe=RECIPE)
    head_path(job.approvals).unlink()
    assert single_rank(job) == 0
    shutil.rmtree(job.run_dir / "checkpoints" / "step-4")
    assert single_rank(job) == 0
    assert sum("approvals.jsonl has no head" in line for line in job.record.warnings) == 1
    assert job.record.approvals == LogHead.of([read_log(job.approvals)[0].sha256])
