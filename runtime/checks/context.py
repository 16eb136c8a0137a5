"""Cut sequences against whole ones on the live model; and rows that a rank can run whole.

Legend: S tokens of the probe, cp ranks of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.runtime.batch import MicroBatch, as_batch
from shardwright.runtime.checkpointing import routed
from shardwright.runtime.checks.compare import LOSS_TOLERANCE, ROUTES_TOLERANCE
from shardwright.runtime.context import Place, cut_batch, cutting
from shardwright.runtime.losses import logits_of
from shardwright.runtime.routing import Choose, Routes, Size, common
from shardwright.runtime.train import Trainer
from shardwright.schemas.run import CheckResult

PIECE = 8
"""Most tokens of a piece of the probe."""


def first_rows(trainer: Trainer, cut: Callable[[Tensor], Tensor] = lambda rows: rows) -> MicroBatch:
    """This rank's first micro-batch, or the ``cut`` of it; of sequences that ranks share, as many tokens as one has."""
    rows = trainer.batches.micro_batches(1, trainer.ranks.data_rank)[0]
    batch = as_batch(cut(rows).to(trainer.device.torch_device))
    tokens = batch.ids.shape[1] // trainer.ranks.sizes.cp
    planes = (batch.ids, batch.labels, batch.positions, batch.images)
    return MicroBatch(*(None if plane is None else plane[:, :tokens] for plane in planes))  # type: ignore[arg-type]


@dataclass
class _OwnRoutes(Routes):
    """The choices of a run of whole rows, for a run of this rank's tokens of them."""

    rows: Place | None = None

    def take(self, size: Size, choose: Choose) -> Tensor:
        """The next kept choice of so many rows of all ranks."""
        own = choose()
        assert self.rows is not None
        for at in range(self.place, len(self.made)):
            if self.made[at][0] == (size[0] * self.rows.cp, *size[1:]):
                self.place = at + 1
                whole = self.made[at][1].to(own)
                kept = self.rows.own(whole.reshape(1, -1, whole.shape[-1])).reshape(own.shape).clone()
                self.compared += own.numel()
                self.differing += own.numel() - common(own, kept)
                return kept
        return own


def context_equal(trainer: Trainer) -> tuple[CheckResult, ...]:
    """Two documents in one sequence, cut over the ranks and whole on each: the same logits. Every rank takes part.

    The cut run takes the experts of the whole one; few of its own choices may be others.
    """
    place, model = trainer.ranks.place, trainer.live.model
    if place is None:
        return ()
    held = torch.from_numpy(trainer.batches.sequences[:1].copy()).to(trainer.device.torch_device)
    ids = held if held.dim() == 2 else held[:, 0]
    piece = min(PIECE, ids.shape[1] // (2 * place.cp))
    tokens = 2 * place.cp * piece
    first = tokens // 2 - 1
    positions = torch.cat((torch.arange(first), torch.arange(tokens - first))).unsqueeze(0).to(ids.device)
    probe = MicroBatch(ids[:, :tokens], ids[:, :tokens], positions)
    mine, cut = cut_batch(probe, place)
    routes = Routes()
    with torch.no_grad():
        with routed(routes):
            whole = place.own(logits_of(model, probe.ids, probe.positions)).float()
        repeated = _OwnRoutes(routes.made, True, rows=place)
        with cutting(cut), routed(repeated):
            ours = logits_of(model, mine.ids, mine.positions).float()
    error = float((ours - whole).abs().max() / whole.abs().max().clamp_min(1e-12))
    base = trainer.recipe.precision.base
    return (
        CheckResult(
            stage="load",
            name="context-equal",
            passed=error <= LOSS_TOLERANCE[base] and repeated.differing_share <= ROUTES_TOLERANCE[base],
            evidence=f"logits of {tokens} tokens of two documents, cut over {place.cp} ranks and whole, differ by "
            f"{error:.1e} of their largest, allowed {LOSS_TOLERANCE[base]:.0e}; {repeated.differing} of "
            f"{repeated.compared} experts chosen otherwise",
            scope="local",
        ),
    )
