"""How many rows each expert got, by layer: counted in forward, never in a recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


def rows_of_experts(top_k_index: Tensor, num_experts: int) -> Tensor:
    """[…] expert of each choice → [E] int64 rows of each expert, without a wait for the device."""
    flat = top_k_index.reshape(-1)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat.to(torch.int64), torch.ones_like(flat, dtype=torch.int64))


class LoadMeter:
    """Counts rows per expert. One meter serves all layers of a model."""

    def __init__(self) -> None:
        self.step: dict[str, Tensor] = {}
        self.total: dict[str, Tensor] = {}
        self.recording = False

    def add(self, layer: str, counts: Tensor) -> None:
        """Add one forward's counts [E] of this rank, if recording."""
        if not self.recording:
            return
        seen = self.step.get(layer)
        self.step[layer] = counts.detach().clone() if seen is None else seen.add_(counts)

    @contextmanager
    def record(self, on: bool = True) -> Iterator[None]:
        """Count (or not) inside the block."""
        before, self.recording = self.recording, on
        try:
            yield
        finally:
            self.recording = before

    def finish_step(self) -> dict[str, Tensor]:
        """Counts of the step over all ranks, [E] per layer on the host; adds them to the totals."""
        names = list(self.step)
        if not names:
            return {}
        stacked = torch.cat([self.step[name] for name in names])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(stacked)
        pieces = stacked.cpu().split([self.step[name].numel() for name in names])
        counts = dict(zip(names, pieces, strict=True))
        self.step = {}
        for name, count in counts.items():
            self.total[name] = self.total[name] + count if name in self.total else count.clone()
        return counts


def max_over_mean(counts: dict[str, Tensor]) -> float:
    """The worst layer's load of its hottest expert over the mean; 1 is even, 0 means no experts."""
    ratios = [float(count.max()) * count.numel() / max(float(count.sum()), 1.0) for count in counts.values()]
    return max(ratios, default=0.0)
