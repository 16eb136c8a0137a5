"""Every mesh trains alike: five steps, losses equal to 1e-5 in fp32, on a tiny Mixtral and a tiny Qwen3-MoE.

All two-rank runs share one torchrun, so do the four-rank ones. Every run's own checks compare its first loss and
gradient norm with plain transformers and plain LoRA in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.export.peft import export_adapter

TOLERANCE = 1e-5
ONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro2": {"micro_batch_sequences": 2},
    "checkpointed": {"checkpointing": "full"},
}
TWO: dict[str, dict[str, Any]] = {
    "fsdp2": {"shard": 2},
    "ep2": {"ep": 2},
    "ep2-micro2": {"ep": 2, "micro_batch_sequences": 2},
    "ep2-checkpointed": {"ep": 2, "checkpointing": "full"},
    "ep2-chunks2": {"ep": 2, "overlap": "chunked", "overlap_chunks": 2},
    "ep2-chunks3-checkpointed": {"ep": 2, "overlap": "chunked", "overlap_chunks": 3, "checkpointing": "full"},
    "fsdp2-checkpointed": {"shard": 2, "checkpointing": "full"},
    "fsdp2-keep": {"shard": 2, "reshard_after_forward": False},
    "replicate2": {"replicate": 2},
}
FOUR: dict[str, dict[str, Any]] = {
    "fsdp2-ep2": {"shard": 2, "ep": 2},
    "fsdp4": {"shard": 4},
    "replicate2-ep2": {"replicate": 2, "ep": 2, "checkpointing": "full"},
}


@pytest.fixture(scope="module")
def one_rank(tiny: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int]) -> dict[str, Any]:
    jobs = {name: make_job(tiny, strategy(**axes)) for name, axes in ONE.items()}
    for job in jobs.values():
        assert single_rank(job) == 0
    return jobs


@pytest.fixture(scope="module")
def qwen_one(qwen: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int]) -> Any:
    job = make_job(qwen, strategy(), recipe={"lora": {"targets": ["attention", "experts", "dense_mlp"]}})
    assert single_rank(job) == 0
    return job


@pytest.fixture(scope="module")
def two_ranks(tiny: Any, qwen: Any, make_job: Any, strategy: Any, run_many: Any) -> dict[str, Any]:
    jobs = {name: make_job(tiny, strategy(**axes)) for name, axes in TWO.items()}
    lora = {"lora": {"targets": ["attention", "experts", "dense_mlp"]}}
    jobs["qwen-ep2"] = make_job(qwen, strategy(ep=2), recipe=lora)
    jobs["bf16-ep2"] = make_job(tiny, strategy(ep=2), recipe={"precision": {"base": "bfloat16"}})
    jobs["bf16-fsdp2"] = make_job(tiny, strategy(shard=2), recipe={"precision": {"base": "bfloat16"}})
    run_many(2, list(jobs.values()))
    return jobs


def same(job: Any, one: Any) -> None:
    assert len(job.losses) == 5
    assert job.losses == pytest.approx(one.losses, abs=TOLERANCE)
    norms = [[step.grad_norm for step in each.record.steps] for each in (job, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    held_out = [[evaluation.loss for evaluation in each.record.evaluations] for each in (job, one)]
    assert held_out[0] == pytest.approx(held_out[1], abs=TOLERANCE)
    assert [load.tokens for load in job.record.expert_loads] == [load.tokens for load in one.record.expert_loads]


def test_one_rank_equals_plain_training(one_rank: dict[str, Any], tiny: Any, make_job: Any) -> None:
    """Five steps of torch's own AdamW on the plain reference model give the same losses."""
    import torch

    from shardwright.runtime.batches import Batches
    from shardwright.runtime.data import load_sequences
    from shardwright.runtime.files import open_files
    from shardwright.runtime.lora.init import initial_box
    from shardwright.runtime.lora.inject import adapter_names, adapter_shapes
    from shardwright.runtime.reference import add_plain_lora, load_plain, reference_step

    job = one_rank["plain"]
    decision = job.plan.decision
    recipe = decision.recipe
    model, files = load_plain(tiny.checkpoint, torch.float32, torch.device("cpu"))
    assert open_files(tiny.checkpoint, torch.float32)[1].stored_dtype is torch.float32
    first = {}
    for target in decision.lora_targets:
        for name, shape in zip(adapter_names(target), adapter_shapes(target), strict=True):
            first[name] = initial_box(recipe.seeds.lora, name, shape, tuple((0, size) for size in shape))
    leaves = add_plain_lora(model, decision.lora_targets, first, "mixtral")
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    cache = job.run_dir / "data"
    rows = load_sequences(tiny.data / recipe.data.train, recipe, tiny.checkpoint, files.config, cache, 1)
    losses = []
    for step in range(1, 6):
        optimizer.zero_grad()
        batch = Batches(rows, 4, 1, 1, recipe.seeds.data).global_batch(step)
        losses.append(reference_step(model, leaves, batch, torch.device("cpu")).loss)
        torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        optimizer.step()
    assert job.losses == pytest.approx(losses, abs=TOLERANCE)


