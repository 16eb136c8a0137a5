"""Every form of an adapter says the same: PEFT's fused layout, one pair a published weight, a merged checkpoint.

F1: published names, experts under ``experts.N.{w1,w2,w3}``. F2: experts without a gate. F4: no base weights in the
file, ``modules_to_save`` unset. F5: no empty tensors. F6: a renamed key is refused. F7: all layers are there. F10: what
is left of the change after packing is told.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.packing.detect import logical_tensors
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.checkpoints.peft_layout import peft_keys
from shardwright.checkpoints.targets import parameter_shapes
from shardwright.runtime import record, state
from shardwright.runtime.checks.export import attach, check_adapter
from shardwright.runtime.checks.export_forms import apply_by_name, check_merged, check_per_expert
from shardwright.runtime.export import merged, packed, peft, per_expert, serving
from shardwright.runtime.export.retained import Retained
from shardwright.runtime.export.split import Part, name_map, parts
from shardwright.runtime.lora.inject import adapter_names, adapter_shapes
from shardwright.runtime.reference import load_plain
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import CheckFailed, CheckpointError, LegalityError, RunError
from shardwright.schemas.lora import LoraTarget

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ROUTED = {"num_local_experts": 4, "intermediate_size": 24}
MLA = {
    "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
NEMOTRON = {
    "vocab_size": 264, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "layers_block_type": ["attention", "moe"], "moe_shared_expert_intermediate_size": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 8,
}  # fmt: skip
JET = {
    "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
    "num_experts_per_tok": 2, **ROUTED,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gate first, one file tensor an expert": ("Mixtral", {**SIZES, **ROUTED, "num_experts_per_tok": 2}),
    "latent attention, a dense layer": ("DeepseekV3", {**SIZES, **MLA}),
    "no gate": ("NemotronH", NEMOTRON),
    "[E, in, out], interleaved, biased": ("GptOss", {**SIZES, **ROUTED, "head_dim": 8, "num_experts_per_tok": 2}),
    "[E, in, out] without saying so": (
        "Llama4",
        {**SIZES, **ROUTED, "intermediate_size_mlp": 24, "head_dim": 8, "num_experts_per_tok": 1},
    ),
    "stacks inside linears": ("JetMoe", JET),
}
SEPARATE = {"Mixtral", "DeepseekV3", "NemotronH"}


def build(name: str, sizes: dict[str, Any], folder: Path) -> None:
    import transformers

    config_name = "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config_name)(**sizes))
    model.float().save_pretrained(folder)


def random_adapters(targets: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.2
        for target in targets
        for name, shape in zip(adapter_names(target), adapter_shapes(target), strict=True)
    }


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 264, (1, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def plain(folder: Path) -> Any:
    return load_plain(folder, torch.float32, torch.device("cpu"))[0]


@pytest.mark.parametrize("experts", ["per_expert", "shared"])
@pytest.mark.parametrize("layout", FAMILIES)
def test_every_expert_storage_layout_gives_the_same_logits_in_every_form(
    layout: str, experts: str, tiny: Any, make_job: Any, strategy: Any, tmp_path: Path
) -> None:
    """Truth: s · B A added to the weights of a plain transformers model by hand, in the layout that the plan names."""
    name, sizes = FAMILIES[layout]
    base = tmp_path / "base"
    build(name, sizes, base)
    lora = {"experts": experts} if name == "JetMoe" else {"experts": experts, "rank_pattern": {"*.o_proj": 2}}
    plan = make_job(type(tiny)(base, tiny.data), strategy(), recipe={"lora": lora}).plan
    targets = plan.decision.lora_targets
    assert {"attention", "experts"} <= {target.role for target in targets}
    assert {target.pairs for target in targets if target.kind == "experts"} == {1 if experts == "shared" else 4}
    adapters, truth = random_adapters(targets), plain(base)
    before = logits(truth)
    for target in targets:
        a, b = (adapters[one] for one in adapter_names(target))
        delta = float(target.scaling) * (b @ a)
        truth.get_parameter(target.parameter).data += delta if target.layout == "out_in" else delta.transpose(-1, -2)
    expected = logits(truth)
    assert (expected - before).abs().max() > 0.05

    names, headers = name_map(base)
    (tmp_path / "merged").mkdir()
    retained = merged.merge(base, tmp_path / "merged", names, headers, parts(targets, names), adapters)
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), expected, rtol=0, atol=1e-5)
    assert retained.smallest > 0.999 and retained.warnings() == ()

    (tmp_path / "peft").mkdir()
    tensors = peft.peft_tensors(targets, adapters, tuple(parameter_shapes(base)), peft.mirrored_targets(base, targets))
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft.peft_config(plan, base)
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(attach(plain(base), tmp_path / "peft")), expected, rtol=0, atol=1e-5)

    if name not in SEPARATE:
        with pytest.raises(LegalityError, match="fused-on-the-hub"):
            per_expert.per_expert(plan, base, adapters)
        return
    single, config = per_expert.per_expert(plan, base, adapters)
    shapes = {key: tuple(value.shape) for key, value in single.items()}
    assert serving.problems(shapes, config, gated=per_expert.gated(base)) == []
    model = plain(base)
    assert apply_by_name(model, base, single, config["lora_alpha"] / config["r"]) == []
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    keys = [key for key in single if ".experts." in key]
    last = {"Mixtral": "w2", "DeepseekV3": "down_proj", "NemotronH": "down_proj"}[name]
    assert any(key.endswith(f".experts.3.{last}.lora_B.weight") for key in keys)
    assert config["modules_to_save"] is None and all(value.numel() for value in single.values())


@pytest.fixture(scope="module")
def trained(tiny: Any, make_job: Any, strategy: Any, single_rank: Any) -> Any:
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 3}, "lora": {"rank_pattern": {"*.v_proj": 2}}})
    assert single_rank(job) == 0
    return job


@pytest.fixture
def copy(trained: Any, tmp_path: Path) -> Path:
    shutil.copytree(trained.run_dir, tmp_path / "run")
    return tmp_path / "run"


def test_per_expert_adapter_of_a_run_is_proved_and_noted(copy: Path, trained: Any) -> None:
    checkpoint = trained.example.checkpoint
    facts = per_expert.export_per_expert(copy, checkpoint)
    checks = check_per_expert(copy, checkpoint)
    names = ["serving-names", "per-expert-values", "every-key-consumed", "per-expert-logits-equal"]
    assert [check.name for check in checks] == names
    kept = json.loads((copy / "run.json").read_text())
    assert kept["exports"][0]["sha256"] == facts.sha256 and kept["exports"][0]["format"] == "per_expert"
    shapes = parameter_shapes(checkpoint)
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    found = {key.split("layers.")[1].split(".")[0] for key in load_file(Path(facts.path) / "adapter_model.safetensors")}
    assert found == layers
    assert "--max-lora-rank 8" in serving.recipe(checkpoint, Path(facts.path), 4)[0]


def test_run_with_one_pair_for_all_experts_is_proved_in_every_form(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    """The file repeats the pair for each expert; an expert whose copy differs from the others' is refused."""
    recipe = {"schedule": {"steps": 3}, "lora": {"experts": "shared"}}
    job = make_job(tiny, strategy(), recipe=recipe)
    assert single_rank(job) == 0
    peft.export_adapter(job.run_dir, tiny.checkpoint)
    assert {check.passed for check in check_adapter(job.run_dir, tiny.checkpoint)} == {True}
    per_expert.export_per_expert(job.run_dir, tiny.checkpoint)
    merged.export_merged(job.run_dir, tiny.checkpoint)
    for checks in (check_per_expert(job.run_dir, tiny.checkpoint), check_merged(job.run_dir, tiny.checkpoint)):
        assert {check.passed for check in checks} == {True}
    stack = next(one for one in job.plan.decision.lora_targets if one.shared)
    saved = state.read_adapters(state.final(job.run_dir, job.plan))
    assert {saved[name].dim() for name in adapter_names(stack)} == {2}
    path = job.run_dir / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    key = peft_keys(job.plan.decision.lora_targets, tuple(parameter_shapes(tiny.checkpoint)))[stack.parameter][0]
    tensors[key][stack.rank] += 1.0
    save_file(tensors, path, metadata={"format": "pt"})
    kept = record.read(job.run_dir)
    changed = kept.adapter.model_copy(update={"sha256": sha256_file(path)})
    record.update(job.run_dir, adapter=changed)
    with pytest.raises(CheckFailed, match="different pairs for experts that share one"):
        check_adapter(job.run_dir, tiny.checkpoint)


