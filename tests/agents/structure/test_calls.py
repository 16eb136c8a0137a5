"""A plan keeps the calls that ranking asked evidence for, and their cases file times under the same keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwright.agents.structure import rank
from shardwright.agents.structure.measured import MEASURED_PASSES
from shardwright.agents.structure.run import run_structure
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.kernels.called import called
from shardwright.kernels.evidence import EvidenceStore, shape_bucket
from shardwright.kernels.registry import OPERATORS, source_sha256
from shardwright.schemas.fusion import Gain
from shardwright.schemas.ops import MeasuredTime
from shardwright.schemas.recipe import Recipe
from shardwright.search_spaces.catalogue import load_cluster

OURS = "shardwright"
Key = tuple[str, str, str]


def gains(result) -> list[Gain]:  # type: ignore[no-untyped-def]
    return [v.gain for p in result.proposals for v in p.variants if v.gain is not None]


def kept(result) -> set[Key]:  # type: ignore[no-untyped-def]
    return {(c.op, c.dtype, shape_bucket(c.sizes)) for gain in gains(result) for c in gain.calls}


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_every_lookup_of_ours_is_kept_and_timed_under_its_own_key(
    family: str, tiny: Callable[[str], Any], tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[Key] = set()
    find = rank.find

    def noted(op, provider, shape, device, dtype, files):  # type: ignore[no-untyped-def]
        if provider == OURS:
            asked.add((op, dtype, shape_bucket(shape)))
        return find(op, provider, shape, device, dtype, files)

    monkeypatch.setattr(rank, "find", noted)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny(family).config, dtype=torch.float32).save_pretrained(tmp_path)
    result = run_structure(tmp_path, profile_checkpoint(tmp_path), load_cluster("h200-8"), recipe)
    assert len(asked) > 3 and kept(result) == asked
    assert all(bool(gain.calls) == (gain.provider == OURS) for gain in gains(result))
    for call in (call for gain in gains(result) for call in gain.calls):
        assert call.op in OPERATORS and call.pass_name in MEASURED_PASSES
        one = called(call, MEASURED_PASSES)
        if one.case is None:
            assert one.refusal is not None and call.op in one.refusal.where
        else:
            assert one.suite is not None and one.suite.op == call.op
            assert (call.op, call.dtype, shape_bucket(one.case.shape)) in asked
            assert len(one.case.passes) == 1 and one.case.passes[0] in MEASURED_PASSES


def test_a_time_filed_for_a_kept_call_is_what_the_next_plan_is_ranked_by(
    mixtral_folder: Path, recipe: Recipe, tmp_path: Path
) -> None:
    cluster, profile = load_cluster("h200-8"), profile_checkpoint(mixtral_folder)
    before = run_structure(mixtral_folder, profile, cluster, recipe)
    name = next(p.id for p in before.proposals if p.pattern == "rms_norm")

    def gain_of(result) -> Gain:  # type: ignore[no-untyped-def]
        variant = next(v for v in next(p for p in result.proposals if p.id == name).variants if v.provider == OURS)
        assert variant.gain is not None
        return variant.gain

    (call,) = gain_of(before).calls
    case = called(call, MEASURED_PASSES).case
    assert gain_of(before).origin == "modelled" and case is not None
    facts = {"device": cluster.device.name, "driver": "", "versions": {}, "dtype": call.dtype, "floor_ms": 0.1}
    facts |= {"op": call.op, "source_sha256": source_sha256(call.op), "shape_bucket": shape_bucket(case.shape)}
    facts |= {"pass_name": case.passes[0], "peak_bytes": 0, "repeats": 3, "date": "2026-01-01"}
    EvidenceStore(tmp_path / "mine.jsonl").add(
        MeasuredTime.model_validate({**facts, "provider": provider, "median_ms": ms})
        for provider, ms in ((OURS, 0.25), ("eager", 1.0))
    )
    after = gain_of(run_structure(mixtral_folder, profile, cluster, recipe, evidence=(tmp_path / "mine.jsonl",)))
    assert (after.origin, after.time_ms, after.eager_ms, after.speedup) == ("measured", 0.25, 1.0, 4.0)
    assert after.calls[0].pass_name == case.passes[0]
