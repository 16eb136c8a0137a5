"""Held-out loss: the same sequences on every mesh, divided over the ranks, no rank left out of a collective."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardwright.runtime.batch import counted_tokens
from shardwright.runtime.device import Device
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks
from shardwright.schemas.run import EvalMetric


def evaluate(
    model: nn.Module, sequences: np.ndarray, step: int, micro: int, ranks: Ranks, device: Device
) -> EvalMetric:
    """Mean loss per predicted token over ``sequences`` [N, S] or [N, 3, S].

    Sequences are dealt in rounds of D · micro; ranks without one in the last round run a copy that counts nothing.
    """
    round_size = ranks.sizes.data_ranks * micro
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(sequences), round_size):
            first = start + ranks.data_rank * micro
            mine = sequences[first : first + micro]
            counted = len(mine) > 0
            ids = torch.from_numpy((mine if counted else sequences[:1]).astype(np.int64)).to(device.torch_device)
            loss = summed_loss(model, ids).double().cpu()
            total += loss if counted else 0.0
    total = total.to(device.torch_device)
    if ranks.world > 1:
        dist.all_reduce(total)
    tokens = counted_tokens(sequences)
    return EvalMetric(step=step, loss=float(total) / tokens, tokens=tokens)
