"""Fused against unfused on the live model: logits, loss and every adapter's gradient, by the plan's own switch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.batch import IGNORE
from shardwright.runtime.checkpointing import routed
from shardwright.runtime.checks.compare import ROUTES_TOLERANCE, relative
from shardwright.runtime.checks.context import first_rows
from shardwright.runtime.checks.wide import Wide, as_near, in_fp32, largest_difference
from shardwright.runtime.fuse import fusions_off
from shardwright.runtime.losses import logits_of
from shardwright.runtime.routing import Routes
from shardwright.runtime.train import Trainer
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import CheckResult

SILENT = 1e-6
"""An adapter whose gradient is this small beside the whole one says nothing: A while B is still zero."""


LEAST_TOKENS = 64
"""Fewest tokens of a sequence that both ways are compared on."""


def tokens_that_fit(plan: AdaptationPlan) -> int | None:
    """Tokens of a micro-batch that run without fused operators too; ``None`` where whole ones do.

    Half of the room beside the weights, by what the plan says that whole ones need: what does not grow with tokens, as
    gradients and optimizer state, is then inside it. A power of two, so that pieces of cut sequences divide it.
    """
    plain, memory = plan.evidence.plain, plan.evidence.cost.memory
    if plain is None or plain.reserved_bytes <= memory.budget_bytes:
        return None
    held = memory.by_moment["load"]
    room = max(0, memory.budget_bytes - held) / (plain.reserved_bytes - held)
    strategy, batch = plan.decision.strategy, plan.decision.recipe.batch
    tokens = int(strategy.micro_batch_sequences * batch.sequence_tokens * room / 2)
    least = min(LEAST_TOKENS * strategy.mesh.cp, batch.sequence_tokens)
    return max(least, 1 << max(0, tokens.bit_length() - 1))


def shortened(rows: Tensor, tokens: int) -> Tensor:
    """Rows ``[B, S]`` or ``[B, planes, S]`` with at most ``tokens`` tokens: fewer sequences, then the begin of one.

    A sequence with images stays whole, since an image's tokens belong together. Where the begin has no label that
    counts, every token of it is predicted.
    """
    S = rows.shape[-1]
    if tokens >= S or (rows.dim() == 3 and rows.shape[1] > 3):
        return rows[: max(1, tokens // S)]
    cut = rows[:1, ..., :tokens].clone()
    if cut.dim() == 3 and not bool((cut[:, 1] != IGNORE).any()):
        cut[:, 1, :-1] = cut[:, 0, 1:]
    return cut


def fusions_equal(trainer: Trainer) -> tuple[CheckResult, ...]:
    """Every rank runs its first micro-batch, and a step's gradient, both ways.

    The largest difference of a logit over the largest logit, of the loss, of the gradient norm, and of each adapter's
    gradient in length and direction, must stay within the loosest tolerance among the installed fusions. The unfused
    run takes the experts of the fused one; few of its own choices may be others. Where the plan fits with its fusions
    alone, both ways run on as many tokens as fit without them.

    Logits of a bf16 model that are farther apart are held against the same model in fp32 arithmetic: fused ones may be
    about as far from it as unfused ones.
    """
    switches = trainer.live.switches
    if not switches:
        return ()
    tolerance = max(switch.tolerance for switch in switches)
    tokens = tokens_that_fit(trainer.plan)

    def cut(rows: Tensor) -> Tensor:
        return rows if tokens is None else shortened(rows, tokens)

    batch = first_rows(trainer, cut)
    routes = Routes()
    with torch.no_grad():
        with routed(routes):
            fused = logits_of(trainer.live.model, batch.ids, batch.positions).float()
        with fusions_off(switches), routed(repeated := routes.again()):
            plain = logits_of(trainer.live.model, batch.ids, batch.positions).float()
        (error,) = largest_of_ranks(trainer, largest_difference(fused, plain))
        wide = None
        if trainer.recipe.precision.base != "float32" and not error <= tolerance:
            with fusions_off(switches), Wide(), routed(routes.again()):
                exact = logits_of(trainer.live.model, batch.ids, batch.positions)
            wide = largest_of_ranks(trainer, largest_difference(fused, exact), largest_difference(plain, exact))
            del exact
        del fused, plain
    routes = Routes()
    with routed(routes):
        ours = trainer.gradient(1, cut)
    kept = {name: value.to("cpu", copy=True) for name, value in trainer.optimizer.gradients().items()}
    with fusions_off(switches), routed(routes.again()):
        theirs = trainer.gradient(1, cut)
    adapter, apart = furthest(trainer, kept)
    trainer.optimizer.clear()
    trainer.live.meter.total.clear()
    norm_error, loss_error = relative(ours.norm, theirs.norm), relative(ours.loss, theirs.loss)
    return (
        CheckResult(
            stage="load",
            name="fusions-equal",
            passed=(error <= tolerance or (wide is not None and as_near(*wide)))
            and max(norm_error, loss_error, apart) <= tolerance
            and repeated.differing_share <= ROUTES_TOLERANCE[trainer.recipe.precision.base],
            evidence=f"{len(switches)} fused modules on and off{_on(tokens)}: logits differ by {error:.1e}"
            f"{in_fp32(wide, 'unfused ones')}, "
            f"loss {ours.loss:.6g} against {theirs.loss:.6g} ({loss_error:.1e}), "
            f"gradient norm {ours.norm:.6g} against {theirs.norm:.6g} ({norm_error:.1e}), "
            f"gradient of {adapter} furthest apart ({apart:.1e}), allowed {tolerance:.0e}; "
            f"{repeated.differing} of {repeated.compared} experts chosen otherwise",
        ),
    )


def largest_of_ranks(trainer: Trainer, *errors: float) -> tuple[float, ...]:
    """The largest of each error over all ranks, so that they decide alike."""
    found = torch.tensor(errors, dtype=torch.float32, device=trainer.device.torch_device)
    if trainer.ranks.world > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return tuple(found.tolist())


def _on(tokens: int | None) -> str:
    return "" if tokens is None else f", on at most {tokens:,} tokens at once, since whole micro-batches fit only fused"


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
