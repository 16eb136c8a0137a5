"""Attention masks that keep documents apart, for families that build theirs without looking at positions.

Most families hand their positions to the library's mask functions, which see where documents begin. These do not, but
take ready masks, one for each kind of layer, in the place of the padding mask: those that the same functions make with
positions.
Legend: B rows, S tokens a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLIND = frozenset({"gpt_oss", "afmoe"})
"""Families whose masks do not look at positions, and that take masks by kind of layer."""


def masks_by_kind(model: nn.Module, positions: Tensor) -> dict[str, Any]:
    """The arguments that such a family's forward needs on top: masks of documents [B, S]; empty for other families."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    if getattr(text, "model_type", "").removesuffix("_text") not in BLIND:
        return {}
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    dtype: torch.dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
    like = torch.empty((*positions.shape, 1), dtype=dtype, device=positions.device)
    masks = {
        "full_attention": create_causal_mask(text, like, None, None, positions),
        "sliding_attention": create_sliding_window_causal_mask(text, like, None, None, positions),
    }
    return {"attention_mask": masks}
