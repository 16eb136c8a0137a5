"""An exported adapter is one that a fresh PEFT loads whole; anything less ends with exit code 9.

E9: PEFT's lora_B of a stack has the expert as its fast index. F6: a renamed key is refused. F9: two adapted stacks of
one module are nested.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.runtime import record
from shardwright.runtime.checks import export as export_check
from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.export.merged import export_merged
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.export.per_expert import export_per_expert
from shardwright.runtime.files import open_files
from shardwright.runtime.generate import generate
from shardwright.runtime.reference import load_plain
from shardwright.runtime.state import latest, read_adapters
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import CheckFailed, RunError
from shardwright.schemas.run import CheckResult

LAYER = "base_model.model.model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def trained(tiny: Any, make_job: Callable[..., Any], strategy: Callable[..., Any], single_rank: Any) -> Any:
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 3}, "lora": {"rank_pattern": {"*.v_proj": 2}}})
    assert single_rank(job) == 0
    export_adapter(job.run_dir, job.example.checkpoint)
    return job


@pytest.fixture
def copy(trained: Any, tmp_path: Path) -> Path:
    """A run directory that a test may damage."""
    shutil.copytree(trained.run_dir, tmp_path / "run")
    return tmp_path / "run"


def rewrite(run_dir: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change the adapter's tensors and make the record agree with the new file."""
    path = run_dir / "adapter" / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    kept = record.read(run_dir)
    assert kept.adapter is not None
    record.update(run_dir, adapter=kept.adapter.model_copy(update={"sha256": sha256_file(path)}))


def test_adapter_passes_every_check(trained: Any) -> None:
    checks = check_adapter(trained.run_dir, trained.example.checkpoint)
    assert [check.name for check in checks] == ["adapter-file", "adapter-values", "every-key-consumed", "logits-equal"]
    kept = trained.record
    assert kept.status == "exported" and kept.adapter.tensors == 24
    assert {check.stage for check in kept.checks} == {"load", "step", "export"}
    assert not list(trained.run_dir.glob(".adapter*"))


