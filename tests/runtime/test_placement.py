"""Runs whose experts the plan placed or copied: losses, saves, resumes on other places, exports, as without.

Two-rank runs share one torchrun; what they are compared with and carried to runs on one rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.experts.placement import Places, check_slots, runs_of, slots_of, spans
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.state import read_adapters
from shardwright.runtime.state_adopt import adopt
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.strategy import Mesh, ParallelStrategy

SAVED, STEPS = 2, 5
RECIPE = {"schedule": {"steps": STEPS, "save_every_steps": SAVED}}
PLACED = {"ep": 2, "expert_placement": "balanced", "expert_slots": ("3,0,1,2", "2,1,0,3")}
COPIED = {**PLACED, "redundant_experts": 1, "expert_slots": ("0,2,3,1,2,3", "1,0,3,2,0,1")}


def carried(whole: Any, job: Any) -> Any:
    """A job that goes on from the first save of another."""
    job.run_dir.mkdir()
    job.plan.save(job.run_dir / "plan.json")
    early = job.run_dir.parent / "early"
    shutil.copytree(whole.run_dir, early)
    for folder in (early / "checkpoints").glob("step-*"):
        if folder.name != f"step-{SAVED}":
            shutil.rmtree(folder)
    adopt(early, job.run_dir)
    return job


@pytest.fixture(scope="module")
def runs(tiny: Any, make_job: Any, strategy: Any, run_many: Any, single_rank: Callable[[Any], int]) -> dict[str, Any]:
    def job(axes: dict[str, Any]) -> Any:
        return make_job(tiny, strategy(**axes), recipe=RECIPE)

    jobs = {"one": job({})}
    assert single_rank(jobs["one"]) == 0
    jobs |= {"placed": job(PLACED), "copied": job(COPIED), "to-copied": carried(jobs["one"], job(COPIED))}
    jobs["to-host"] = carried(jobs["one"], job({"ep": 2, "offload": "adapter_optimizer"}))
    run_many(2, [jobs[name] for name in ("placed", "copied", "to-copied", "to-host")])
    jobs["from-copied"] = carried(jobs["copied"], job({}))
    assert single_rank(jobs["from-copied"]) == 0
    return jobs


@pytest.mark.parametrize("name", ["placed", "copied"])
def test_a_run_with_placed_experts_is_the_plain_run(name: str, runs: dict[str, Any]) -> None:
    """Losses, norms and loads by expert; the run's own checks against plain transformers passed."""
    ours, one = runs[name].record, runs["one"].record
    assert runs[name].losses == pytest.approx(runs["one"].losses, abs=1e-5) and len(ours.steps) == STEPS
    assert [step.grad_norm for step in ours.steps] == pytest.approx([step.grad_norm for step in one.steps], rel=1e-4)
    assert [load.tokens for load in ours.expert_loads] == [load.tokens for load in one.expert_loads]
    assert all(check.passed for check in ours.checks) and len(ours.checks) == len(one.checks)


def test_an_optimizer_on_the_host_goes_on_as_one_on_the_device(runs: dict[str, Any]) -> None:
    """Its moments come from a save, are stepped on the host, and are saved again."""
    job, one = runs["to-host"], runs["one"]
    assert job.record.resumed_from_steps == (SAVED,) and job.losses == pytest.approx(one.losses, abs=1e-5)
    saved = [read_adapters(runs[name].run_dir / "checkpoints" / f"step-{STEPS}") for name in ("to-host", "one")]
    for key, value in saved[1].items():
        torch.testing.assert_close(saved[0][key], value, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["to-copied", "from-copied"])
def test_a_run_goes_on_with_other_places(name: str, runs: dict[str, Any]) -> None:
    job, one = runs[name], runs["one"]
    assert job.record.resumed_from_steps == (SAVED,)
    assert job.losses == pytest.approx(one.losses, abs=1e-5) and len(job.losses) == STEPS


