"""Biases that pick experts: how they move, on every mesh, through saves and exports, and who may not have them moved.

D18: one update a step, from the loads of all micro-batches and ranks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn

from shardwright.checkpoints.router_bias import check_balance, router_bias
from shardwright.runtime import record, state
from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.checks.export_forms import check_merged
from shardwright.runtime.experts.balance import LoadMeter, rows_of_experts
from shardwright.runtime.experts.bias import BINS, RouterBiases, against_load, even_bias, margins
from shardwright.runtime.export.merged import export_merged
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.export.per_expert import export_per_expert
from shardwright.schemas.errors import RecipeError, RunError
from shardwright.schemas.recipe import BalanceSpec

SIZES: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "max_position_embeddings": 128, "eos_token_id": 0,
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def skewed(seed: int, T: int = 4000, E: int = 8) -> torch.Tensor:
    """[T, E] sigmoid scores of experts that are liked very differently."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(T, E, generator=generator) + torch.linspace(-1, 1, E)).sigmoid()


def test_the_sign_rule_by_hand() -> None:
    moved = against_load(torch.tensor([0.5, 0.0, -0.25, 0.0]), torch.tensor([9, 3, 0, 4]), 0.01)
    torch.testing.assert_close(moved, torch.tensor([0.49, 0.01, -0.24, 0.0]))


def test_the_quantile_is_where_each_experts_share_is_even() -> None:
    """Against the margins sorted one by one in fp64."""
    scores, bias = skewed(1), torch.tensor([0.1, 0.0, 0.0, -0.2, 0.0, 0.05, 0.0, 0.0])
    index = (scores + bias).topk(2).indices
    found = even_bias(bias, margins(scores, bias, index), 2 / 8)
    bound = (scores + bias).double().gather(1, index).amin(1)
    expected = torch.stack([-(scores[:, e].double() - bound).sort(descending=True).values[999] for e in range(8)])
    expected += bias.double().mean() - expected.mean()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1.5 / BINS)
    assert float(found.mean()) == pytest.approx(float(bias.mean()), abs=1e-6)


@pytest.mark.parametrize(("rule", "steps", "most"), [("quantile", 6, 1.15), ("sign", 400, 1.15)])
def test_loads_become_even(rule: str, steps: int, most: float) -> None:
    bias = torch.zeros(8)
    loads = []
    for step in range(steps):
        scores = skewed(step + 10)
        index = (scores + bias).topk(2).indices
        rows = rows_of_experts(index, 8)
        loads.append(float(rows.max()) * 8 / float(rows.sum()))
        moved = against_load(bias, rows, 0.002) if rule == "sign" else None
        bias = even_bias(bias, margins(scores, bias, index), 2 / 8) if moved is None else moved
    assert loads[0] > 1.5 and loads[-1] < most, (loads[0], loads[-1])


class Gate(nn.Module):
    def __init__(self, groups: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(2)), requires_grad=False)
        self.e_score_correction_bias = nn.Buffer(torch.zeros(4, dtype=torch.bfloat16))
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self.weight.T).sigmoid() + self.e_score_correction_bias
        if self.groups:
            scores = scores.masked_fill(torch.tensor([False, False, True, True]), 0.0)
        return scores.topk(2).indices


class Experts(nn.Module):
    def __init__(self, meter: LoadMeter) -> None:
        super().__init__()
        self.meter = meter

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.meter.add("experts", rows_of_experts(index, 4))
        return hidden


