"""G5, G7: a run goes on from its save on another mesh: ep 4 → ep 2, FSDP 4 → 2, with ranks that keep nothing."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from shardwright.runtime.state_adopt import adopt
from shardwright.runtime.state_folder import read_manifest

SAVED, STEPS = 12, 32
RECIPE = {"schedule": {"steps": STEPS, "save_every_steps": SAVED}}
FEW_ROWS = {**RECIPE, "lora": {"rank": 2}}
"""Fewer rows in A than ranks: some ranks keep nothing of it."""


@pytest.fixture(scope="module")
def meshes(tiny: Any, few_experts: Any, make_job: Any, strategy: Any, run_many: Any) -> dict[str, tuple[Any, Any]]:
    """Name → (whole run on four ranks, its first steps carried to two ranks and finished there)."""
    axes = {
        "ep": (tiny, RECIPE, {"ep": 4}, {"ep": 2}),
        "fsdp": (few_experts, FEW_ROWS, {"shard": 4}, {"shard": 2}),
    }
    wide = {
        name: make_job(example, strategy(**four), recipe=recipe) for name, (example, recipe, four, _) in axes.items()
    }
    run_many(4, list(wide.values()))
    narrow = {}
    for name, (example, recipe, _, two) in axes.items():
        job = make_job(example, strategy(**two), recipe=recipe)
        job.run_dir.mkdir()
        job.plan.save(job.run_dir / "plan.json")
        early = job.run_dir.parent / "early"
        shutil.copytree(wide[name].run_dir, early)
        for folder in (early / "checkpoints").glob("step-*"):
            if folder.name != f"step-{SAVED}":
                shutil.rmtree(folder)
        adopt(early, job.run_dir)
        narrow[name] = job
    run_many(2, list(narrow.values()))
    return {name: (wide[name], narrow[name]) for name in axes}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep", "fsdp"])
def test_half_of_the_ranks_go_on_where_all_were(name: str, meshes: dict[str, tuple[Any, Any]]) -> None:
    """The first step after the change of mesh differs by rounding only; so does the twentieth."""
    whole, carried = meshes[name]
    assert carried.record.resumed_from_steps == (SAVED,) and carried.record.world_size == 2
    assert len(carried.losses) == STEPS
    assert carried.losses[:SAVED] == whole.losses[:SAVED]
    first, last = (abs(carried.losses[at] - whole.losses[at]) for at in (SAVED, -1))
    print(f"{name}: first step {first:.2e}, after {STEPS - SAVED} steps {last:.2e}")  # noqa: T201
    assert first <= 1e-6 and last <= 1e-4
    manifest = read_manifest(carried.run_dir / "checkpoints" / f"step-{SAVED}")
    assert manifest["carried_from"]["hashes"]["decision"] == whole.plan.hashes.decision
    assert manifest["hashes"]["decision"] == carried.plan.hashes.decision
    assert any(whole.plan.hashes.decision[:16] in line for line in carried.record.warnings)
