"""Recurrent layers keep documents of one row apart, in forward, in a recomputation, and in gradients."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.batch import IGNORE
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.fused_kda import flat_bounds, fused_kda, short_convolution
from shardwright.runtime.losses import logits_of
from shardwright.runtime.parallelize import decoder_layers
from shardwright.runtime.reference import reference_step
from shardwright.runtime.segments import bounds_of, by_document, keep_apart, segments
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_token": 2,
    "num_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
    "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1], "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
LENGTHS = ((5, 9, 2), (16,), (1, 15))


def kimi() -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**SIZES)).float()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0.0, 0.3)
    return model.train(False)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 97, (len(LENGTHS), 16), generator=torch.Generator().manual_seed(2))
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in LENGTHS])
    return ids, positions


def test_bounds_are_where_positions_start_anew() -> None:
    _, positions = rows()
    assert bounds_of(positions) == ((0, 5, 14, 16), (0, 16), (0, 1, 16))
    assert bounds_of(positions[1:2]) is None


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_document_in_a_row_is_the_document_alone(checkpointed: bool) -> None:
    ids, positions = rows()
    model = kimi()
    leaf = model.model.layers[0].self_attn.q_proj.weight
    alone = [
        model(input_ids=piece[None], use_cache=False).logits[0]
        for row, sizes in zip(ids, LENGTHS, strict=True)
        for piece in row.split(list(sizes))
    ]
    wanted = torch.cat(alone).view(len(LENGTHS), 16, -1)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), leaf)
    leaking = logits_of(model, ids, positions)
    assert float((leaking - wanted).detach().abs().max()) > 1e-2, "without the wrapper the state crosses the border"
    keep_apart(model)
    if checkpointed:
        checkpoint_layers(list(decoder_layers(model).values()), LoadMeter())
    found = logits_of(model, ids, positions)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    (ours,) = torch.autograd.grad(found.square().sum(), leaf)
    torch.testing.assert_close(ours, gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


def test_the_plain_reference_runs_documents_alone() -> None:
    """Its loss of a packed row is the sum over documents that run by themselves."""
    ids, positions = rows()
    labels = torch.full_like(ids, IGNORE)
    follows = positions[:, 1:] > 0
    labels[:, :-1] = torch.where(follows, ids[:, 1:], IGNORE)
    model = kimi()
    with torch.no_grad():
        found = reference_step(model, {}, torch.stack((ids, labels, positions), 1), torch.device("cpu")).loss
        total, count = 0.0, 0
        for row, sizes in zip(ids, LENGTHS, strict=True):
            for piece in row.split(list(sizes)):
                logits = model(input_ids=piece[None], use_cache=False).logits[0, :-1].log_softmax(-1)
                total -= float(logits.gather(1, piece[1:, None]).sum())
                count += len(piece) - 1
    assert found == pytest.approx(total / count, rel=1e-5)


def test_inside_a_document_nothing_is_cut_again() -> None:
    seen: list[tuple[int, ...]] = []

    def layer(hidden_states: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(hidden_states.shape))
        return hidden_states + 1

    hidden = torch.zeros(2, 6, 3)
    with segments(((0, 2, 6), (0, 6))):
        out = by_document(by_document(layer))(hidden)
    assert torch.equal(out, hidden + 1) and seen == [(1, 2, 3), (1, 4, 3), (1, 6, 3)]


def kda_decision() -> FusionDecision:
    return FusionDecision(
        proposal_id="kda.1",
        pattern="kda",
        variant="fused",
        provider="shardwright",
        op="kda",
        modules=("model.layers.0.self_attn",),
        roles={},
        tolerance="0.0001",
    )


@pytest.mark.parametrize("packed", [False, True])
def test_fused_kda_around_the_plain_recurrence_is_the_familys_own(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands around the operator: gates, convolution, documents. The operator's own tests hold it to this
    reference."""
    from shardwright.kernels.kda.reference import kda_recurrent_reference

    monkeypatch.setitem(OPERATORS, "kda", SimpleNamespace(load_op=lambda: kda_recurrent_reference))
    ids, positions = rows()
    model = kimi()
    keep_apart(model)
    layer = model.model.layers[0].self_attn
    given = positions if packed else None
    wanted = logits_of(model, ids, given)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), layer.q_proj.weight)
    layer.forward = fused_kda(layer, "model.layers.0.self_attn", kda_decision())
    found = logits_of(model, ids, given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    (ours,) = torch.autograd.grad(found.square().sum(), layer.q_proj.weight)
    torch.testing.assert_close(ours, gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


def test_a_module_of_another_family_is_refused() -> None:
    with pytest.raises(LegalityError, match="fusion-kda"):
        fused_kda(torch.nn.Linear(2, 2), "x", kda_decision())


def test_the_convolution_stops_at_a_border() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 7, 3, generator=generator), torch.randn(3, 4, generator=generator)
    bounds = ((0, 1, 4, 7), (0, 7))
    alone = [
        torch.cat([short_convolution(row[None, start:stop], weight, None) for start, stop in pairwise(of_row)], 1)
        for row, of_row in zip(x, bounds, strict=True)
    ]
    torch.testing.assert_close(short_convolution(x, weight, bounds), torch.cat(alone))
    assert flat_bounds(bounds) == (0, 1, 4, 7, 14)
