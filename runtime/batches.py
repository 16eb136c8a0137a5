"""Which rank reads which sequences of a step: their union is the same on every mesh, their order follows from a seed.

Legend: N sequences, S tokens a sequence, G sequences a step, D data ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shardwright.runtime.batch import counted_tokens


@lru_cache(maxsize=2)
def order_of(seed: int, epoch: int, total: int) -> Tensor:
    """[total] the shuffle of an epoch; a step may cross from one epoch into the next, so two are kept."""
    generator = torch.Generator().manual_seed((seed << 32) + epoch)
    return torch.randperm(total, generator=generator)


@dataclass(frozen=True)
class Batches:
    """Training sequences in their order.

    Attributes:
        sequences: [N, S] token ids, or [N, 3, S] planes of ids, labels and positions (``documents``), or [N, 4, S] with
            the numbers of images (``images``).
        per_step: G.
        data_ranks: D; divides G.
        micro: sequences of one micro-batch.
        seed: ``recipe.seeds.data``.
    """

    sequences: np.ndarray
    per_step: int
    data_ranks: int
    micro: int
    seed: int

    def indices(self, step: int) -> list[int]:
        """The G sequences of a step (first is 1): shuffled epochs, one after another, without gaps."""
        total = len(self.sequences)
        first = (step - 1) * self.per_step
        picked: list[int] = []
        while len(picked) < self.per_step:
            epoch, offset = divmod(first + len(picked), total)
            picked += order_of(self.seed, epoch, total)[offset : offset + self.per_step - len(picked)].tolist()
        return picked

    def global_batch(self, step: int) -> Tensor:
        """[G, S] (or [G, 3, S]), for references in one process."""
        return self._take(self.indices(step))

    def tokens(self, step: int) -> int:
        """Labels of a step that count, over all ranks."""
        return counted_tokens(self.sequences[np.asarray(self.indices(step))])

    def micro_batches(self, step: int, data_rank: int) -> list[Tensor]:
        """This rank's share of a step, [micro, S] (or [micro, 3, S]) each."""
        share = self.per_step // self.data_ranks
        mine = self.indices(step)[data_rank * share : (data_rank + 1) * share]
        return [self._take(mine[start : start + self.micro]) for start in range(0, share, self.micro)]

    def _take(self, picked: list[int]) -> Tensor:
        return torch.from_numpy(self.sequences[np.asarray(picked)].astype(np.int64))
