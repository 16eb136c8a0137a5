"""One micro-batch on its way into the model: ids, labels, positions.

A row of data is [S] ids, of which every token but the first is predicted, or [3, S] planes: ids, labels, positions.
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
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        positions = None if self.positions is None else self.positions.to(device)
        return MicroBatch(self.ids.to(device), self.labels.to(device), positions)

    @property
    def tokens(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE).sum())


def as_batch(rows: Tensor) -> MicroBatch:
    """[B, S] ids of whole sequences, or [B, 3, S] planes of ids, labels and positions."""
    if rows.dim() == 2:
        return whole_sequences(rows)
    ids, labels, positions = rows.unbind(1)
    return MicroBatch(ids.contiguous(), labels.contiguous(), positions.contiguous())


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
