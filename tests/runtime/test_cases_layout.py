"""Reported faults of packed loads and of grouped products' shapes: G2, H1, H3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.runtime.experts.grouped import ALIGNMENT_BYTES, GroupedLoraLinear
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.legality import GROUPED_GEMM_MULTIPLE

BLOCK = 128
LARGEST_FP8 = 448.0


def fp8_by_hand(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and what they mean, from the format's definition: value × its block's scale, rounded to bf16."""
    rows, columns = weight.shape
    tiles = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = tiles.abs().amax(dim=(1, 3)) / LARGEST_FP8
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    values = (weight / wide).to(torch.float8_e4m3fn)
    return values, scale, (values.float() * wide).to(torch.bfloat16).float()


@pytest.fixture(scope="module")
def twins(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A Mixtral whose experts are block-scaled fp8, and the same values stored plainly."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=264,
        hidden_size=BLOCK,
        intermediate_size=2 * BLOCK,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    torch.manual_seed(11)
    model = MixtralForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    made = []
    for kind in ("fp8", "plain"):
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder / "checkpoint")
        stored: dict[str, Tensor] = {}
        for name, weight in load_file(folder / "checkpoint" / "model.safetensors").items():
            if ".experts." not in name:
                stored[name] = weight
                continue
            values, scale, meant = fp8_by_hand(weight)
            stored |= {name: values, f"{name}_scale_inv": scale} if kind == "fp8" else {name: meant}
        save_file({name: value.contiguous() for name, value in stored.items()}, weights_of(folder))
        if kind == "fp8":
            path = folder / "checkpoint" / "config.json"
            said = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
            path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": said}))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny.checkpoint / file, folder / "checkpoint" / file)
        for file in ("train.jsonl", "held_out.jsonl"):
            shutil.copy(tiny.data / file, folder / file)
        made.append(type(tiny)(folder / "checkpoint", folder))
    return made[0], made[1]


def weights_of(folder: Path) -> Path:
    return folder / "checkpoint" / "model.safetensors"


def test_fp8_experts_are_loaded_and_the_first_loss_is_that_of_their_values(
    twins: tuple[Any, Any], make_job: Any, strategy: Any, single_rank: Any
) -> None:
    """G2: experts that stay random show as a first loss far from the reference; nothing is left unloaded."""
    losses = []
    for example in twins:
        job = make_job(example, strategy(), recipe={"schedule": {"steps": 1}})
        assert single_rank(job) == 0
        checks = {check.name: check for check in job.record.checks}
        assert checks["all-loaded"].passed and "not finite: none" in checks["all-loaded"].evidence
        losses.append((job.losses[0], job.record.evaluations[0].loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def reference(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, sizes: list[int], scaling: float) -> Tensor:
    """fp64, one expert after the other."""
    rows, start = [], 0
    for expert, size in enumerate(sizes):
        part = x[start : start + size].double()
        delta = scaling * b[expert].double() @ a[expert].double()
        rows.append(part @ (weight[expert].double() + delta).T)
        start += size
    return torch.cat(rows)


def operands(sizes: list[int], rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    experts = len(sizes)
    return draw(sum(sizes), 32), draw(experts, 24, 32), draw(experts, rank, 32), draw(experts, 24, rank)


@pytest.mark.parametrize("rank", [4, 12])
def test_a_rank_padded_with_zeros_says_the_same(rank: int) -> None:
    """H1: a rank whose rows are no multiple of 16 bytes in bf16 is legal only padded, and padding changes nothing."""
    multiple = GROUPED_GEMM_MULTIPLE["bfloat16"]
    assert multiple * torch.bfloat16.itemsize == ALIGNMENT_BYTES == GROUPED_GEMM_MULTIPLE["float32"] * 4
    assert rank % multiple, "the case is about ranks that are not aligned"
    padded = -(-rank // multiple) * multiple
    sizes = [5, 0, 2]
    x, weight, a, b = operands(sizes, rank, torch.float64)
    plain = GroupedLoraLinear.apply(x, weight, None, a, b, sizes, 2.0, False)
    wide_a = torch.cat([a, a.new_zeros(3, padded - rank, 32)], dim=1)
    wide_b = torch.cat([b, b.new_zeros(3, 24, padded - rank)], dim=2)
    wide = GroupedLoraLinear.apply(x, weight, None, wide_a, wide_b, sizes, 2.0, False)
    torch.testing.assert_close(plain, reference(x, weight, a, b, sizes, 2.0), rtol=0, atol=1e-12)
    torch.testing.assert_close(wide, plain, rtol=0, atol=1e-12)


def test_bf16_rows_of_experts_are_not_padded_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """H3: 1, 3, 0 and 7 rows stay 11 rows; only a plan that names a multiple pads them."""
    assert ParallelStrategy(mesh=Mesh()).expert_padding_tokens == 1
    sizes = [1, 3, 0, 7]
    x, weight, a, b = operands(sizes, 8, torch.bfloat16)
    seen: list[int] = []
    multiply = torch.mm

    def watched(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        seen.append(left.shape[0])
        return multiply(left, right, **options)

    monkeypatch.setattr(torch, "mm", watched)
    y = GroupedLoraLinear.apply(x, weight, None, a, b, sizes, 0.5, False)
    assert seen == [1, 3, 7, 1, 3, 7], "base and shrink of the three experts that have rows"
    expected = reference(x, weight, a, b, sizes, 0.5)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)
