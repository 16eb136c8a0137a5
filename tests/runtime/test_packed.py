"""Packed checkpoints: decoded at load, or kept packed as the plan says; both train the same function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.checks.export_forms import check_merged
from shardwright.runtime.experts.int4 import Int4
from shardwright.runtime.experts.packed import packed_experts_of, register_stack
from shardwright.runtime.export.merged import export_merged
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.files import open_files
from shardwright.runtime.load.decode import decoded, read_base
from shardwright.schemas.errors import LegalityError


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4", "blocks"])
def test_kept_packed_trains_what_decoding_at_load_trains(
    packed: Any, make_job: Any, strategy: Any, single_rank: Any, kind: str
) -> None:
    """E10: both ways adapt the experts, and say the same."""
    example = packed(kind)
    fmt = "mxfp4" if kind == "blocks" else kind
    jobs = [make_job(example, strategy(base_format=one)) for one in ("compute", fmt)]
    for job in jobs:
        assert single_rank(job) == 0
        assert all(check.passed for check in job.record.checks)
    decoded_run, kept = jobs
    assert kept.losses == pytest.approx(decoded_run.losses, rel=1e-5) and kept.losses[-1] < kept.losses[0]
    norms = [[step.grad_norm for step in job.record.steps] for job in jobs]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    export_adapter(kept.run_dir, example.checkpoint)
    assert all(check.passed for check in check_adapter(kept.run_dir, example.checkpoint))
    if kind == "blocks":
        export_merged(kept.run_dir, example.checkpoint)
        check_merged(kept.run_dir, example.checkpoint)


def test_packed_experts_over_ranks_equal_one(
    packed: Any, make_job: Any, strategy: Any, single_rank: Any, run_many: Any
) -> None:
    """Each EP rank reads its own experts' bytes, placed or copied ones too; the rest is sharded by FSDP as ever."""
    example = packed("mxfp4")
    one = make_job(example, strategy(base_format="mxfp4"))
    two = make_job(example, strategy(ep=2, base_format="mxfp4", checkpointing="full"))
    places = {"expert_placement": "balanced", "redundant_experts": 1, "expert_slots": ("3,0,1,1,2,3",) * 2}
    placed = make_job(example, strategy(ep=2, base_format="mxfp4", **places))
    assert single_rank(one) == 0
    run_many(2, [two, placed])
    for job in (two, placed):
        assert job.losses == pytest.approx(one.losses, rel=1e-5)
        assert all(check.passed for check in job.record.checks)
    assert two.record.load.bytes_read < placed.record.load.bytes_read < one.record.load.bytes_read


def test_int4_is_decoded_at_load(packed: Any, make_job: Any, strategy: Any, single_rank: Any) -> None:
    job = make_job(packed("int4"), strategy())
    assert single_rank(job) == 0
    assert all(check.passed for check in job.record.checks)


def test_what_cannot_stay_packed_is_refused(packed: Any) -> None:
    _, files = open_files(packed("int4").checkpoint, torch.float32)
    stacks = {"e": ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")}
    with pytest.raises(LegalityError, match="base-format"):
        packed_experts_of(files.names, stacks, "mxfp4")
    _, files = open_files(packed("mxfp4").checkpoint, torch.float32)
    assert packed_experts_of(files.names, stacks, "mxfp4") == {"e": "mxfp4"}
    assert packed_experts_of(files.names, stacks, "compute") == {}
    with pytest.raises(LegalityError, match="no expert stack of this checkpoint is stored as int4"):
        packed_experts_of(files.names, stacks, "int4")


def test_only_symmetric_groups_of_whole_words_stay_packed(packed: Any) -> None:
    """Zero points would have to be cut along the outputs, group numbers along the inputs: decoded at load instead."""
    _, files = open_files(packed("int4").checkpoint, torch.float32)
    stacks = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")
    assert packed_experts_of(files.names, {"e": stacks}, "int4") == {"e": Int4(32, torch.bfloat16)}
    stem = "model.layers.0.mlp.experts.0.w1.weight"
    for extra in ("_zero_point", "_g_idx"):
        uneven = LogicalTensor(
            stem, (64, 64), "int4-group", f"{stem}_packed", (f"{stem}_scale", f"{stem}{extra}"), (1, 32)
        )
        names: Any = SimpleNamespace(
            pieces=lambda name: [SimpleNamespace(tensor=stem)],
            logical=lambda tensor, uneven=uneven: uneven,
            stored_dtype=lambda stored: "BF16",
        )
        with pytest.raises(LegalityError, match=f"base-format.*{extra}"):
            packed_experts_of(names, {"e": stacks}, "int4")
    for width in (60, 40):
        with pytest.raises(LegalityError, match=f"has {width} inputs"):
            register_stack(torch.nn.Module(), "down_proj", (4, 64, width), Int4(32, torch.bfloat16))


def test_gpt_oss_blocks_are_what_transformers_makes_of_them(packed: Any) -> None:
    """Out and in turned, square or not: 2I is 128 beside H of 64 here, and I is H in the second stack."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, files = open_files(packed("blocks").checkpoint, torch.float32)
    stored = load_file(files.folder / "model.safetensors")
    with ShardReader(files.folder, files.headers) as reader:
        for stack in ("gate_up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{stack}"
            found = read_base(reader, files.names, name, tuple(model.get_parameter(name).shape))
            assert torch.equal(found, convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"]))
            assert files.names.hub_names(name) == (name,) and not files.names.unused() and not files.names.missing()


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4", "blocks"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_part_of_a_packed_weight_is_the_part_of_the_whole(packed: Any, kind: str, data: Any) -> None:
    model, files = open_files(packed(kind).checkpoint, torch.float32)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shape = tuple(model.get_parameter(name).shape)
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    with ShardReader(files.folder, files.headers) as reader:
        whole = read_base(reader, files.names, name, shape)
        part = read_base(reader, files.names, name, shape, tuple(box))
    assert torch.equal(part, whole[tuple(slice(*one) for one in box)])


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4"])
def test_decoded_values_are_the_original_up_to_the_format(packed: Any, packed_examples: Any, kind: str) -> None:
    """The unpacked weights are drawn again and compared: a wrong scale or nibble order would be far off."""
    _, files = open_files(packed(kind).checkpoint, torch.float32)
    name = "model.layers.1.mlp.experts.down_proj"
    original = packed_examples.weights_of(kind).get_parameter(name).detach()
    with ShardReader(files.folder, files.headers) as reader:
        found = read_base(reader, files.names, name, tuple(original.shape)).float()
        piece = files.names.pieces(name)[0]
        assert decoded(reader, files.names.logical(piece.tensor), piece.source).dtype == torch.bfloat16
    error = float((found - original).norm() / original.norm())
    assert error < {"mxfp4": 0.15, "fp8": 0.04, "int4": 0.12}[kind], error