def test_renamed_or_missing_per_expert_keys_are_refused(copy: Path, trained: Any) -> None:
    checkpoint = trained.example.checkpoint
    path = Path(per_expert.export_per_expert(copy, checkpoint).path) / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({key.replace("q_proj", "qq_proj"): value for key, value in tensors.items()}, path)
    with pytest.raises(CheckFailed, match="per-expert-values"):
        check_per_expert(copy, checkpoint)
    save_file({key: value for key, value in tensors.items() if ".experts.2.w2" not in key}, path)
    with pytest.raises(CheckFailed, match=r"w2 of experts \[2\] is missing"):
        check_per_expert(copy, checkpoint)


def test_merged_checkpoint_of_a_run_gives_the_training_models_logits(copy: Path, trained: Any) -> None:
    checkpoint = trained.example.checkpoint
    facts, warnings = merged.export_merged(copy, checkpoint)
    assert [check.name for check in check_merged(copy, checkpoint)] == ["merged-layout", "merged-logits-equal"]
    assert facts.retained_delta == pytest.approx(1.0, abs=1e-3) and warnings == ()
    for path in checkpoint.iterdir():
        assert (Path(facts.path) / path.name).is_file()
    (Path(facts.path) / "config.json").unlink()
    with pytest.raises(RunError, match="no-adapter"):
        check_merged(copy, checkpoint)


