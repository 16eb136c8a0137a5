"""Fused against unfused on the live model: logits of one batch and the gradient norm, by the plan's own switch."""

from __future__ import annotations

import torch

from shardwright.runtime.batch import as_batch
from shardwright.runtime.checks.compare import relative
from shardwright.runtime.fuse import fusions_off
from shardwright.runtime.losses import logits_of
from shardwright.runtime.train import Trainer
from shardwright.schemas.run import CheckResult


def fusions_equal(trainer: Trainer) -> tuple[CheckResult, ...]:
    """Every rank runs its first micro-batch both ways.

    The largest difference of a logit over the largest logit, of the loss and of the gradient norm, must stay within
    the loosest tolerance among the installed fusions.
    """
    switches = trainer.live.switches
    if not switches:
        return ()
    tolerance = max(switch.tolerance for switch in switches)
    batch = as_batch(trainer.batches.micro_batches(1, trainer.ranks.data_rank)[0].to(trainer.device.torch_device))
    with torch.no_grad():
        fused = logits_of(trainer.live.model, batch.ids, batch.positions).float()
        with fusions_off(switches):
            plain = logits_of(trainer.live.model, batch.ids, batch.positions).float()
    error = float((fused - plain).abs().max() / plain.abs().max().clamp_min(1e-12))
    ours = trainer.gradient(1)
    with fusions_off(switches):
        theirs = trainer.gradient(1)
    trainer.optimizer.clear()
    trainer.live.meter.total.clear()
    norm_error, loss_error = relative(ours.norm, theirs.norm), relative(ours.loss, theirs.loss)
    return (
        CheckResult(
            stage="load",
            name="fusions-equal",
            passed=max(error, norm_error, loss_error) <= tolerance,
            evidence=f"{len(switches)} fused modules on and off: logits differ by {error:.1e}, loss {ours.loss:.6g} "
            f"against {theirs.loss:.6g} ({loss_error:.1e}), gradient norm {ours.norm:.6g} against {theirs.norm:.6g} "
            f"({norm_error:.1e}), allowed {tolerance:.0e}",
        ),
    )
