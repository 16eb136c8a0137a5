"""structure: capture one layer of each kind and match fusion patterns, with certificates."""

from __future__ import annotations

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.profile import CheckpointProfile
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.environment import tool_versions
from shardwright.workflows.evidence import own_files

NODE = "structure"


def run(context: Context, state: AdaptState) -> Output:
    """Write the graph and the proposals as artifacts."""
    store = context.store

    def compute() -> Output:
        own = own_files(store, state)
        result = context.stages.structure(
            context.checkpoint,
            store.get(state["profile"], CheckpointProfile),
            store.get(state["cluster"], ClusterSpec),
            context.recipe(state),
            *((own,) if own else ()),
        )
        return {"graph": store.put(result.graph), "captured": store.put(result.proposals)}

    versions = {name: tool_versions()[name] for name in ("torch", "transformers")}
    keys = {name: state[name] for name in ("profile", "cluster", "recipe")}
    keys |= {"evidence": state["evidence"]} if "evidence" in state else {}
    return context.once_here(NODE, {**keys, **versions}, compute)
