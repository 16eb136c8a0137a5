"""Two documents in one row: exchanging the first changes nothing in the second, in every family.

Recurrent states, convolutions and pools of keys by ``segments.keep_apart``, masks that do not look at positions by
``masks``: there each document gives what the same model gives for it alone. Families that mix tokens are refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from shardwright.checkpoints.documents import check_documents, family_that_mixes
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.losses import logits_of
from shardwright.runtime.masks import BLIND, PLANES, masks_by_kind
from shardwright.runtime.parallelize import decoder_layers
from shardwright.runtime.segments import RECURRENT, keep_apart, recurrent_layers
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import DataSpec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SOURCES = Path(transformers.__file__).parent / "models"
STATES = (
    *("bailing_hybrid", "deepseek_v4", "glm5_next", "granitemoehybrid", "inkling", "inkling2", "inkling2_loop"),
    *("jamba", "kimi_linear"),
    *("lara_mini", "lfm2_moe", "minimax", "nemotron_h", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "zaya"),
)
SMALLER = {"linear_num_heads": 2, "linear_head_dim": 16}
"""Widths of linear attention that the tiny configurations leave as they are."""
FIRST, SECOND = 13, 19
TOLERANCE = 2e-5
"""Of the largest logit, fp32."""


def built(family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model of the family with random values."""
    if not (SOURCES / family).is_dir():
        pytest.skip(f"the installed transformers has no {family}")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from families_tiny import tiny_config  # type: ignore[import-not-found]

    transformers.utils.logging.set_verbosity_error()
    config = tiny_config(family)
    text = config.get_text_config()
    if family in MRO:
        text.rope_parameters = {**text.rope_parameters, "mrope_section": MRO[family]}
    for name, value in SMALLER.items():
        if hasattr(text, name):
            setattr(text, name, value)
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    torch.manual_seed(0)
    chosen = config if config.model_type in known else text
    if chosen.model_type in known:
        model = transformers.AutoModelForCausalLM.from_config(chosen, attn_implementation="eager").float()
    else:
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.15)
    return model.train(False)


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions [2, 32]: a row of two documents, a row of one."""
    ids = torch.randint(3, 200, (2, FIRST + SECOND), generator=torch.Generator().manual_seed(1))
    return ids, torch.stack([torch.cat([torch.arange(FIRST), torch.arange(SECOND)]), torch.arange(FIRST + SECOND)])


def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What each document gives by itself, joined to the rows of ``packed``."""
    pieces = [model(input_ids=one, use_cache=False).logits for one in (ids[:1, :FIRST], ids[:1, FIRST:], ids[1:])]
    return torch.cat([torch.cat(pieces[:2], dim=1), pieces[2]])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max())


@pytest.mark.parametrize("family", [one for one in (*STATES, *sorted(BLIND | PLANES)) if one != "kimi_linear"])
def test_a_document_in_a_row_is_the_document_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi Linear's is in ``test_segments.py``."""
    model = built(family, monkeypatch)
    ids, positions = packed()
    with torch.no_grad():
        wanted = alone(model, ids)
        leaking = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert error(leaking, wanted) > 1e-2, "unmended, the family lets the first document into the second"
        keep_apart(model)
        found = logits_of(model, ids, positions)
    assert error(found, wanted) < TOLERANCE
    assert bool(recurrent_layers(model)) is (family in STATES) and bool(masks_by_kind(model, positions)) is (
        family in BLIND | PLANES
    )


NO_LANGUAGE_MODEL = {"nllb_moe", "switch_transformers", "openai_privacy_filter", "qwen3_omni_moe"}
"""Encoders and decoders of translation, a classifier, and a wrapper that no auto class for text builds."""
MRO = {"glm4v_moe": [2, 1, 1]}
"""Sections of a rotation over several axes that the tiny configuration leaves wider than its head."""


