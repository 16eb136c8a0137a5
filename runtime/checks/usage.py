"""Memory in use on this rank, by the names of the plan's memory model.

What lives in named tensors is counted; what is left of the device's peak (activations, gathered weights, the loss,
workspace, on a CPU the process itself) can only be compared as one sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from shardwright.runtime.ownership import Owned
from shardwright.schemas.cost import MemoryReport, Moment

REST = "the rest"


@dataclass(frozen=True)
class Usage:
    """One component beside its prediction, bytes."""

    name: str
    predicted: int
    found: int

    @property
    def grown(self) -> int:
        return self.found - self.predicted


def held_bytes(
    model: nn.Module, parameters: dict[str, Owned], states: Iterable[dict[str, Tensor]] = ()
) -> dict[str, int]:
    """Component → bytes of this rank's tensors; each storage counts once.

    Args:
        model: its buffers count as ``buffers``.
        parameters: of the model as this rank holds them.
        states: the optimizer's, one mapping for each adapter.
    """
    held = dict.fromkeys(("frozen_base", "buffers", "adapter_parameters", "adapter_gradients", "optimizer_state"), 0)
    seen: set[int] = set()

    def add(component: str, value: Tensor | None) -> None:
        if value is None or value.is_meta or not value.numel() or value.untyped_storage().data_ptr() in seen:
            return
        seen.add(value.untyped_storage().data_ptr())
        held[component] += value.untyped_storage().nbytes()

    for owned in parameters.values():
        add("adapter_parameters" if owned.adapter else "frozen_base", owned.local())
        if owned.adapter:
            add("adapter_gradients", owned.local_grad())
    for buffer in model.buffers():
        add("buffers", buffer)
    for state in states:
        for value in state.values():
            add("optimizer_state", value)
    return held


def compared(memory: MemoryReport, moment: Moment, held: dict[str, int], in_use: int) -> tuple[Usage, ...]:
    """Every component that is alive in a moment, the most grown first; uncounted ones are one entry.

    Args:
        held: of :func:`held_bytes`; empty where nothing could be counted yet.
        in_use: the device's peak, bytes.
    """
    alive = {one.name: one.bytes for one in memory.components if moment in one.moments}
    named = [Usage(name, alive.pop(name, 0), found) for name, found in held.items() if found or name in alive]
    rest = in_use - sum(one.found for one in named)
    largest = sorted(alive, key=lambda name: -alive[name])[:3]
    label = f"{REST} ({', '.join(largest)})" if largest else REST
    found = [*named, Usage(label, sum(alive.values()), max(rest, 0))]
    return tuple(sorted(found, key=lambda one: -one.grown))
