"""search: find the parallel strategy for this cluster, with a saved study and an exhaustive oracle beside it."""

from __future__ import annotations

from pydantic import TypeAdapter

from shardwright.schemas.advice import LlmAdvice
from shardwright.schemas.base import Model
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import Alternative, SearchRecord
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.workflows.artifacts import ArtifactStore
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.environment import tool_versions

NODE = "search"


class SearchArtifact(Model):
    """A search's result as it is stored."""

    best: ParallelStrategy
    alternatives: tuple[Alternative, ...]
    record: SearchRecord
    explanation: tuple[str, ...]


def run(context: Context, state: AdaptState) -> Output:
    """Write the search's result as an artifact.

    Raises:
        InfeasibleError: no legal strategy fits, with fused operators or without; the smallest change that would is
            named.
    """
    store, request = context.store, context.request

    def compute() -> Output:
        # A study cut off by a kill would make the result depend on when: start it anew.
        journal = context.run_dir / "search" / "study.journal"
        journal.unlink(missing_ok=True)
        journal.parent.mkdir(parents=True, exist_ok=True)
        result = context.stages.search(
            store.get(state["profile"], CheckpointProfile),
            context.recipe(state),
            store.get(state["cluster"], ClusterSpec),
            store.get(state["targets"], tuple[LoraTarget, ...]),
            request.trials,
            journal,
            progress=lambda done, wanted: context.tell(NODE, "progress", f"{done}/{wanted}"),
            **advised(store, state),
        )
        explanation = TypeAdapter(tuple[str, ...]).validate_python(as_lines(result.explanation))
        artifact = SearchArtifact(
            best=result.best,
            alternatives=result.alternatives,
            record=result.record,
            explanation=explanation,
        )
        return {"search": store.put(artifact)}

    keys = {name: state[name] for name in ("profile", "cluster", "recipe", "targets")}
    keys |= {} if request.search is None else {"options": sha256_of(request.search)}
    keys |= {"advice": state["advice"]} if "advice" in state else {}
    return context.once(NODE, {**keys, "trials": str(request.trials), "optuna": tool_versions()["optuna"]}, compute)


def advised(store: ArtifactStore, state: AdaptState) -> dict[str, tuple[ParallelStrategy, ...]]:
    """Plans that a language model enqueued; nothing where none was asked."""
    starts = store.get(state["advice"], LlmAdvice).starts if "advice" in state else ()
    return {"advised": starts} if starts else {}


def as_lines(explanation: str | tuple[str, ...]) -> tuple[str, ...]:
    """An explanation as lines."""
    return tuple(explanation.splitlines()) if isinstance(explanation, str) else tuple(explanation)
