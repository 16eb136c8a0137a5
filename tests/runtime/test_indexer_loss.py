"""The training loop and the indexers' own loss: asked for once, told each step, put on the reference, too.

What the loss is stands in ``test_fused_dsa.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Taken:
    """Stands for the loss of some layers: half a unit a step."""

    def __init__(self) -> None:
        self.plain: list[Any] = []

    def take(self) -> torch.Tensor:
        return torch.tensor(0.5)

    def put_on_plain(self, model: Any) -> SimpleNamespace:
        self.plain.append(model)
        return SimpleNamespace(share=0.0)


def test_each_step_tells_the_loss_and_the_reference_has_it(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Taken()
    monkeypatch.setattr("shardwright.runtime.train.indexer_loss_for", lambda plan, model, meter: taken)
    job = make_job(tiny, strategy())
    assert single_rank(job) == 0
    assert [step.indexer_loss for step in job.record.steps] == [0.5] * len(job.record.steps)
    assert len(taken.plain) == 1


def test_a_model_without_an_indexer_refuses_a_coefficient(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    job = make_job(tiny, strategy(), recipe={"indexer": {"loss": "0.1"}})
    assert single_rank(job) == 2
    assert "indexer-loss-frozen" in (job.run_dir / "failure.json").read_text(encoding="utf-8")
