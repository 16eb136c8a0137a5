"""Next-token cross-entropy, summed; the caller divides by the tokens of the whole batch.

Legend: B sequences, S tokens a sequence, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.batch import IGNORE, MicroBatch, as_batch
from shardwright.runtime.context import CONTEXT, active, cut_batch, cutting
from shardwright.runtime.images import seen_images
from shardwright.runtime.masks import masks_by_kind
from shardwright.runtime.segments import bounds_of, recurrent_layers, segments

if TYPE_CHECKING:
    from shardwright.runtime.fuse import Switch

FUSED_LOSS = "fused_loss"
"""Where a model keeps the switch of its head whose fused forward gives the loss (``runtime.fused_loss``)."""


def logits_of(model: nn.Module, ids: Tensor, positions: Tensor | None = None, images: Tensor | None = None) -> Tensor:
    """[B, S] → [B, S, V]. Positions that start anew divide a sequence into documents.

    Args:
        images: [B, S] numbers of images, which the model has been given (``runtime.images``).
    """
    seen = seen_images(model, images)
    if positions is None:
        output: Any = model(input_ids=ids, use_cache=False, **seen)
        return output.logits
    cut = active() is not None
    bounds = bounds_of(positions) if not cut and recurrent_layers(model) else None
    masks = {} if cut else masks_by_kind(model, positions)
    with segments(bounds):
        output = model(input_ids=ids, use_cache=False, **{"position_ids": positions, **masks}, **seen)
    return output.logits


def summed_loss(model: nn.Module, batch: MicroBatch | Tensor) -> Tensor:
    """Sum of −log p(label) over the labels that count, fp32; rows as :func:`as_batch` takes them.

    Where the model's sequences are cut over ranks (``runtime.context``) rows are whole, and the sum is over the labels
    of this rank's tokens.
    """
    batch = batch if isinstance(batch, MicroBatch) else as_batch(batch)
    place = getattr(model, CONTEXT, None)
    if place is None:
        return _summed(model, batch)
    mine, cut = cut_batch(batch, place)
    with cutting(cut):
        return _summed(model, mine)


def _summed(model: nn.Module, batch: MicroBatch) -> Tensor:
    switch: Switch | None = getattr(model, FUSED_LOSS, None)
    if switch is not None and switch.fused:
        head: Any = switch.fused_forward
        with head.with_labels(batch.labels):
            output = logits_of(model, batch.ids, batch.positions, batch.images)
        loss: Tensor = head.take(output)
        return loss
    logits = logits_of(model, batch.ids, batch.positions, batch.images)
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, batch.labels.reshape(-1), ignore_index=IGNORE, reduction="sum")
