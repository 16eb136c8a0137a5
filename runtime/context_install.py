"""What changes in a model whose sequences are cut over ranks, and what of a model cannot be cut."""

from __future__ import annotations

from torch import nn

from shardwright.checkpoints.models.kimi_k3.attention import DeltaAttention, GatedLatentAttention
from shardwright.runtime.context import CONTEXT, Place
from shardwright.runtime.context_attention import install_attention
from shardwright.runtime.context_fusions import require_cuttable
from shardwright.runtime.context_k3 import cut_delta, cut_latent
from shardwright.runtime.context_layers import cut_layer
from shardwright.runtime.context_sparse import cut_choices
from shardwright.runtime.segments import recurrent_layers
from shardwright.schemas.fusion import FusionDecision


def cut_sequences(model: nn.Module, place: Place | None, fusions: tuple[FusionDecision, ...]) -> None:
    """Make a model run on a rank's own tokens; nothing where sequences are whole. Before fusions are installed.

    Raises:
        LegalityError: ``context-attention``, ``context-layer``, ``context-fusion``.
    """
    if place is None:
        return
    for decision in fusions:
        require_cuttable(decision)
    for name, module in recurrent_layers(model).items():
        if isinstance(module, DeltaAttention):
            cut_delta(module)
        else:
            cut_layer(module, name)
    latent = [module for module in model.modules() if isinstance(module, GatedLatentAttention)]
    for module in latent:
        cut_latent(module)
    if not latent:
        cut_choices(model)
        install_attention(model)
    setattr(model, CONTEXT, place)
