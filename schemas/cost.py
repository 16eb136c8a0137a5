"""Predicted memory and time of a plan, by term, each with its origin."""

from __future__ import annotations

from typing import Literal

from shardwright.schemas.base import CountInt, Model, NonNegative, PositiveInt
from shardwright.schemas.ops import EvidenceOrigin

Moment = Literal["load", "forward_peak", "loss", "backward_peak", "optimizer_step"]


class MemoryComponent(Model):
    """One term of the memory model on the fullest rank."""

    name: str
    """``frozen_base``, ``gather_buffers``, ``adapter_parameters``, ``adapter_gradients``,
    ``optimizer_state``, ``activations``, ``dispatch_buffers``, ``loss``, ``workspace``, ``runtime_reserve``."""
    bytes: CountInt
    moments: tuple[Moment, ...]
    """When it is alive."""
    formula: str
    origin: EvidenceOrigin


class MemoryReport(Model):
    """Memory of the fullest rank."""

    components: tuple[MemoryComponent, ...]
    by_moment: dict[Moment, CountInt]
    peak_bytes: CountInt
    peak_moment: Moment
    reserved_bytes: CountInt
    """Peak with allocator slack and communicator memory."""
    budget_bytes: PositiveInt

    @property
    def fraction(self) -> float:
        """Reserved over budget."""
        return self.reserved_bytes / self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.reserved_bytes <= self.budget_bytes


class TimeComponent(Model):
    """One term of the step-time model."""

    name: str
    milliseconds: NonNegative
    kind: Literal["compute", "exposed_communication", "hidden_communication", "launch", "optimizer"]
    formula: str
    origin: EvidenceOrigin


class TimeReport(Model):
    """One optimizer step on the slowest rank."""

    components: tuple[TimeComponent, ...]
    step_ms: NonNegative
    """Sum of all components but hidden communication."""
    tokens_per_s: NonNegative
    bound_by: str
    """Name of the largest component."""


class CostReport(Model):
    """What a strategy costs."""

    memory: MemoryReport
    time: TimeReport
    gpu_hours: NonNegative
    money: NonNegative | None = None
    time_to_first_step_s: NonNegative
    feasible: bool