@pytest.mark.parametrize("name", ["placed", "copied"])
def test_what_is_saved_and_exported_knows_no_places(name: str, runs: dict[str, Any]) -> None:
    ours, plain = (read_adapters(runs[one].run_dir / "checkpoints" / f"step-{STEPS}") for one in (name, "one"))
    assert ours.keys() == plain.keys()
    for key, value in plain.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-5, msg=key)
    files = {}
    for one in (name, "one"):
        export_adapter(runs[one].run_dir, runs[one].example.checkpoint)
        files[one] = load_file(runs[one].run_dir / "adapter" / "adapter_model.safetensors")
    assert {key: value.shape for key, value in files[name].items()} == {
        key: value.shape for key, value in files["one"].items()
    }
    assert all(check.passed for check in check_adapter(runs[name].run_dir, runs[name].example.checkpoint))


@pytest.mark.parametrize(
    ("slots", "ep"), [((0, 1, 2, 2), 2), ((0, 1, 2), 2), ((0, 1, 2, 3, 0), 2), ((0, 0, 1, 2, 3, 1), 2)]
)
def test_wrong_places_are_refused(slots: tuple[int, ...], ep: int) -> None:
    with pytest.raises(LegalityError) as caught:
        check_slots(slots, 4, ep, "model.layers.0.mlp.experts")
    assert caught.value.code == "legality/expert-slots"


def test_a_plan_that_wants_places_must_name_them() -> None:
    wanted = ParallelStrategy(mesh=Mesh(ep=2), expert_placement="balanced")
    with pytest.raises(LegalityError, match="names no places"):
        slots_of(wanted)
    with pytest.raises(ValueError, match="expert_slots"):
        ParallelStrategy(mesh=Mesh(ep=2), expert_slots=("0,1",))


def test_copies_take_turns_by_token() -> None:
    """Expert 1 has three copies: tokens 0, 1, 2, 3 take them in order; again is the same."""
    places = Places((0, 1, 2, 1, 3, 1), 4)
    index = torch.tensor([[1, 0], [1, 2], [3, 1], [1, 3]])
    assert places.of(index).tolist() == [[1, 0], [3, 2], [4, 5], [1, 4]]
    assert torch.equal(places.of(index), places.of(index.clone()))


def test_rows_of_a_rank_are_those_that_fsdp_gives() -> None:
    """The boxes of torch's own DTensor, for stacks that divide and stacks that do not."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Replicate, Shard

    for rows, ep, shards in ((8, 2, 2), (12, 4, 2), (6, 2, 2), (4, 2, 4), (10, 2, 3)):
        for part in range(shards):
            for rank in range(ep):
                shape, offset = _compute_local_shape_and_global_offset(
                    (rows, 3), (1, ep, shards), [0, rank, part], [Replicate(), Shard(0), Shard(0)]
                )
                found = spans(rows, ep, shards)[part * ep + rank]
                assert len(found) == shape[0] and (not shape[0] or found[0] == offset[0]), (rows, ep, shards)


def test_a_copy_that_strays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places of one rank's view: the second copy of expert 0 differs in one bit of one value."""
    from shardwright.runtime.checks import step

    values = torch.arange(6.0).reshape(3, 2)
    owned: Any = SimpleNamespace(adapter=True, copied=True, local=lambda: values, name="experts.up_lora_b")
    monkeypatch.setattr(step, "by_expert", lambda owned, values, ranks: values)
    for bump, agree in ((0.0, True), (1e-6, False)):
        monkeypatch.setattr(step, "by_place", lambda owned, values, ranks, bump=bump: values + bump)
        ranks: Any = SimpleNamespace(sizes=Mesh())
        found = step.replicas_agree({"experts.up_lora_b": owned}, ranks)
        assert found.passed is agree and ("copies of experts in experts.up_lora_b" in found.evidence) is not agree


def test_neighbours_are_read_together() -> None:
    assert list(runs_of((5, 6, 7, 2, 0, 1))) == [(0, 5, 8), (3, 2, 3), (4, 0, 2)]
    assert list(runs_of(())) == []
