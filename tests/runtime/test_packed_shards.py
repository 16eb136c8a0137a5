"""Packed expert stacks that FSDP cuts and gathers as the bytes that they are.

Every adapter's gradient against plain transformers over the decoded weights; a rank reads and keeps its own share; runs
are saved, go on and are exported as ever; the cost model's packed terms are what the runtime holds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.state_adopt import adopt

RANKS = Path(__file__).resolve().parent / "ranks"
RECIPE = {"batch": {"sequence_tokens": 8, "global_batch_sequences": 8}}
FORMAT = {"fp8": "fp8", "int4": "int4"}
MESHES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mxfp4-fsdp2-ep2": ("mxfp4", 4, {"shard": 2, "ep": 2, "checkpointing": "full"}),
    "fp8-fsdp2-ep2": ("fp8", 4, {"shard": 2, "ep": 2}),
    "blocks-fsdp2-ep2": ("blocks", 4, {"shard": 2, "ep": 2, "prefetch_depth": 2}),
    "mxfp4-rows": ("mxfp4", 2, {"shard": 4, "reshard_after_forward": False}),
    "blocks-rows": ("blocks", 2, {"shard": 4}),
    "fp8-rows": ("fp8", 2, {"shard": 2, "ep": 2}),
    "mxfp4-uneven": ("mxfp4", 6, {"shard": 4}),
    "mxfp4-replicas": ("mxfp4", 4, {"replicate": 2, "ep": 2}),
    "fp8-replicas": ("fp8", 4, {"replicate": 2, "shard": 2}),
    "mxfp4-node": ("mxfp4", 4, {"shard": 4, "reshard_scope": "node"}),
    "int4-fsdp2-ep2": ("int4", 4, {"shard": 2, "ep": 2, "checkpointing": "full"}),
    "int4-rows": ("int4", 2, {"shard": 4}),
    "mxfp4-placed": (
        "mxfp4",
        4,
        {
            "shard": 2,
            "ep": 2,
            "expert_placement": "balanced",
            "redundant_experts": 1,
            "expert_slots": ("3,0,1,1,2,3",) * 2,
        },
    ),
}
"""Name → packing, experts, what the plan of four ranks says."""


@pytest.fixture(scope="module")
def two_by_two() -> Any:
    """A cluster of nodes of two, for a plan that reshards inside one."""
    from shardwright.schemas.cluster import ClusterRef

    return ClusterRef(
        name="cpu-4",
        digest="ab" * 32,
        device_type="cpu",
        device_name="cpu",
        world_size=4,
        devices_per_node=2,
        backend="gloo",
    )


def test_gradients_of_cut_packed_stacks_are_plain_transformers(
    packed: Any, make_job: Any, strategy: Any, two_by_two: Any, on_ranks: Any, tmp_path: Path
) -> None:
    jobs = []
    for name, (kind, experts, axes) in MESHES.items():
        example = packed(kind, experts=experts)
        chosen = strategy(accumulation_steps=2, base_format=FORMAT.get(kind, "mxfp4"), **axes)
        changes = {"cluster": two_by_two} if axes.get("reshard_scope") == "node" else {}
        job = make_job(example, chosen, recipe=RECIPE, **changes)
        jobs.append((f"{kind}-{experts}:{name}", str(job.plan_path), str(example.checkpoint)))
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    lines = on_ranks(4, "families.py", str(path)).splitlines()
    assert len(lines) == len(MESHES)
    assert all(" held " in line for line in lines), lines


def test_a_decoded_run_goes_on_over_cut_packed_stacks_and_is_exported(
    packed: Any, make_job: Any, strategy: Any, single_rank: Any, run_many: Any
) -> None:
    """Two steps decoded on one rank, then on two with the stacks cut as they are packed; and the same in bf16."""
    recipe = {"schedule": {"steps": 4, "save_every_steps": 2}}
    example = packed("mxfp4")
    whole = make_job(example, strategy(), recipe=recipe)
    assert single_rank(whole) == 0
    carried = make_job(example, strategy(shard=2, base_format="mxfp4"), recipe=recipe)
    carried.run_dir.mkdir()
    carried.plan.save(carried.run_dir / "plan.json")
    early = carried.run_dir.parent / "early"
    shutil.copytree(whole.run_dir, early, ignore=shutil.ignore_patterns("step-4"))
    adopt(early, carried.run_dir)
    narrow = {**recipe, "precision": {"base": "bfloat16"}}
    half = make_job(example, strategy(shard=2, base_format="mxfp4", checkpointing="full"), recipe=narrow)
    run_many(2, [carried, half])
    assert carried.record.resumed_from_steps == (2,) and half.record.resumed_from_steps == ()
    assert carried.losses == pytest.approx(whole.losses, rel=1e-5)
    assert half.losses == pytest.approx(whole.losses, rel=0.02)
    assert all(check.passed for job in (carried, half) for check in job.record.checks)
    assert carried.record.load.bytes_read < 0.6 * whole.record.load.bytes_read
    for job in (carried, half):
        export_adapter(job.run_dir, example.checkpoint)
        assert all(check.passed for check in check_adapter(job.run_dir, example.checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shard", "ep"), [("mxfp4", 8, 1), ("fp8", 2, 4), ("int4", 4, 2)])
def test_packed_and_gathered_bytes_are_the_cost_models(packed: Any, kind: str, shard: int, ep: int) -> None:
    """Rank 0 of eight on a fake process group, bf16: what FSDP2's tracker saw."""
    words = [str(RANKS / "simulate.py"), str(packed(kind, experts=8).checkpoint), str(shard), str(ep)]
    words.append(FORMAT.get(kind, "mxfp4"))
    done = subprocess.run(["timeout", "-k", "5", "120", sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    model = found["model"]
    assert found["sharded"] == model["frozen_base"] + model["adapter_parameters"]
    assert found["kinds"]["Unsharded Param"] == model["gathered_root"] + model["gather_buffers"] / 2
