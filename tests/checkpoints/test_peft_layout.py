"""PEFT's keys and tensor layout, against PEFT itself (cases E9 and F9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict

from shardwright.checkpoints.peft_layout import from_peft, peft_keys, peft_selection, to_peft
from shardwright.checkpoints.targets import resolve_targets
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.recipe import LoraSpec


def adapted(save_tiny: Any, case: str, model_type: str, *targets: str) -> tuple[Any, list[str], tuple[LoraTarget, ...]]:
    """A PEFT model with random B, the base's parameter names, and our targets."""
    _, model = save_tiny(case)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    spec = LoraSpec(targets=targets, rank=2, alpha="4", allow_router="router" in targets)
    found = resolve_targets(shapes, spec, model_type=model_type)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **peft_selection(found)))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    return model, list(shapes), found


CASES = [
    ("t-lora", "qwen3_moe", ("attention", "experts")),
    ("mixtral", "mixtral", ("attention", "experts", "head")),
    ("gpt_oss", "gpt_oss", ("experts",)),
    ("t-lora", "qwen3_moe", ("*.experts.down_proj",)),
    ("t-lora", "qwen3_moe", ("attention", "experts", "router")),
    ("gpt_oss", "gpt_oss", ("router",)),
    ("t-lora", "qwen3_moe", ("*.layers.1.mlp.experts.gate_up_proj", "q_proj")),
]


@pytest.mark.parametrize(("case", "model_type", "targets"), CASES)
def test_e9_f9_keys_and_values_are_pefts(save_tiny: Any, case: str, model_type: str, targets: tuple[str, ...]) -> None:
    model, order, found = adapted(save_tiny, case, model_type, *targets)
    files = get_peft_model_state_dict(model, save_embedding_layers=False)
    keys = peft_keys(found, order)
    assert {key for pair in keys.values() for key in pair} == set(files)
    before = {name: value.detach().clone() for name, value in base_parameters(model, found).items()}
    merged = model.merge_and_unload()
    for target in found:
        lora_a, lora_b = (files[key] for key in keys[target.parameter])
        a, b = from_peft(lora_a, lora_b, target.num_experts)
        delta = float(target.scaling) * torch.einsum("...or,...ri->...oi", b.double(), a.double())
        if target.layout == "in_out":
            delta = delta.transpose(-2, -1)
        actual = merged.get_parameter(target.parameter).double() - before[target.parameter].double()
        torch.testing.assert_close(delta, actual, rtol=0, atol=1e-6)
        for ours, theirs in zip(to_peft(a, b), (lora_a, lora_b), strict=True):
            assert torch.equal(ours, theirs) and ours.is_contiguous()


def base_parameters(model: Any, targets: tuple[LoraTarget, ...]) -> dict[str, torch.Tensor]:
    plain = {name.replace(".base_layer", ""): value for name, value in model.base_model.model.named_parameters()}
    return {target.parameter: plain[target.parameter] for target in targets}


def test_f9_gate_up_lies_below_down(save_tiny: Any) -> None:
    _, order, found = adapted(save_tiny, "t-lora", "qwen3_moe", "experts")
    keys = peft_keys(found, order)
    stem = "base_model.model.model.layers.0.mlp.experts"
    assert keys["model.layers.0.mlp.experts.gate_up_proj"][0] == f"{stem}.base_layer.lora_A.weight"
    assert keys["model.layers.0.mlp.experts.down_proj"][1] == f"{stem}.lora_B.weight"


def test_expert_slowest_reading_is_wrong_though_it_has_the_same_shape(save_tiny: Any) -> None:
    """The public fault: equal norms, scrambled values."""
    b = torch.randn(4, 32, 2)
    _, lora_b = to_peft(torch.randn(4, 2, 32), b)
    scrambled = lora_b.reshape(32, 4, 2).permute(1, 0, 2)
    assert scrambled.shape == b.shape and scrambled.norm() == pytest.approx(float(b.norm()))
    assert not torch.allclose(scrambled, b)


@given(experts=st.integers(1, 5), rank=st.integers(1, 4), width=st.integers(1, 5), out=st.integers(1, 5))
def test_there_and_back(experts: int, rank: int, width: int, out: int) -> None:
    a = torch.arange(experts * rank * width, dtype=torch.float32).reshape(experts, rank, width)
    b = torch.arange(experts * out * rank, dtype=torch.float32).reshape(experts, out, rank)
    back = from_peft(*to_peft(a, b), experts)
    assert torch.equal(back[0], a) and torch.equal(back[1], b)


def test_halves_that_do_not_belong_together_are_refused() -> None:
    for a, b in (((2, 8), (8, 3)), ((4, 2, 8), (3, 8, 2)), ((2, 8), (4, 8, 2))):
        with pytest.raises(CheckpointError):
            to_peft(torch.zeros(a), torch.zeros(b))
    with pytest.raises(CheckpointError):
        from_peft(torch.zeros(6, 8), torch.zeros(8, 6), 4)


def test_unknown_target_is_refused(save_tiny: Any) -> None:
    _, order, found = adapted(save_tiny, "t-lora", "qwen3_moe", "experts")
    with pytest.raises(CheckpointError):
        peft_keys(found, order[:3])
