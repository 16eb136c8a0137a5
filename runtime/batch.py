"""One micro-batch on its way into the model: ids, labels, positions.

A row of data is [S] ids, of which every token but the first is predicted, or [3, S] planes: ids, labels, positions; or
[4, S] with the numbers of its images (``runtime.images``).
Legend: B sequences, S tokens a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
"""A label that no loss counts."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward reads.

    Attributes:
        ids: [B, S] int64.
        labels: [B, S] int64; the label of position t is the token that follows it, or ``IGNORE``.
        positions: [B, S] int64, starting at 0 with every document; ``None`` where sequences are single documents.
        images: [B, S] int64, an image's number at its first token, else −1; ``None`` for text alone.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor | None = None
    images: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        optional = (None if plane is None else plane.to(device) for plane in (self.positions, self.images))
        return MicroBatch(self.ids.to(device), self.labels.to(device), *optional)

    @property
    def tokens(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE).sum())


def as_batch(rows: Tensor) -> MicroBatch:
    """[B, S] ids of whole sequences, or [B, 3 or 4, S] planes of ids, labels, positions and images."""
    if rows.dim() == 2:
        return whole_sequences(rows)
    return MicroBatch(*(plane.contiguous() for plane in rows.unbind(1)))


def whole_sequences(ids: Tensor) -> MicroBatch:
    """[B, S] ids of which every token but the first is predicted."""
    labels = torch.full_like(ids, IGNORE)
    labels[:, :-1] = ids[:, 1:]
    return MicroBatch(ids, labels)


def ids_of(rows: np.ndarray) -> np.ndarray:
    """The ids of rows [N, S] or [N, 3, S]."""
    return rows if rows.ndim == 2 else rows[:, 0]


def counted_tokens(rows: np.ndarray) -> int:
    """Labels that count in rows [N, S] or [N, 3, S]."""
    return rows.shape[0] * (rows.shape[1] - 1) if rows.ndim == 2 else int((rows[:, 1] != IGNORE).sum())