def test_full_disk_is_refused_before_merging(copy: Path, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(merged.shutil, "disk_usage", lambda path: usage(path)._replace(free=10))
    with pytest.raises(RunError, match="disk-full") as caught:
        merged.export_merged(copy, trained.example.checkpoint)
    assert "10 are free" in caught.value.what and not (copy / "merged").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"base_model.model.m.q_proj.base_layer.weight": (4, 4)}, "not a name that engines read"),
        ({"base_model.model.m.q_proj.lora_A.weight": (0, 4)}, "an empty tensor"),
        ({"base_model.model.m.q_proj.lora_A.weight": (4, 8)}, "lora_B is missing"),
        ({"base_model.model.m.q.lora_A.weight": (2, 8), "base_model.model.m.q.lora_B.weight": (8, 2)}, "rank 2 and 2"),
        (
            {
                "base_model.model.m.gate_proj.lora_A.weight": (4, 8),
                "base_model.model.m.gate_proj.lora_B.weight": (8, 4),
            },
            "its partner up_proj is not adapted",
        ),
    ],
)
def test_what_engines_would_drop_is_named(change: dict[str, tuple[int, ...]], told: str) -> None:
    assert any(told in problem for problem in serving.problems(change, {"r": 4}))


def test_configurations_that_engines_refuse_are_named() -> None:
    assert "vLLM refuses it" in serving.problems({}, {"r": 4, "modules_to_save": ["lm_head"]})[0]
    assert "one scaling" in serving.problems({}, {"r": 4, "rank_pattern": {"q_proj": 2}})[0]


GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_weight(seed: int) -> packed.Mxfp4:
    """Random [4, 64] packed as compressed-tensors do."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (4, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 126, (4, 2), generator=generator, dtype=torch.uint8)
    raw = {"w_packed": bytearray(codes.numpy().tobytes()), "w_scale": bytearray(scales.numpy().tobytes())}
    return packed.Mxfp4(LogicalTensor("w", (4, 64), "mxfp4", "w_packed", ("w_scale",), (1, 32)), raw)


def test_mxfp4_values_are_the_formats_own() -> None:
    """Against the definition, value by value: low nibble first, sign in bit 3, 2^(s - 127)."""
    weight = mxfp4_weight(0)
    values = weight.values()
    for row, column in ((0, 0), (0, 1), (1, 37), (3, 63)):
        byte = weight.raw["w_packed"][row * 32 + column // 2]
        code = (byte >> 4) if column % 2 else byte & 15
        scale = weight.raw["w_scale"][row * 2 + column // 32]
        expected = float(GRID[code & 7]) * (-1 if code & 8 else 1) * 2.0 ** (scale - 127)
        assert float(values[row, column]) == expected


def test_mxfp4_keeps_untouched_groups_and_packs_changed_ones_at_least_as_near_as_any_scale() -> None:
    weight = mxfp4_weight(1)
    before = weight.values()
    same, data = weight.with_values(before)
    assert torch.equal(same, before) and data == {name: bytes(value) for name, value in weight.raw.items()}
    wanted = before.clone()
    wanted[2, 40:50] += 0.37 * before[2, 32:].abs().max()
    after, data = weight.with_values(wanted)
    assert torch.equal(after[2, :32], before[2, :32]) and torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])
    group = wanted[2, 32:]
    signed = torch.cat([GRID, -GRID])
    best = min(float((((group[:, None] - signed * 2.0**power).abs().amin(1)) ** 2).sum()) for power in range(-20, 10))
    assert float(((after[2, 32:] - group) ** 2).sum()) == pytest.approx(best, rel=1e-5)
    reread = packed.Mxfp4(weight.logical, {name: bytearray(value) for name, value in data.items()})
    assert torch.equal(reread.values(), after)


def test_a_small_change_of_an_mxfp4_base_is_told_as_lost_and_a_large_one_as_kept() -> None:
    """F10: the base lies on the grid; below half a step nothing survives."""
    weight = mxfp4_weight(2)
    before = weight.values()
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(3)) * before.abs().amax()
    shares = {}
    for size in (1e-4, 2.0):
        retained = Retained()
        after, _ = weight.with_values(before + size * noise)
        retained.add("w", before, after, size * noise)
        shares[size] = retained.smallest
        assert bool(retained.warnings()) == (retained.smallest < 0.9)
    assert shares[1e-4] < 0.3 and shares[2.0] > 0.95


@pytest.mark.parametrize("shape", [(4, 64), (130, 200)])
def test_fp8_blocks_keep_untouched_bytes_and_hold_changes(shape: tuple[int, int]) -> None:
    """DeepSeek's layout: one fp32 scale for 128 × 128 values, the last blocks smaller."""
    generator = torch.Generator().manual_seed(4)
    grid = tuple(-(-size // 128) for size in shape)
    codes = (torch.randn(shape, generator=generator) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(grid, generator=generator) * 0.01 + 0.001
    raw = {
        "w": bytearray(codes.view(torch.uint8).numpy().tobytes()),
        "w_scale_inv": bytearray(scales.numpy().tobytes()),
    }
    logical = LogicalTensor("w", shape, "fp8-block", "w", ("w_scale_inv",), (128, 128))
    weight = packed.Fp8Block(logical, raw, torch.float8_e4m3fn, torch.float32, grid)
    before = weight.values()
    wide = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert torch.equal(before, codes.float() * wide)
    assert weight.with_values(before)[1] == {name: bytes(value) for name, value in raw.items()}
    wanted = before.clone()
    wanted[1, 2] += before.abs().max()
    after, _ = weight.with_values(wanted)
    torch.testing.assert_close(after, wanted, rtol=0.07, atol=float(wanted.abs().max()) / 448)
    if shape[0] > 128:
        assert torch.equal(after[128:], before[128:])


def test_int4_groups_keep_untouched_words_and_hold_changes() -> None:
    """compressed-tensors' layout: eight codes a word, one bf16 scale for 32 values."""
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(-(2**31), 2**31 - 1, (4, 16), generator=generator, dtype=torch.int64).to(torch.int32)
    scales = (torch.rand((4, 4), generator=generator) * 0.1 + 0.01).bfloat16()
    raw = {
        "w_packed": bytearray(words.numpy().tobytes()),
        "w_scale": bytearray(scales.view(torch.uint8).numpy().tobytes()),
    }
    logical = LogicalTensor("w", (4, 128), "int4-group", "w_packed", ("w_scale",), (1, 32))
    weight = packed.Int4Group(logical, raw, torch.bfloat16, (4, 16), (4, 4))
    before = weight.values()
    nibble = (int(words[1, 3]) >> (4 * 5)) & 15
    assert float(before[1, 3 * 8 + 5]) == (nibble - 8) * float(scales[1, 0])
    assert weight.with_values(before)[1] == {name: bytes(value) for name, value in raw.items()}
    wanted = before.clone()
    wanted[2, 40] += 1.0
    after, data = weight.with_values(wanted)
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]]) and torch.equal(after[2, 64:], before[2, 64:])
    step = wanted[2, 32:64].abs().max() / 7
    assert (after[2, 32:64] - wanted[2, 32:64]).abs().max() <= 0.51 * step + 0.01 * wanted[2, 32:64].abs().max()
    assert data["w_packed"] != bytes(raw["w_packed"]) and len(data["w_packed"]) == len(raw["w_packed"])