def test_fsdp2_equals_one_rank(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    same(two_ranks["fsdp2"], one_rank["plain"])


def test_ep2_equals_one_rank(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    same(two_ranks["ep2"], one_rank["plain"])


def test_replicate2_equals_one_rank(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    """Two replicas read different data, sum their gradients, and hold the same bits after the step."""
    job = two_ranks["replicate2"]
    same(job, one_rank["plain"])
    agree = next(check for check in job.record.checks if check.name == "replicas-agree")
    assert agree.passed and "2 copies" in agree.evidence


def test_accumulation_keeps_losses(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    """Two micro-batches of one sequence on each of two ranks, four on one rank, one of two: the same batch."""
    steps = {name: job.plan.decision.strategy.accumulation_steps for name, job in {**one_rank, **two_ranks}.items()}
    assert (steps["plain"], steps["ep2"], steps["ep2-micro2"], steps["micro2"]) == (4, 2, 1, 2)
    same(two_ranks["ep2-micro2"], one_rank["plain"])
    same(one_rank["micro2"], one_rank["plain"])


def test_micro_batch_keeps_losses(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    same(one_rank["micro2"], one_rank["plain"])
    same(two_ranks["ep2-micro2"], two_ranks["ep2"])


def test_checkpointing_keeps_losses(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    """Loads are equal too: a recomputation is not counted."""
    for job in (one_rank["checkpointed"], two_ranks["ep2-checkpointed"], two_ranks["fsdp2-checkpointed"]):
        same(job, one_rank["plain"])


def test_chunks_keep_losses(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    """Rows that travel in two or three pieces, with and without a recomputation, give what one piece gives."""
    for name in ("ep2-chunks2", "ep2-chunks3-checkpointed"):
        same(two_ranks[name], one_rank["plain"])


def test_no_reshard_keeps_losses(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    same(two_ranks["fsdp2-keep"], one_rank["plain"])


def test_another_family_with_tied_embeddings(qwen_one: Any, two_ranks: dict[str, Any]) -> None:
    same(two_ranks["qwen-ep2"], qwen_one)
    names = [load.layer for load in qwen_one.record.expert_loads]
    assert names == ["model.layers.1.mlp.experts"]


def test_bf16_base_with_fp32_adapters(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    """bf16 rounds; the run's own checks hold it to the plain bf16 model, and the losses stay near fp32's."""
    for name in ("bf16-ep2", "bf16-fsdp2"):
        assert two_ranks[name].losses == pytest.approx(one_rank["plain"].losses, rel=0.03)


def test_losses_fall_and_every_check_passed(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    for job in [*one_rank.values(), *two_ranks.values()]:
        assert job.losses[-1] < job.losses[0] - 0.05
        assert job.record.status == "trained"
        names = {(check.stage, check.name) for check in job.record.checks}
        assert names == {
            *{("load", "all-loaded"), ("load", "first-loss"), ("step", "gradient-norm")},
            *{("step", "adapters-moved"), ("step", "base-unchanged"), ("step", "replicas-agree")},
            ("step", "gradients-present"),
        }
        assert all(check.passed for check in job.record.checks)


@pytest.mark.parametrize("name", ["fsdp2", "ep2-checkpointed", "qwen-ep2", "bf16-ep2"])
def test_sharded_adapters_export_whole(name: str, two_ranks: dict[str, Any]) -> None:
    """What two ranks saved in parts is one adapter that PEFT loads, with the training model's logits."""
    job = two_ranks[name]
    export_adapter(job.run_dir, job.example.checkpoint)
    assert all(check.passed for check in check_adapter(job.run_dir, job.example.checkpoint))


@pytest.mark.slow
def test_four_ranks_equal_one(
    one_rank: dict[str, Any],
    few_experts: Any,
    tiny: Any,
    make_job: Any,
    strategy: Any,
    run_many: Any,
    single_rank: Callable[[Any], int],
) -> None:
    """Two-dimensional meshes; two replicas, bit-equal after the step (E7); FSDP inside experts where shards outnumber
    them."""
    jobs = {name: make_job(tiny, strategy(**axes)) for name, axes in FOUR.items()}
    few, few_one = (make_job(few_experts, strategy(shard=shard)) for shard in (4, 1))
    run_many(4, [*jobs.values(), few])
    for job in jobs.values():
        same(job, one_rank["plain"])
    assert single_rank(few_one) == 0
    same(few, few_one)
    agree = next(check for check in jobs["replicate2-ep2"].record.checks if check.name == "replicas-agree")
    assert agree.passed and "2 copies" in agree.evidence
    for job in (jobs["fsdp2-ep2"], jobs["replicate2-ep2"], few):
        export_adapter(job.run_dir, job.example.checkpoint)
        assert all(check.passed for check in check_adapter(job.run_dir, job.example.checkpoint))
