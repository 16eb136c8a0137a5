"""A run that was cut goes on as if it had not been: with all that has a memory between steps switched on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.runtime.state import draw_seed

RECIPE = {
    "lora": {"targets": ["attention", "experts", "router"], "allow_router": True, "dropout": "0"},
    "balance": {"auxiliary": "0.5", "sequence": "0.1", "target_load": "1.2"},
    "batch": {"sequence_tokens": 32, "global_batch_sequences": 4},
    "schedule": {"steps": 6, "warmup_steps": 2, "decay": "cosine", "save_every_steps": 3, "evaluate_every_steps": 2},
    "optimizer": {"learning_rate": "0.02", "weight_decay": "0.1", "max_grad_norm": "0.3"},
}


def numbers(job: Any) -> tuple[list[Any], list[Any]]:
    record = job.record
    steps = [(one.loss, one.grad_norm, one.learning_rate, one.balance_loss) for one in record.steps]
    return steps, [one.loss for one in record.evaluations]


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_schedules_balancing_accumulation_and_clips_go_on(
    recomputed: str, tiny: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int]
) -> None:
    """Bit for bit: every loss, norm, rate and balancing loss after the save, and held-out losses."""
    job = make_job(tiny, strategy(checkpointing=recomputed, accumulation_steps=4), recipe=RECIPE)
    assert single_rank(job) == 0
    before = numbers(job)
    assert len({one[3] for one in before[0]}) == 6, "the loads move the coefficient from step to step"
    shutil.rmtree(job.run_dir / "checkpoints" / "step-6")
    assert single_rank(job) == 0
    assert job.record.resumed_from_steps == (3,) and numbers(job) == before


def test_evaluation_leaves_no_trace_in_training(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int]
) -> None:
    """With dropout: held-out sequences draw no random numbers, count no rows and keep no gradient."""
    recipe = {
        "lora": {"targets": ["attention"], "dropout": "0.3"},
        "schedule": {"steps": 4, "save_every_steps": 0},
    }
    losses, rows = [], []
    for every in (0, 1):
        job = make_job(
            tiny, strategy(), recipe={**recipe, "schedule": {**recipe["schedule"], "evaluate_every_steps": every}}
        )
        assert single_rank(job) == 0
        losses.append(numbers(job)[0])
        rows.append([one.tokens for one in job.record.expert_loads])
    assert losses[0] == losses[1] and rows[0] == rows[1]


def test_every_rank_drops_its_own_and_a_recipe_says_what() -> None:
    seeds = [draw_seed(seed, step, rank) for seed in (0, 1, 2**60) for step in (0, 3) for rank in (0, 1, 127)]
    assert len(set(seeds)) == len(seeds)
    for seed in seeds:
        torch.Generator().manual_seed(seed)
