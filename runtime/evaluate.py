"""Held-out loss: the same sequences on every mesh, divided over the ranks, no rank left out of a collective."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardwright.runtime.batch import counted_tokens
from shardwright.runtime.device import Device
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks
from shardwright.schemas.errors import CheckFailed
from shardwright.schemas.run import EvalMetric


def evaluate(
    model: nn.Module, sequences: np.ndarray, step: int, micro: int, ranks: Ranks, device: Device
) -> EvalMetric:
    """Mean loss per predicted token over ``sequences`` [N, S] or [N, 3, S].

    Sequences are dealt in rounds of D · micro; ranks without one in the last round run a copy that counts nothing.

    Raises:
        CheckFailed: ``held-out-not-finite``, on every rank.
    """
    round_size = ranks.sizes.data_ranks * micro
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(sequences), round_size):
            first = start + ranks.data_rank * micro
            mine = sequences[first : first + micro]
            counted = len(mine) > 0
            ids = torch.from_numpy((mine if counted else sequences[:1]).astype(np.int64)).to(device.torch_device)
            mine_summed = summed_loss(model, ids).double().cpu()
            total += mine_summed if counted else 0.0
    total = total.to(device.torch_device)
    if ranks.world > 1:
        dist.all_reduce(total)
    tokens, loss = counted_tokens(sequences), float(total)
    if not math.isfinite(loss):
        raise CheckFailed(
            "held-out-not-finite",
            f"the held-out loss is {loss}",
            where=f"step {step}",
            next_action="lower the learning rate, or look for a held-out sequence that the base model cannot take; "
            "`latest` still names the last good save",
        )
    return EvalMetric(step=step, loss=loss / tokens, tokens=tokens)
