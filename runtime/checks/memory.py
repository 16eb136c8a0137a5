"""When memory runs out: which component of the plan's memory model grew, and which alternative of the plan fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwright.runtime.checks.usage import Usage, compared
from shardwright.runtime.device import Device
from shardwright.schemas.cost import Moment
from shardwright.schemas.errors import RunError
from shardwright.schemas.plan import AdaptationPlan, Alternative

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
"""What a device and a host raise."""
SHOWN = 4
NOISE = 0.01
"""A component that is this far above its prediction has not grown."""


@contextmanager
def memory_guard(
    plan: AdaptationPlan, device: Device, moment: Moment, held: Callable[[], dict[str, int]] = dict
) -> Iterator[None]:
    """Inside the block an allocator's error becomes the typed one.

    Args:
        held: counts this rank's tensors when it happens (:func:`shardwright.runtime.checks.usage.held_bytes`).

    Raises:
        RunError: ``out-of-memory``.
    """
    try:
        yield
    except OUT_OF_MEMORY as error:
        raise out_of_memory(plan, device, moment, error, held()) from error


@contextmanager
def check_guard(device: Device, doing: str) -> Iterator[None]:
    """Inside the block an allocator's error becomes the typed one of a check, which runs beside the loaded model.

    Args:
        doing: what was compared, as in "memory ran out while ...".

    Raises:
        RunError: ``check-out-of-memory``; the same check would meet it again after a restart.
    """
    try:
        yield
    except OUT_OF_MEMORY as error:
        raise RunError(
            "check-out-of-memory",
            f"memory ran out while {doing}, {_size(device.peak_memory_bytes())} in use: {_said(error)}",
            where=f"device {device.name}, checks before the first step",
            next_action="choose a plan that keeps less on a device (more ranks, experts packed), or devices with more "
            "memory: what cannot be compared is not trained",
        ) from error


def nearest_alternative(plan: AdaptationPlan, grown: int = 0) -> Alternative | None:
    """The fastest feasible alternative that reserves less than the plan, and fits with ``grown`` bytes on top."""
    memory = plan.evidence.cost.memory
    room = min(memory.reserved_bytes - 1, memory.budget_bytes - max(grown, 0))
    smaller = [one for one in plan.evidence.alternatives if one.feasible and one.as_run[1] <= room]
    return min(smaller, key=lambda one: one.as_run, default=None)


def out_of_memory(
    plan: AdaptationPlan,
    device: Device,
    moment: Moment,
    cause: BaseException,
    held: dict[str, int] | None = None,
) -> RunError:
    """The typed error for memory that ran out.

    Args:
        plan: gives the predicted components and the alternatives.
        device: of this rank.
        moment: what was being done.
        cause: the allocator's own error.
        held: component → bytes that this rank holds.
    """
    memory, in_use = plan.evidence.cost.memory, device.peak_memory_bytes()
    usage = compared(memory, moment, held or {}, in_use)
    predicted = memory.by_moment.get(moment, memory.peak_bytes)
    worst = usage[0]
    grown = worst.grown if worst.grown > NOISE * worst.predicted else 0
    grew = (
        f"{worst.name} grew most: {_size(worst.found)} against {_size(worst.predicted)}"
        if grown
        else "no component is above its prediction: the device gave less than the plan's budget"
    )
    return RunError(
        "out-of-memory",
        f"memory ran out in {moment}: {_size(in_use)} were in use, the plan predicted {_size(predicted)}; {grew} "
        f"(found/predicted: {_table(usage)}). {_said(cause)}",
        where=f"device {device.name}, moment {moment}, component {worst.name if grown else 'none'}",
        next_action=_action(plan, grown),
    )


def _said(cause: BaseException) -> str:
    return str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__


def _action(plan: AdaptationPlan, grown: int) -> str:
    other = nearest_alternative(plan, grown)
    if other is None:
        return (
            "no alternative of this plan fits beside this growth: plan again with more ranks or smaller micro-batches"
        )
    step_ms, reserved_bytes = other.as_run
    return (
        f"approve the plan's alternative {other.strategy.text()}: it reserves {_size(reserved_bytes)} and was "
        f"predicted at {step_ms:.4g} ms a step"
    )


def _table(usage: tuple[Usage, ...]) -> str:
    largest = sorted(usage, key=lambda one: -max(one.found, one.predicted))[:SHOWN]
    return ", ".join(f"{one.name} {_size(one.found)}/{_size(one.predicted)}" for one in largest)


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 1 << 27 else f"{count / 2**20:.3g} MiB"