def test_keys_are_nested_as_peft_nests_them(trained: Any) -> None:
    keys = set(load_file(trained.run_dir / "adapter" / "adapter_model.safetensors"))
    assert {f"{LAYER}.base_layer.lora_A.weight", f"{LAYER}.lora_B.weight"} <= keys
    config = json.loads((trained.run_dir / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8
    assert "model.layers.1.mlp.experts.down_proj" in config["target_parameters"]


def test_delta_equals_pefts_own(trained: Any) -> None:
    """The merged expert weights that PEFT makes are W + s·B A of our own tensors, expert by expert."""
    base, _ = load_plain(trained.example.checkpoint, torch.float32, torch.device("cpu"))
    before = base.get_parameter("model.layers.1.mlp.experts.gate_up_proj").detach().clone()
    merged = export_check.attach(base, trained.run_dir / "adapter").merge_and_unload()
    found = latest(trained.run_dir, trained.plan.hashes)
    assert found is not None
    ours = read_adapters(found[1])
    name = "model.layers.1.mlp.experts.gate_up_proj"
    delta = 2.0 * torch.einsum("eor,eri->eoi", ours[f"{name}_lora_b"], ours[f"{name}_lora_a"])
    assert delta.abs().max() > 1e-3
    torch.testing.assert_close(merged.get_parameter(name) - before, delta, rtol=0, atol=1e-6)


def test_renamed_key_is_refused(copy: Path, trained: Any) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key.replace("layers.0.self_attn.q_proj", "layers.0.self_attn.qq"): v for key, v in tensors.items()}

    rewrite(copy, rename)
    with pytest.raises(CheckFailed, match="adapter-values") as caught:
        check_adapter(copy, trained.example.checkpoint)
    assert "model.layers.0.self_attn.q_proj.weight is not in the file" in caught.value.what
    assert caught.value.exit_code == 9
    assert not next(check for check in record.read(copy).checks if check.name == "adapter-values").passed


def test_scrambled_experts_are_refused(copy: Path, trained: Any) -> None:
    """lora_B written expert-slowest has the right shape and norm."""

    def scramble(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        key = f"{LAYER}.lora_B.weight"
        value = tensors[key]
        swapped = value.view(value.shape[0], 4, 4).transpose(1, 2).reshape(value.shape).contiguous()
        return {**tensors, key: swapped}

    rewrite(copy, scramble)
    with pytest.raises(CheckFailed, match="differs from the save"):
        check_adapter(copy, trained.example.checkpoint)


def test_logits_of_another_state_are_refused(copy: Path, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the file agrees with the save, the logits must be the training model's."""
    path = copy / "reference" / "logits.safetensors"
    kept = load_file(path)
    save_file({**kept, "logits": kept["logits"] * 1.01}, path)
    with pytest.raises(CheckFailed, match="logits-equal"):
        check_adapter(copy, trained.example.checkpoint)
    monkeypatch.setattr(export_check, "available_host_bytes", lambda: 1)
    checks = check_adapter(copy, trained.example.checkpoint)
    assert [(check.name, check.scope) for check in checks[1:]] == [
        ("adapter-values", "by_layer"),
        ("every-key-consumed", "by_layer"),
    ]


def test_one_token_on_another_expert_is_no_wrong_adapter_in_bf16() -> None:
    """A tie in the router moves one token; a wrong adapter moves all. In fp32 neither is allowed."""
    expected = torch.randn(1, 32, 50, generator=torch.Generator().manual_seed(0))
    one, all_ = expected.clone(), expected * 1.5
    one[0, 7] += 1.0
    allowed = export_check.LOGIT_TOLERANCE
    assert export_check.deviation(one, expected, "bfloat16") == 0.0
    assert export_check.deviation(one, expected, "float32") > allowed["float32"]
    assert export_check.deviation(all_, expected, "bfloat16") > allowed["bfloat16"]


def test_changed_file_is_refused(copy: Path, trained: Any) -> None:
    path = copy / "adapter" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckFailed, match="adapter-file"):
        check_adapter(copy, trained.example.checkpoint)


def test_export_of_an_unfinished_run_is_refused(copy: Path, trained: Any) -> None:
    record.update(copy, status="failed")
    with pytest.raises(RunError, match="not-trained"):
        export_adapter(copy, trained.example.checkpoint)
    shutil.rmtree(copy / "adapter")
    with pytest.raises(RunError, match="no-adapter"):
        check_adapter(copy, trained.example.checkpoint)


def test_no_form_of_a_run_whose_checks_failed_is_exported(copy: Path, trained: Any) -> None:
    """The adapter is made again where only its own proof failed; the weights of a failed step go nowhere."""
    checkpoint = trained.example.checkpoint
    rewrite(copy, lambda tensors: {name + ".x": value for name, value in tensors.items()})
    with pytest.raises(CheckFailed, match="adapter-values"):
        check_adapter(copy, checkpoint)
    assert record.read(copy).status == "exported"
    for export in (export_merged, export_per_expert):
        with pytest.raises(CheckFailed, match="export/adapter-values"):
            export(copy, checkpoint)
    assert not (copy / "merged").exists()
    export_adapter(copy, checkpoint)
    check_adapter(copy, checkpoint)
    export_merged(copy, checkpoint)
    step = CheckResult(stage="step", name="replicas-agree", passed=False, evidence="different: x")
    record.update(copy, checks=record.with_checks(record.read(copy), [step]))
    for export in (export_adapter, export_merged, export_per_expert):
        with pytest.raises(CheckFailed, match="step/replicas-agree"):
            export(copy, checkpoint)


def test_generate_answers_with_and_without_the_adapter(trained: Any) -> None:
    base = generate(trained.example.checkpoint, None, "the ", 6)
    adapted = generate(trained.example.checkpoint, trained.run_dir / "adapter", "the ", 6)
    assert base != adapted
    assert adapted == generate(trained.example.checkpoint, trained.run_dir / "adapter", "the ", 6)
    assert open_files(trained.example.checkpoint, torch.float32)[1].stored_dtype is torch.float32


@pytest.mark.parametrize("targets", [["dense_mlp"], ["attention", "dense_mlp", "experts"]])
def test_dense_mlp_of_a_moe_family_loads_with_its_own_ranks(
    targets: list[str], qwen: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    """PEFT would take ``mlp.gate_proj`` for the experts' and double the rank."""
    patterns = {"*.mlp.gate_proj": 2, **({"*.experts.down_proj": 3} if "experts" in targets else {})}
    lora = {"targets": targets, "rank_pattern": patterns}
    job = make_job(qwen, strategy(), recipe={"schedule": {"steps": 2}, "lora": lora})
    assert single_rank(job) == 0
    export_adapter(job.run_dir, qwen.checkpoint)
    assert all(check.passed for check in check_adapter(job.run_dir, qwen.checkpoint))
    tensors = load_file(job.run_dir / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"].shape == (2, 32)
