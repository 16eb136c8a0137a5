"""A worker takes an approved, current plan and nothing else; every refusal has its exit code and names both sides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.runtime import execute
from shardwright.runtime.failure import clear_failure, read_failure
from shardwright.runtime.verify import verify_plan_against_world
from shardwright.schemas.errors import RecipeError, StalePlanError
from shardwright.schemas.fusion import FusionDecision

Run = Callable[[Any], int]


def failure(job: Any) -> dict[str, Any]:
    found = read_failure(job.run_dir)
    assert found is not None
    return found


def test_unapproved_plan_ends_with_3(tiny: Any, make_job: Any, strategy: Any, single_rank: Run) -> None:
    job = make_job(tiny, strategy(), approve=False)
    assert single_rank(job) == 3
    assert failure(job)["code"] == "approval/needs-approval"
    assert not (job.run_dir / "run.json").exists()


def test_edited_plan_ends_with_5(tiny: Any, make_job: Any, strategy: Any, single_rank: Run) -> None:
    job = make_job(tiny, strategy())
    raw = json.loads(job.plan_path.read_text())
    raw["decision"]["recipe"]["lora"]["rank"] = 8
    job.plan_path.write_text(json.dumps(raw))
    assert single_rank(job) == 5
    assert failure(job)["code"] == "plan/decision-edited"


def test_resealed_plan_names_the_edited_field(tiny: Any, make_job: Any, strategy: Any, single_rank: Run) -> None:
    """An editor who recomputes the hashes and even gets an approval is still met by the world."""
    job = make_job(tiny, strategy())
    target = job.plan.decision.lora_targets[0].model_copy(update={"rank": 8})
    edited = make_job(tiny, strategy(), lora_targets=(target, *job.plan.decision.lora_targets[1:]))
    assert single_rank(edited) == 5
    found = failure(edited)
    assert found["code"] == "stale/changed"
    assert "decision.lora_targets[0].rank: the plan says 8, found 4" in str(found["what"])


def test_restarted_worker_ends_at_once_with_the_same_code(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tiny, strategy(), approve=False)
    assert single_rank(job) == 3
    monkeypatch.setattr(execute, "execute", lambda *paths: pytest.fail("it ran"))
    assert single_rank(job) == 3
    clear_failure(job.run_dir)
    assert read_failure(job.run_dir) is None


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("decision.environment.torch", {"environment": {"torch": "1.0.0"}}),
        ("decision.model_type", {"model_type": "llama"}),
        ("decision.checkpoint.config_sha256", None),
        ("decision.data.train_sha256", None),
    ],
)
def test_each_stale_field_is_named(
    field: str, change: dict[str, Any] | None, tiny: Any, make_job: Any, strategy: Any
) -> None:
    job = make_job(tiny, strategy())
    decision = job.plan.decision
    if field == "decision.checkpoint.config_sha256":
        change = {"checkpoint": decision.checkpoint.model_copy(update={"config_sha256": "1" * 64})}
    if field == "decision.data.train_sha256":
        change = {"data": decision.data.model_copy(update={"train_sha256": "1" * 64})}
    stale = make_job(tiny, strategy(), **(change or {}))
    with pytest.raises(StalePlanError, match="changed") as caught:
        verify_plan_against_world(stale.plan, tiny.checkpoint, tiny.data)
    assert caught.value.where == field and caught.value.exit_code == 5
    verify_plan_against_world(job.plan, tiny.checkpoint, tiny.data)


def test_batch_axes_and_kernel_sources_are_verified(tiny: Any, make_job: Any, strategy: Any) -> None:
    wrong_batch = make_job(tiny, strategy(accumulation_steps=3))
    with pytest.raises(StalePlanError, match="sequences a step: the plan says 4, found 3"):
        verify_plan_against_world(wrong_batch.plan, tiny.checkpoint, tiny.data)
    offloaded = make_job(tiny, strategy(offload="activations"))
    with pytest.raises(StalePlanError, match="offload: the plan says activations, this runtime runs none, adapter"):
        verify_plan_against_world(offloaded.plan, tiny.checkpoint, tiny.data)
    fusion = FusionDecision(
        proposal_id="p", pattern="rms_norm", variant="kernel", provider="shardwright", op="rms_norm",
        modules=("model.norm",), roles={"weight": "weight"}, constants={"eps": "0.00001"}, source_sha256="2" * 64,
    )  # fmt: skip
    other_kernel = make_job(tiny, strategy(), fusions=(fusion,))
    with pytest.raises(StalePlanError, match=r"fusions\[0\].source_sha256 \(rms_norm\)"):
        verify_plan_against_world(other_kernel.plan, tiny.checkpoint, tiny.data)


def test_missing_data_is_refused(tiny: Any, make_job: Any, strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="missing-data"):
        verify_plan_against_world(make_job(tiny, strategy()).plan, tiny.checkpoint, tmp_path)


def damaged(tiny: Any, folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the example with one tensor changed."""
    shutil.copytree(tiny.data, folder / "example")
    for path in sorted((folder / "example" / "checkpoint").glob("*.safetensors")):
        tensors = load_file(path)
        if name in tensors:
            save_file({**tensors, name: change(tensors[name])}, path, metadata={"format": "pt"})
            return type(tiny)(folder / "example" / "checkpoint", folder / "example")
    raise AssertionError(name)


