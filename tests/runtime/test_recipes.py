"""Keys of a recipe that change what is trained: every check of the run holds, and PEFT loads what comes out."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.export.peft import export_adapter

RECIPES: dict[str, dict[str, Any]] = {
    "rank-stabilised, other ranks by pattern": {"lora": {"use_rslora": True, "rank_pattern": {"*.q_proj": 8}}},
    "dropout": {"lora": {"targets": ["attention", "head"], "dropout": "0.2"}},
    "the head": {"lora": {"targets": ["head", "experts"]}},
    "everything in bf16": {
        "lora": {"targets": ["all-linear", "head", "router"], "allow_router": True},
        "precision": {"base": "bfloat16", "adapter": "bfloat16", "reduce": "bfloat16"},
    },
    "no clipping, decay of weights": {"optimizer": {"max_grad_norm": "0", "weight_decay": "0.1"}},
}
SHORT = {"schedule": {"steps": 2, "held_out_sequences": 2}}


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_passes_its_checks_and_exports(
    name: str, tiny: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    job = make_job(tiny, strategy(checkpointing="full"), recipe={**RECIPES[name], **SHORT})
    assert single_rank(job) == 0
    passed_and_exported(job, tiny)


def test_dropout_on_two_ranks(tiny: Any, make_job: Any, strategy: Any, run_many: Any) -> None:
    """The first gradient is compared without dropout, which every rank leaves out; the step itself has it."""
    schedule = {"steps": 1, "held_out_sequences": 2}
    dropped, plain = (
        make_job(
            tiny, strategy(ep=2), recipe={"lora": {"targets": ["attention"], "dropout": rate}, "schedule": schedule}
        )
        for rate in ("0.5", "0")
    )
    run_many(2, [dropped, plain])
    passed_and_exported(dropped, tiny)
    first, without = (job.record.steps[0] for job in (dropped, plain))
    assert first.loss == pytest.approx(without.loss, rel=1e-6), "B is zero"
    assert abs(first.grad_norm / without.grad_norm - 1) > 1e-3
    assert dropped.record.expert_loads == plain.record.expert_loads, "the pass for the check is not counted"


def passed_and_exported(job: Any, example: Any) -> None:
    assert [check for check in job.record.checks if not check.passed] == []
    assert {"gradient-norm", "adapters-moved"} <= {check.name for check in job.record.checks}
    export_adapter(job.run_dir, example.checkpoint)
    results = check_adapter(job.run_dir, example.checkpoint)
    assert len(results) == 4 and all(result.passed for result in results)
