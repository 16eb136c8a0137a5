"""What a search is about: one checkpoint, one recipe, one cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.search_spaces.cost.routing import Loads
from shardwright.search_spaces.executable import Value, runs
from shardwright.search_spaces.topology import domain_devices


@dataclass(frozen=True)
class SearchContext:
    """The three inputs of every legality rule and axis, and what follows from them.

    ``explore`` also admits values that the runtime does not run; a plan with one is marked.
    """

    profile: CheckpointProfile
    recipe: Recipe
    cluster: ClusterSpec
    explore: bool = False
    loads: Loads = ()
    """Measured share of rows by MoE layer and expert; empty: a stated prior."""
    admitted: tuple[tuple[str, Value], ...] = ()
    """Further (axis, value) pairs to consider beside those that the runtime runs."""
    memo: dict[tuple[object, ...], bool] = field(default_factory=dict, repr=False, compare=False)
    """Which partial choices can be completed; filled by the space."""

    def admits(self, axis: str, value: Value) -> bool:
        """Whether this value is considered: it runs, or exploring admits it."""
        return self.explore or runs(axis, value) or (axis, value) in self.admitted

    @property
    def world(self) -> int:
        return self.cluster.world_size

    @property
    def domain(self) -> int:
        """Devices that reach each other without a network card."""
        return domain_devices(self.cluster)

    @property
    def experts(self) -> int:
        """Experts per MoE layer; 0 for a dense model."""
        return self.profile.shape.num_experts

    @property
    def sequence_tokens(self) -> int:
        return self.recipe.batch.sequence_tokens

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step over all ranks."""
        return self.recipe.batch.global_batch_sequences

    @property
    def adapts_experts(self) -> bool:
        """Whether a LoRA target names the routed experts."""
        return any(
            target == "experts" or "expert" in target.replace("shared_expert", "")
            for target in self.recipe.lora.targets
        )


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def nearest(values: tuple[int, ...], wanted: int, count: int = 3) -> tuple[str, ...]:
    """The legal values closest to the wanted one, as text, nearest first."""
    return tuple(str(v) for v in sorted(values, key=lambda v: (abs(v - wanted), v))[:count])
