"""A run whose held-out loss no longer falls ends, is whole, and exports."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shardwright.runtime.early_stop import EarlyStop
from shardwright.runtime.export.peft import export_adapter
from shardwright.schemas.recipe import ScheduleSpec


def test_evaluations_without_a_lower_loss_are_counted_in_a_row() -> None:
    stop = EarlyStop(2, [3.0, 2.5, 2.6])
    assert not stop.after(2.4)
    assert not stop.after(2.4), "equal is not lower"
    assert stop.after(2.45)
    assert not any(EarlyStop(0).after(loss) for loss in (1.0, 2.0, 3.0))


def test_it_needs_evaluations() -> None:
    with pytest.raises(ValidationError, match="evaluate_every_steps"):
        ScheduleSpec(early_stop_evaluations=1)


def test_a_run_that_learns_nothing_ends_early_and_is_whole(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    """A rate too small to change the held-out loss in fp32."""
    recipe = {
        "schedule": {"steps": 9, "evaluate_every_steps": 1, "early_stop_evaluations": 2},
        "optimizer": {"learning_rate": "1e-12"},
    }
    job = make_job(tiny, strategy(), recipe=recipe)
    assert single_rank(job) == 0
    record = job.record
    losses = [one.loss for one in record.evaluations]
    assert record.status == "trained" and record.stopped_at_step == len(record.steps) == 2
    assert min(losses[1:]) >= losses[0]
    assert single_rank(job) == 0 and job.record.steps == record.steps, "nothing is left to do"
    assert export_adapter(job.run_dir, job.example.checkpoint).tensors > 0
