"""advise: let a language model look at fusions and plans, where one was asked for; rules need nothing of it."""

from __future__ import annotations

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.workflows.advising import RECORDING
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.environment import tool_versions
from shardwright.workflows.evidence import own_files

NODE = "advise"


def run(context: Context, state: AdaptState) -> Output:
    """Write the advice as an artifact; nothing where no model was asked for.

    Raises:
        LlmUnavailableError: one is required and cannot be used.
    """
    request = context.request.llm
    if request is None:
        return {}
    store = context.store

    def compute() -> Output:
        own = own_files(store, state)
        advice = context.stages.advise(
            context.checkpoint,
            store.get(state["profile"], CheckpointProfile),
            context.recipe(state),
            store.get(state["cluster"], ClusterSpec),
            store.get(state["targets"], tuple[LoraTarget, ...]),
            request,
            context.run_dir / RECORDING,
            *((own,) if own else ()),
        )
        context.tell(NODE, "note", advice.record.text())
        return {"advice": store.put(advice)}

    keys = {name: state[name] for name in ("profile", "cluster", "recipe", "targets")}
    keys |= {"evidence": state["evidence"]} if "evidence" in state else {}
    keys |= {} if context.request.search is None else {"options": sha256_of(context.request.search)}
    return context.once(NODE, {**keys, "llm": sha256_of(request), "torch": tool_versions()["torch"]}, compute)