def test_merging_into_an_mxfp4_file_reports_what_is_left(tmp_path: Path) -> None:
    """A whole folder: packed tensors are written anew in place, everything else is byte-equal."""
    weight = mxfp4_weight(5)
    tensors = {
        "w_packed": torch.frombuffer(weight.raw["w_packed"], dtype=torch.uint8).reshape(4, 32).clone(),
        "w_scale": torch.frombuffer(weight.raw["w_scale"], dtype=torch.uint8).reshape(4, 2).clone(),
    }
    tensors = {f"model.x.weight{name[1:]}": value for name, value in tensors.items()}
    (tmp_path / "base").mkdir()
    save_file({**tensors, "other": torch.arange(3.0)}, tmp_path / "base" / "model.safetensors")
    headers = read_headers(tmp_path / "base")
    logical = logical_tensors(headers.tensors, {})["model.x.weight"]
    opened = packed.open_packed(tmp_path / "base", headers, logical)
    before = opened.values()
    assert torch.equal(before, weight.values())
    target = LoraTarget(
        parameter="model.x.weight", role="attention", kind="dense", in_features=64, out_features=4, rank=2,
        alpha="2", scaling="1",
    )  # fmt: skip
    adapters = {"model.x.lora_a": torch.randn(2, 64), "model.x.lora_b": torch.randn(4, 2) * 0.2 * float(before.std())}
    every = [Part("model.x.weight", target, None, (0, 4), (0, 64), ((0, 4), (0, 64)), False, False)]
    names: Any = SimpleNamespace(logical=lambda name: logical)
    (tmp_path / "out").mkdir()
    retained = merged.merge(tmp_path / "base", tmp_path / "out", names, headers, every, adapters)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == headers.files["model.safetensors"]
    written = read_headers(tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["other"], torch.arange(3.0))
    after = packed.open_packed(tmp_path / "out", written, logical).values()
    change = adapters["model.x.lora_b"] @ adapters["model.x.lora_a"]
    share = float(((after - before) * change).sum() / change.square().sum())
    assert retained.share("model.x.weight") == pytest.approx(share, rel=1e-5) and 0 < share < 1.5
    with pytest.raises(CheckpointError, match="packed-weights"):
        packed.open_packed(
            tmp_path / "base",
            headers,
            LogicalTensor("model.x.weight", (4, 64), "plain", logical.values, logical.companions, (1, 32)),
        )