class Block(nn.Module):
    """A router that picks with a bias, and experts that count."""

    def __init__(self, meter: LoadMeter, groups: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = Gate(groups), Experts(meter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = self.gate(x)
        found: torch.Tensor = self.experts(x, index, torch.ones_like(index, dtype=x.dtype))
        return found


def block_and_biases(rule: str, groups: bool = False) -> tuple[Block, LoadMeter, RouterBiases]:
    meter = LoadMeter()
    block = Block(meter, groups)
    spec = BalanceSpec.model_validate({"bias": rule, "bias_rate": "0.01"})
    return block, meter, RouterBiases(block, {"experts": 4}, spec, meter)


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_accumulation_moves_what_one_batch_moves(rule: str) -> None:
    """D18; and neither evaluation nor a recomputation counts."""
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(7))
    found = []
    for parts in (1, 3):
        block, meter, biases = block_and_biases(rule)
        assert biases.tensors()["gate.e_score_correction_bias"].dtype == torch.float32
        with meter.record():
            for piece in x.split(60 // parts):
                block(piece)
            with meter.record(False):
                block(x[:7])
        block(x[:5])
        biases.move(meter.finish_step())
        found.append(block.gate.e_score_correction_bias.clone())
    assert torch.equal(*found) and bool(found[0].any()) and not found[0].requires_grad


def test_a_router_that_chooses_by_other_rules_has_no_quantile() -> None:
    block, meter, biases = block_and_biases("quantile", groups=True)
    with meter.record():
        block(torch.randn(60, 6))
    with pytest.raises(RecipeError, match="balance-choice"):
        biases.move(meter.finish_step())
    block, meter, biases = block_and_biases("sign", groups=True)
    with meter.record():
        block(torch.randn(60, 6))
    biases.move(meter.finish_step())
    assert block.gate.e_score_correction_bias.tolist() == pytest.approx([-0.01, -0.01, 0.01, 0.01])


def test_families_without_a_bias_are_refused(tiny: Any, deepseek: Any) -> None:
    for rule in ("sign", "quantile"):
        spec = BalanceSpec.model_validate({"bias": rule})
        with pytest.raises(RecipeError, match="balance-bias"):
            check_balance(tiny.checkpoint, spec)
        check_balance(deepseek.checkpoint, spec)
    check_balance(tiny.checkpoint, BalanceSpec())
    with pytest.raises(ValidationError, match="bias_rate"):
        BalanceSpec(bias="sign", bias_rate="0")


@pytest.mark.parametrize(
    ("family", "prefix", "sizes", "where"),
    [
        ("minimax_m2", "MiniMaxM2", {"num_local_experts": 4}, "model.layers.0.mlp.e_score_correction_bias"),
        ("lfm2_moe", "Lfm2Moe", {"num_experts": 4, "layer_types": ["conv"] * 3}, ".expert_bias"),
        ("ernie4_5_moe", "Ernie4_5_Moe", {"moe_num_experts": 4}, None),
    ],
)
def test_where_families_keep_it(family: str, prefix: str, sizes: Any, where: str | None) -> None:
    """Ernie keeps a parameter, which FSDP would cut: not known, so refused."""
    import transformers

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 16, **heads, **sizes}
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**small))
    names = [
        name
        for name, module in model.named_modules()
        if sum(p.dim() == 3 for p in module.parameters(recurse=False)) > 1
    ]
    assert names
    found = router_bias(model, names[-1], 4)
    assert (
        found is None if where is None else found is not None and found.endswith(where.removeprefix("model.layers.0"))
    )


@pytest.fixture(scope="module")
def deepseek(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(4)
    model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).float()
    model.get_buffer(BIAS).normal_(0.0, 0.3)
    model.save_pretrained(folder / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.checkpoint / name, folder / "checkpoint" / name)
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(tiny.data / name, folder / name)
    return type(tiny)(folder / "checkpoint", folder)


def bias_of(job: Any, step: int = 4) -> torch.Tensor:
    return state.read_biases(job.run_dir / "checkpoints" / f"step-{step}")[BIAS]


def test_a_run_on_every_mesh_saves_resumes_and_exports_it(
    deepseek: Any, make_job: Any, strategy: Any, single_rank: Any, run_many: Any
) -> None:
    def job(rule: str, **axes: Any) -> Any:
        balance = {"bias": rule, "bias_rate": "0.05"}
        schedule = {"steps": 4, "save_every_steps": 2}
        return make_job(deepseek, strategy(**axes), recipe={"balance": balance, "schedule": schedule})

    base = load_file(deepseek.checkpoint / "model.safetensors")[BIAS]
    ones, twos = [job("sign", checkpointing="full"), job("quantile")], [job("sign", shard=2), job("quantile", ep=2)]
    for one in ones:
        assert single_rank(one) == 0
        checks = {check.name: check.passed for check in one.record.checks}
        assert checks["router-biases-agree"] and all(checks.values())
        assert bias_of(one).dtype == torch.float32 and bool((bias_of(one) != base).any())
    run_many(2, twos)
    for one, two in zip(ones, twos, strict=True):
        assert torch.equal(bias_of(two), bias_of(one))
        assert two.losses == pytest.approx(one.losses, rel=1e-5)

    one, moved, losses = ones[0], bias_of(ones[0]), ones[0].losses
    shutil.rmtree(one.run_dir / "checkpoints" / "step-4")
    record.update(one.run_dir, status="interrupted")
    assert single_rank(one) == 0 and one.record.resumed_from_steps == (2,)
    assert torch.equal(bias_of(one), moved) and one.losses == pytest.approx(losses, rel=1e-6)

    export_adapter(one.run_dir, deepseek.checkpoint)
    config = json.loads((one.run_dir / "adapter" / "adapter_config.json").read_bytes())
    assert config["modules_to_save"] == [BIAS.rpartition(".")[0]]
    assert all(check.passed for check in check_adapter(one.run_dir, deepseek.checkpoint))
    export_merged(one.run_dir, deepseek.checkpoint)
    assert all(check.passed for check in check_merged(one.run_dir, deepseek.checkpoint))
    assert torch.equal(load_file(one.run_dir / "merged" / "model.safetensors")[BIAS], moved)
    with pytest.raises(RunError, match="router-biases"):
        export_per_expert(one.run_dir, deepseek.checkpoint)
    _an_adapter_without_the_bias_is_caught(one, deepseek.checkpoint)


def _an_adapter_without_the_bias_is_caught(job: Any, checkpoint: Path) -> None:
    """An exporter that forgets the bias leaves another model behind: the check of values says so."""
    from safetensors.torch import save_file

    from shardwright.runtime.checks.export import _values

    file = job.run_dir / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[f"base_model.model.{BIAS}"]
    save_file(tensors, file, metadata={"format": "pt"})
    found = _values(job.plan, job.run_dir, checkpoint, file.parent)
    assert not found.passed and BIAS in found.evidence