def families() -> tuple[str, ...]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from families_tiny import moe_families

        return tuple(name for name in moe_families() if name not in NO_LANGUAGE_MODEL)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("family", families())
def test_the_second_document_does_not_know_the_first(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All families of the library; those that mix tokens, and only those, are refused when a plan is made."""
    model = built(family, monkeypatch)
    keep_apart(model)
    ids, positions = packed()
    other = ids.clone()
    other[0, :FIRST] = (other[0, :FIRST] + torch.arange(FIRST)) % 190 + 3
    with torch.no_grad():
        torch.manual_seed(0)
        before = logits_of(model, ids, positions)
        torch.manual_seed(0)
        after = logits_of(model, other, positions)
    assert error(after[0, :FIRST], before[0, :FIRST]) > 1e-2
    leak = error(after[0, FIRST:], before[0, FIRST:])
    text = model.config.get_text_config()
    config = SimpleNamespace(
        model_type=model.config.model_type,
        text_model_type=text.model_type,
        get=lambda name, default: getattr(text, name, default),
    )
    mixes = family_that_mixes(config)  # type: ignore[arg-type]
    assert leak > 1e-2 if mixes else leak < TOLERANCE, leak


@pytest.mark.parametrize("family", ["inkling2", "minimax", "nemotron_h", "qwen3_next", "gpt_oss"])
def test_gradients_stay_in_their_document_under_recomputation(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding's gradient of a loss on the second document alone: zero for tokens of the first."""
    model = built(family, monkeypatch)
    ids, positions = packed()
    ids[0, :FIRST] = torch.arange(200, 200 + FIRST)
    table = model.get_input_embeddings().weight
    (wanted,) = torch.autograd.grad(alone(model, ids)[0, FIRST:].square().mean(), table)
    keep_apart(model)
    checkpoint_layers(list(decoder_layers(model).values()), LoadMeter())
    (found,) = torch.autograd.grad(logits_of(model, ids, positions)[0, FIRST:].square().mean(), table)
    tied = table is getattr(model.get_output_embeddings(), "weight", None)
    assert tied or not bool(found[200 : 200 + FIRST].any())
    assert error(found, wanted) < 1e-3


MASKED = {"packing": True, "document_mask": True}


@pytest.mark.parametrize(
    ("config", "data", "refused"),
    [
        ({"model_type": "doge", "is_moe": True}, MASKED, True),
        ({"model_type": "doge", "is_moe": True}, {"format": "jsonl-messages"}, True),
        ({"model_type": "doge", "is_moe": True}, {"format": "jsonl-messages", "packing": False}, False),
        ({"model_type": "doge", "is_moe": True}, {"packing": True}, False),
        ({"model_type": "doge"}, MASKED, False),
        ({"model_type": "diffusion_gemma", "text_config": {"model_type": "diffusion_gemma_text"}}, MASKED, True),
        ({"model_type": "mixtral"}, MASKED, False),
    ],
)
def test_families_that_mix_tokens_are_refused_with_packing(
    config: dict[str, Any], data: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    """Before a plan is made, from config.json alone; the message names the family, why, and what to set."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = DataSpec(train="a", held_out="b", **data)
    if not refused:
        check_documents(tmp_path, spec)
        return
    with pytest.raises(RecipeError, match="documents-mix") as caught:
        check_documents(tmp_path, spec)
    assert config["model_type"] in caught.value.what and "packing to false" in caught.value.next_action


def test_every_class_that_is_kept_apart_is_tried() -> None:
    """A class is listed because a family above has it; the one that is not transformers' own is Kimi K3's."""
    if absent := [name for name in STATES if not (SOURCES / name).is_dir()]:
        pytest.skip(f"the installed transformers has no {', '.join(absent)}")
    text = "".join((SOURCES / name / f"modeling_{name}.py").read_text() for name in STATES)
    assert {name for name in RECURRENT if f"class {name}(" not in text} == {"DeltaAttention"}
