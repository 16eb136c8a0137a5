"""What a search is about: one checkpoint, one recipe, one cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe


@dataclass(frozen=True)
class SearchContext:
    """The three inputs of every legality rule and axis, and what follows from them.

    ``explore`` also admits values that the runtime does not run; a plan with one is marked.
    """

    profile: CheckpointProfile
    recipe: Recipe
    cluster: ClusterSpec
    explore: bool = False
    memo: dict[tuple[object, ...], bool] = field(default_factory=dict, repr=False, compare=False)
    """Which partial choices can be completed; filled by the space."""

    @property
    def world(self) -> int:
        return self.cluster.world_size

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
