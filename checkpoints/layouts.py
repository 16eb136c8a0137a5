"""How each architecture keeps its experts in memory: order of dims, gating, names.

The layout is a fact of the architecture. It is never inferred from sizes: with 2·I = H both readings of a stack
have the same shape. An architecture that is not listed here is refused (and becomes a question to the reviewer).
Legend: E experts, I expert width, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.schemas.errors import LegalityError


@dataclass(frozen=True)
class ExpertLayout:
    """Storage of one family's routed experts in its transformers class.

    Attributes:
        order: ``out_in`` keeps [E, out, in]; ``in_out`` keeps [E, in, out].
        gate: where the gate's values stand in the up stack: first half, every other column, or nowhere.
        up, down: names of the two stacks.
        biased: whether each stack has a bias [E, out].
    """

    order: Literal["out_in", "in_out"] = "out_in"
    gate: Literal["first-half", "interleaved", "none"] = "first-half"
    up: str = "gate_up_proj"
    down: str = "down_proj"
    biased: bool = False

    @property
    def gated(self) -> bool:
        return self.gate != "none"


STANDARD = ExpertLayout()
"""``gate_up_proj`` [E, 2I, H] with the gate's rows first, ``down_proj`` [E, H, I]."""

_STANDARD_FAMILIES = """
afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
diffusion_gemma dots1 dots3_note ernie4_5_moe ernie4_5_vl_moe exaone_moe flex_olmo flint gemma4 glm4_moe
glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl inkling inkling2 inkling2_loop jamba kimi_k25 kimi_k3 kimi_linear kolibri1 laguna
lara_mini lfm2_moe longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl mistral4 mistral_large4
mixtral muse_spark olmoe phimoe qwen2_moe qwen3_5_moe qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl_moe qwen4_exp
sarvam_mla sarvam_moe solar_open step3p5 step3p7 unlimited_ocr zaya
"""

_OTHERS: dict[str, ExpertLayout] = {
    "aria": ExpertLayout(order="in_out"),
    "gpt_oss": ExpertLayout(order="in_out", gate="interleaved", biased=True),
    "jetmoe": ExpertLayout(up="input_linear.weight", down="output_linear.weight"),
    "llama4": ExpertLayout(order="in_out"),
    "nemotron_h": ExpertLayout(gate="none", up="up_proj"),
    "openai_privacy_filter": ExpertLayout(order="in_out", biased=True),
}

LAYOUTS: dict[str, ExpertLayout] = {**dict.fromkeys(_STANDARD_FAMILIES.split(), STANDARD), **_OTHERS}


NOT_ADAPTED = {
    "dbrx": "all experts of a block are rows of one matrix, which is read outside the module that PEFT would wrap: an "
    "adapter could be trained, and no PEFT would apply it",
    "doge": "an expert is one neuron in two embedding tables, so it has no matrix to factor",
    "longcat_flash": "some experts are identities, and its two stacks count different ones",
}
"""Families whose routed experts get no adapter, and why."""


def not_adapted(model_type: str) -> str:
    """Why a family's routed experts get no adapter; empty where they may."""
    return NOT_ADAPTED.get(model_type.removesuffix("_text"), "")


def expert_layout(model_type: str) -> ExpertLayout:
    """The layout of a family; ``X_text`` and ``X_moe_text`` follow ``X``.

    Raises:
        LegalityError: ``unknown-expert-layout``.
    """
    for name in (model_type, model_type.removesuffix("_text")):
        if name in LAYOUTS:
            return LAYOUTS[name]
    raise LegalityError(
        "unknown-expert-layout",
        f"how {model_type!r} stores its stacked experts is not known; sizes cannot tell [E, out, in] from [E, in, out]",
        where=f"model_type {model_type}",
        next_action="add the family to checkpoints/layouts.py, or target attention only",
    )
