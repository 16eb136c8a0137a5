"""Where a number that is not finite comes from: rank, adapter and expert, and the first layer that gives one.

Every rank takes part: its micro-batches run again without gradients, so the collectives stay in step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.runtime.batch import as_batch
from shardwright.runtime.losses import logits_of
from shardwright.runtime.ownership import Owned
from shardwright.runtime.parallelize import decoder_layers

if TYPE_CHECKING:
    from shardwright.runtime.train import Trainer

SHOWN = 5


def where_not_finite(trainer: Trainer, step: int) -> str:
    """One line for each rank that saw something, the same on all ranks."""
    mine = [*_adapters(trainer.optimizer.adapters), *_layers(trainer, step)]
    seen: list[list[str]] = [mine]
    if trainer.ranks.world > 1:
        seen = [[] for _ in range(trainer.ranks.world)]
        dist.all_gather_object(seen, mine)
    lines = [f"rank {rank}: {', '.join(found[:SHOWN])}" for rank, found in enumerate(seen) if found]
    return "; ".join(lines) or "every adapter, gradient and layer output is finite now: the sum itself overflowed"


def _adapters(adapters: dict[str, Owned]) -> list[str]:
    """Adapters whose values or gradients are not finite, an expert's with its global number."""
    found = []
    for name, owned in adapters.items():
        for kind, values in (("values", owned.local()), ("gradient", owned.local_grad())):
            if values is None or not values.numel() or bool(torch.isfinite(values).all()):
                continue
            experts = ""
            if owned.expert:
                wrong = (~torch.isfinite(values)).flatten(1).any(1).nonzero().flatten().tolist()
                experts = f", experts {', '.join(str(owned.numbers[place]) for place in wrong[:SHOWN])}"
            found.append(f"{kind} of {name}{experts}")
    return found


def _layers(trainer: Trainer, step: int) -> list[str]:
    """The first decoder layer whose output is not finite in this rank's micro-batches."""
    first: list[str] = []

    def hook(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not first and isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                first.append(f"output of {name}")

        return look

    hooks = [layer.register_forward_hook(hook(name)) for name, layer in decoder_layers(trainer.live.model).items()]
    try:
        with torch.no_grad():
            for rows in trainer.batches.micro_batches(step, trainer.ranks.data_rank):
                batch = as_batch(rows.to(trainer.device.torch_device))
                logits_of(trainer.live.model, batch.ids, batch.positions)
    finally:
        for one in hooks:
            one.remove()
    return first
