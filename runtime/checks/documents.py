"""Documents that share a sequence must not see each other: tried on the live model.

Legend: S tokens a sequence, V vocabulary.
"""

from __future__ import annotations

import torch

from shardwright.runtime.checks.compare import LOSS_TOLERANCE
from shardwright.runtime.losses import logits_of
from shardwright.runtime.train import Trainer
from shardwright.schemas.run import CheckResult

HALF = 16
"""Longest document of the probe."""


def documents_apart(trainer: Trainer) -> tuple[CheckResult, ...]:
    """Two documents in one sequence: with the first exchanged for another, the second's logits stay.

    Every rank takes part. A family whose linear attention carries its state across the border fails here. Nothing is
    tried where each document has its own sequence.
    """
    if trainer.batches.sequences.ndim == 2 or not trainer.recipe.data.documents_share_rows:
        return ()
    held = torch.from_numpy(trainer.batches.sequences[:1, 0].copy())
    half = min(HALF, held.shape[1] // 2)
    vocabulary = int(trainer.live.files.config.count("vocab_size") or int(held.max()) + 1)
    device = trainer.device.torch_device
    ids = held[:, : 2 * half].to(device)
    positions = torch.arange(half, device=device).repeat(2).unsqueeze(0)
    other = ids.clone()
    other[:, :half] = (other[:, :half] + 1 + torch.arange(half, device=device)) % vocabulary
    with torch.no_grad():
        before = logits_of(trainer.live.model, ids, positions)[:, half:].float()
        after = logits_of(trainer.live.model, other, positions)[:, half:].float()
    error = float((before - after).abs().max() / before.abs().max().clamp_min(1e-12))
    allowed = LOSS_TOLERANCE[trainer.recipe.precision.base]
    return (
        CheckResult(
            stage="load",
            name="documents-apart",
            passed=error <= allowed,
            evidence=f"logits of the second of two documents of {half} tokens differ by {error:.1e} of their largest "
            f"when the first is exchanged, allowed {allowed:.0e}",
        ),
    )
