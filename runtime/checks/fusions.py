"""Fused against unfused on the live model: logits, loss and every adapter's gradient, by the plan's own switch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.checkpointing import routed
from shardwright.runtime.checks.compare import ROUTES_TOLERANCE, relative
from shardwright.runtime.checks.context import first_rows
from shardwright.runtime.fuse import fusions_off
from shardwright.runtime.losses import logits_of
from shardwright.runtime.routing import Routes
from shardwright.runtime.train import Trainer
from shardwright.schemas.run import CheckResult

SILENT = 1e-6
"""An adapter whose gradient is this small beside the whole one says nothing: A while B is still zero."""


def fusions_equal(trainer: Trainer) -> tuple[CheckResult, ...]:
    """Every rank runs its first micro-batch, and a step's gradient, both ways.

    The largest difference of a logit over the largest logit, of the loss, of the gradient norm, and of each adapter's
    gradient in length and direction, must stay within the loosest tolerance among the installed fusions. The unfused
    run takes the experts of the fused one; few of its own choices may be others.
    """
    switches = trainer.live.switches
    if not switches:
        return ()
    tolerance = max(switch.tolerance for switch in switches)
    batch = first_rows(trainer)
    routes = Routes()
    with torch.no_grad():
        with routed(routes):
            fused = logits_of(trainer.live.model, batch.ids, batch.positions).float()
        with fusions_off(switches), routed(repeated := routes.again()):
            plain = logits_of(trainer.live.model, batch.ids, batch.positions).float()
    error = float((fused - plain).abs().max() / plain.abs().max().clamp_min(1e-12))
    routes = Routes()
    with routed(routes):
        ours = trainer.gradient(1)
    kept = {name: value.to("cpu", copy=True) for name, value in trainer.optimizer.gradients().items()}
    with fusions_off(switches), routed(routes.again()):
        theirs = trainer.gradient(1)
    adapter, apart = furthest(trainer, kept)
    trainer.optimizer.clear()
    trainer.live.meter.total.clear()
    norm_error, loss_error = relative(ours.norm, theirs.norm), relative(ours.loss, theirs.loss)
    return (
        CheckResult(
            stage="load",
            name="fusions-equal",
            passed=max(error, norm_error, loss_error, apart) <= tolerance
            and repeated.differing_share <= ROUTES_TOLERANCE[trainer.recipe.precision.base],
            evidence=f"{len(switches)} fused modules on and off: logits differ by {error:.1e}, loss {ours.loss:.6g} "
            f"against {theirs.loss:.6g} ({loss_error:.1e}), gradient norm {ours.norm:.6g} against {theirs.norm:.6g} "
            f"({norm_error:.1e}), gradient of {adapter} furthest apart ({apart:.1e}), allowed {tolerance:.0e}; "
            f"{repeated.differing} of {repeated.compared} experts chosen otherwise",
        ),
    )


def furthest(trainer: Trainer, fused: dict[str, Tensor]) -> tuple[str, float]:
    """The adapter whose gradient now is least like its ``fused`` one, and by how much; the same on all ranks.

    Length and direction count: the larger of ``| |a| / |b| − 1 |`` and ``1 − cos(a, b)``. Rounding moves both by its
    square, a wrong factor, sign or expert by itself.
    """
    plain = trainer.optimizer.gradients()
    names = list(trainer.live.adapters)
    sums = torch.zeros((len(names), 3), dtype=torch.float64)
    for row, name in zip(sums, names, strict=True):
        if name in plain:
            a, b = fused[name].double().flatten(), plain[name].cpu().double().flatten()
            row.copy_(torch.stack((a @ a, b @ b, a @ b)))
    if trainer.ranks.world > 1:
        sums = sums.to(trainer.device.torch_device)
        dist.all_reduce(sums)
        sums = sums.cpu()
    aa, bb, ab = sums.unbind(1)
    loud = torch.maximum(aa, bb) > SILENT**2 * bb.sum()
    length = (aa / bb.clamp_min(1e-300)).sqrt().sub(1).abs()
    turned = 1 - ab / (aa * bb).sqrt().clamp_min(1e-300)
    apart = torch.where(loud, torch.maximum(length, turned), 0.0)
    worst = int(apart.argmax()) if names else 0
    return (names[worst], float(apart[worst])) if names else ("no adapter", 0.0)
