"""What a family's forward needs beside positions so that its masks keep documents apart.

Most families hand their positions to the library's mask functions, which see where documents begin. Some build masks
without looking at positions, but take ready ones, one for each kind of layer, in the place of the padding mask: those
that the same functions make with positions. Some with rotation over several axes look only at a plane of their own,
before those of the axes.
Legend: B rows, S tokens a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLIND = frozenset({"gpt_oss", "afmoe"})
"""Families whose masks do not look at positions, and that take masks by kind of layer."""


PLANES = frozenset({"ernie4_5_vl_moe", "glm4v_moe", "hy_v4_vl"})
"""Families whose masks look at the first of four planes of positions alone: [4, B, S], tokens, then three axes."""


def masks_by_kind(model: nn.Module, positions: Tensor) -> dict[str, Any]:
    """The arguments that such a family's forward needs on top, or in place of positions [B, S]; empty for others."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    family = getattr(text, "model_type", "").removesuffix("_text")
    if family in PLANES:
        return {"position_ids": positions.expand(4, *positions.shape)}
    if family not in BLIND:
        return {}
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    dtype: torch.dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
    like = torch.empty((*positions.shape, 1), dtype=dtype, device=positions.device)
    masks = {
        "full_attention": create_causal_mask(text, like, None, None, positions),
        "sliding_attention": create_sliding_window_causal_mask(text, like, None, None, positions),
    }
    return {"attention_mask": masks}
