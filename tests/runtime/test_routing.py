"""A run that takes another run's experts differs by rounding alone; where it would have chosen otherwise is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.checkpointing import checkpoint_layers, routed
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.routing import Choices, Routes, common

EXPERTS, TOP, TOKENS = 64, 8, 128


def chosen(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def test_kept_choices_are_found_by_size_and_in_order() -> None:
    """The second run has no indexer and one router more: each finds its own, or makes its own."""
    first = Routes()
    for size, rows in (((2, 8, 2), [0, 1]), ((2, 100, 3), [7, 8, 9]), ((2, 8, 2), [4, 5])):
        assert first.take(size, lambda rows=rows: chosen(rows, rows)).tolist() == [rows, rows]
    second = first.again()
    assert second.take((2, 8, 2), lambda: chosen([1, 0], [2, 0])).tolist() == [[0, 1], [0, 1]]
    assert second.take((2, 4, 1), lambda: chosen([3], [3])).tolist() == [[3], [3]]
    assert second.take((2, 8, 2), lambda: chosen([4, 5], [5, 4])).tolist() == [[4, 5], [4, 5]]
    assert second.take((2, 8, 2), lambda: chosen([6, 7], [6, 7])).tolist() == [[6, 7], [6, 7]]
    assert (second.compared, second.differing) == (8, 1), "what was made anew is not compared"


def test_common_entries_are_counted_by_row() -> None:
    assert common(chosen([1, 2], [3, 4]), chosen([2, 1], [1, 2])) == 2
    assert common(chosen([9, 9]), chosen([1, 2])) == 0


def test_a_layer_inside_a_kept_run_still_repeats_its_own() -> None:
    """The recomputation of a checkpointed layer asks the run that it is a part of nothing."""
    run = Routes([((1, 4, 2), chosen([0, 1]))], replay=True)
    layer = Choices(outer=run)
    assert layer.take((1, 4, 2), lambda: chosen([2, 3])).tolist() == [[0, 1]]
    assert layer.again().take((1, 4, 2), lambda: chosen([2, 3])).tolist() == [[0, 1]]
    assert (run.compared, run.place) == (2, 1)


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64, num_local_experts=EXPERTS, num_experts_per_tok=TOP, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Norms whose results differ by about one unit in the last place of bf16, as another kernel's would."""
    generator = torch.Generator().manual_seed(1)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=generator) * 2**-9
        return (output.float() * (1 + noise)).to(output.dtype)

    norms = [one for name, one in model.named_modules() if name.endswith("norm")]
    hooks = [one.register_forward_hook(hook) for one in norms]
    yield
    for one in hooks:
        one.remove()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_same_experts_leave_only_rounding(checkpointed: bool) -> None:
    """Alone, the noisy run takes other experts for some tokens and is far away there; with the kept ones it is near."""
    model = mixtral()
    ids = torch.arange(TOKENS).view(2, -1) % 63 + 1
    if checkpointed:
        checkpoint_layers(list(model.model.layers), LoadMeter())

    def run(routes: Routes) -> tuple[Tensor, Tensor]:
        with routed(routes):
            logits = model(input_ids=ids, use_cache=False).logits.float()
            (gradient,) = torch.autograd.grad(logits.square().mean(), model.model.embed_tokens.weight)
        return logits.detach(), gradient.float()

    kept = Routes()
    expected = run(kept)
    with rounded_otherwise(model):
        own = run(Routes())
        repeated = kept.again()
        found = run(repeated)
    near, far = (
        [float((a - b).abs().max() / b.abs().max()) for a, b in zip(x, expected, strict=True)] for x in (found, own)
    )
    assert max(near) < 0.05 and far[0] > 3 * near[0], (near, far)
    assert repeated.compared == 3 * TOKENS * TOP
    assert 0 < repeated.differing_share < 0.05


def test_another_router_is_not_hidden() -> None:
    """Its experts are replaced, and most of them counted."""
    model = mixtral()
    ids = torch.arange(TOKENS).view(2, -1) % 63 + 1
    kept = Routes()
    with torch.no_grad():
        with routed(kept):
            model(input_ids=ids, use_cache=False)
        for layer in model.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
        with routed(repeated := kept.again()):
            model(input_ids=ids, use_cache=False)
    assert repeated.differing_share > 0.5
