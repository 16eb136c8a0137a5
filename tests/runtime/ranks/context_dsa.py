"""Sparse attention by our operators, in Triton's interpreter, on cut sequences: ``context_dsa.py JOBS.json``.

As ``context.py``, with the indexers' own loss where the recipe asks for it: against plain torch on whole rows in one
process, two rows at a time. Then once more with the operators off: the family's code on cut rows.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import context
import torch
import torch.distributed as dist

from shardwright.kernels import interpreter
from shardwright.runtime.batch import as_batch, counted_tokens
from shardwright.runtime.fuse import fusions_off
from shardwright.runtime.fused_dsa_layer import LEARNER
from shardwright.runtime.fused_dsa_loss import IndexerLoss, indexer_loss_for
from shardwright.runtime.fused_dsa_ways import ways_taken
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.reference import add_plain_lora, load_plain, reference_step
from shardwright.schemas.plan import AdaptationPlan

context.ROWS = int(os.environ["WORLD_SIZE"])
context.KINDS = ("documents",)
REFERENCES: dict[str, tuple[float, dict[str, Any], float]] = {}
LEARNED: dict[str, float] = {}
"""Name of a job → the indexers' loss of whole rows in one process."""


class Learning:
    """What was built last, and the loss that was put on it."""

    live: Any = None
    loss: IndexerLoss | None = None


def build(plan: AdaptationPlan, *given: Any) -> Any:
    Learning.live = made(plan, *given)
    Learning.loss = indexer_loss_for(plan, Learning.live.model, Learning.live.meter)
    return Learning.live


def reference(name: str, kind: str, plan: AdaptationPlan, folder: Path, shapes: dict[str, Any]) -> Any:
    """Loss and gradients of whole rows, the indexers' too; and the loss of held-out rows."""
    if name not in REFERENCES:
        model, files = load_plain(folder, torch.float32, torch.device("cpu"))
        whole = {adapter: context.values_of(adapter, shape) for adapter, shape in shapes.items()}
        leaves = add_plain_lora(model, plan.decision.lora_targets, whole, files.config.text_model_type)
        rows, loss, learner = torch.from_numpy(context.rows_of(kind)), 0.0, None
        if Learning.loss is not None:
            Learning.loss.put_on_plain(model)
            learner = next(module.__dict__[LEARNER] for module in model.modules() if LEARNER in module.__dict__)
            learner.take()
        with nullcontext() if learner is None else learner.meter.record():
            for part in rows.split(context.MICRO):
                share = summed_loss(model, as_batch(part)) / counted_tokens(rows.numpy())
                share.backward()
                loss += float(share.detach())
        if learner is not None:
            LEARNED[name] = float(learner.take())
        with torch.no_grad():
            held_out = reference_step(model, {}, rows[: context.HELD_OUT], torch.device("cpu")).loss
        REFERENCES[name] = loss, {adapter: leaf.grad for adapter, leaf in leaves.items()}, held_out
    return REFERENCES[name]


def check(name: str, plan: AdaptationPlan, folder: Path, ranks: Any) -> str:
    line = plain_check(name, plan, folder, ranks)
    live, recipe = Learning.live, plan.decision.recipe
    ways, path = ways_taken(live.model), "dense" if recipe.indexer.stage == "dense" else "sparse"
    assert all((way.path, way.row_tokens) == (path, context.TOKENS) and "cut over ranks" in way.reason for way in ways)
    assert sum(len(way.modules) for way in ways) == len(plan.decision.fusions), ways
    learns(name)
    for owned in live.adapters.values():
        owned.parameter.grad = None
    with fusions_off(live.switches):
        loss, _ = context.trained(live, context.KINDS[0], ranks)
    plain_loss, plain, _ = REFERENCES[name]
    assert abs(loss - plain_loss) < context.TOLERANCE, (name, loss, plain_loss)
    unfused, _ = context.compared(live, name, plain, ranks)
    learns(name)
    return f"{line}, unfused {unfused:.1e}"


def learns(name: str) -> None:
    """The indexers' loss over all ranks since the last call is that of whole rows."""
    if Learning.loss is None:
        return
    total = Learning.loss.take()
    assert total is not None and LEARNED[name] > 1e-3
    dist.all_reduce(total)
    assert abs(float(total) - LEARNED[name]) < context.TOLERANCE, (name, float(total), LEARNED[name])


made, plain_check = context.build, context.check
context.build, context.check, context.reference = build, check, reference

if __name__ == "__main__":
    interpreter.install()
    context.main()