def test_nan_weight_ends_with_9_and_names_the_tensor(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, tmp_path: Path
) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    poisoned = damaged(tiny, tmp_path, name, lambda value: value.index_fill(0, torch.tensor([3]), float("nan")))
    job = make_job(poisoned, strategy())
    assert single_rank(job) == 9
    found = failure(job)
    assert found["code"] == "check/nan-weights" and name in str(found["where"])
    assert job.record.status == "failed" and "nan-weights" in job.record.failure
    assert not (job.run_dir / "checkpoints").exists()


def test_wrong_gradient_scale_ends_with_9(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts' gradients two times too large (what averages under ep 2 would give): caught before the step."""
    from shardwright.runtime.experts import grouped

    plain = grouped._Loop.outer
    monkeypatch.setattr(grouped._Loop, "outer", staticmethod(lambda *args: plain(*args) * 2))
    job = make_job(tiny, strategy())
    assert single_rank(job) == 9
    assert failure(job)["code"] == "check/gradient-norm"
    assert job.record.steps == () and not (job.run_dir / "checkpoints").exists()


def test_wrong_forward_ends_with_9(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routing weights left out of the combination: the first loss is not the plain model's."""
    from shardwright.runtime.experts import module

    plain = module.combine
    monkeypatch.setattr(
        module, "combine", lambda rows, route, weights, *rest: plain(rows, route, torch.ones_like(weights), *rest)
    )
    job = make_job(tiny, strategy())
    assert single_rank(job) == 9
    assert failure(job)["code"] == "check/first-loss"


def test_layers_stand_in_where_the_model_does_not_fit(
    tiny: Any, qwen: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.runtime.checks import room

    monkeypatch.setattr(room, "WHOLE_MODEL_SHARE", 0.0)
    recipe = {"schedule": {"steps": 1}, "lora": {"targets": ["attention", "experts", "dense_mlp"]}}
    job = make_job(qwen, strategy(), recipe=recipe)
    assert single_rank(job) == 0
    layers = [check for check in job.record.checks if check.scope == "by_layer"]
    assert [check.name for check in layers] == ["layer-equal:model.layers.0", "layer-equal:model.layers.1"]
    assert "first-loss" not in {check.name for check in job.record.checks}
    from shardwright.runtime.experts import grouped

    plain = grouped._Loop.outer
    monkeypatch.setattr(grouped._Loop, "outer", staticmethod(lambda *args: plain(*args) * 2))
    broken = make_job(tiny, strategy(), recipe={"schedule": {"steps": 1}})
    assert single_rank(broken) == 9
    assert failure(broken)["code"] == "check/layer-equal:model.layers.0"


def test_finished_run_is_not_run_again(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 1}})
    assert single_rank(job) == 0
    before = (job.run_dir / "run.json").read_bytes()
    monkeypatch.setattr(execute, "build", lambda *args: pytest.fail("it ran again"))
    assert single_rank(job) == 0
    assert (job.run_dir / "run.json").read_bytes() == before


def test_attention_only_leaves_experts_frozen_and_alone(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run
) -> None:
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 2}, "lora": {"targets": ["attention"]}})
    assert single_rank(job) == 0
    assert len(job.record.expert_loads) == 2 and sum(job.record.expert_loads[0].tokens) == 2 * 4 * 32 * 2
