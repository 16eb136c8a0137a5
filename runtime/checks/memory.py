"""When memory runs out: which component of the plan's memory model grew, and which alternative of the plan fits."""

from __future__ import annotations

import torch

from shardwright.runtime.device import Device
from shardwright.schemas.cost import Moment
from shardwright.schemas.errors import RunError
from shardwright.schemas.plan import AdaptationPlan, Alternative

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
"""What a device and a host raise."""


def nearest_alternative(plan: AdaptationPlan) -> Alternative | None:
    """The fastest feasible alternative that reserves less than the plan's own strategy."""
    reserved = plan.evidence.cost.memory.reserved_bytes
    smaller = [one for one in plan.evidence.alternatives if one.feasible and one.reserved_bytes < reserved]
    return min(smaller, key=lambda one: (one.step_ms, one.reserved_bytes), default=None)


def out_of_memory(plan: AdaptationPlan, device: Device, moment: Moment, cause: BaseException) -> RunError:
    """The typed error for memory that ran out.

    Args:
        plan: gives the predicted components and the alternatives.
        device: of this rank.
        moment: what was being done.
        cause: the allocator's own error.
    """
    memory = plan.evidence.cost.memory
    alive = [one for one in memory.components if moment in one.moments]
    largest = sorted(alive, key=lambda one: -one.bytes)[:3]
    planned = ", ".join(f"{one.name} {_gib(one.bytes)}" for one in largest) or "no component"
    predicted = memory.by_moment.get(moment, memory.peak_bytes)
    grown = device.peak_memory_bytes() - predicted
    suspect = _suspect(moment)
    other = nearest_alternative(plan)
    action = (
        f"approve the plan's alternative {other.strategy.text()}: it reserves {_gib(other.reserved_bytes)} and was "
        f"predicted at {other.step_ms:.4g} ms a step"
        if other is not None
        else "no alternative of this plan reserves less: plan again with more ranks or smaller micro-batches"
    )
    return RunError(
        "out-of-memory",
        f"memory ran out in {moment}: the plan predicted {_gib(predicted)} there (largest: {planned}), "
        f"{_gib(device.peak_memory_bytes())} were in use, {_gib(abs(grown))} {'more' if grown > 0 else 'less'}; "
        f"{suspect} is what grows there ({str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__})",
        where=f"device {device.name}, moment {moment}",
        next_action=action,
    )


def _suspect(moment: Moment) -> str:
    return {
        "load": "frozen_base",
        "forward_peak": "activations",
        "loss": "loss",
        "backward_peak": "activations",
        "optimizer_step": "optimizer_state",
    }[moment]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
