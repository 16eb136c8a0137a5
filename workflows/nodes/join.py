"""join: re-certify the fusions for the best meshes, choose the fastest as run, and seal the plan."""

from __future__ import annotations

from shardwright.schemas.advice import LlmAdvice
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.graph import OpGraph
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import DataPin, EvidenceFile
from shardwright.schemas.profile import CheckpointProfile, WeightsPin
from shardwright.workflows.choosing import choose
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.environment import tool_versions, worker_environment
from shardwright.workflows.nodes.search import SearchArtifact
from shardwright.workflows.planning import Inputs, assemble
from shardwright.workflows.remote_code import pinned_code
from shardwright.workflows.search_options import options_of, with_calibration, with_loads

NODE = "join"
INPUTS = {
    "profile",
    "recipe",
    "cluster",
    "targets",
    "data",
    "graph",
    "proposals",
    "search",
    "advice",
    "evidence",
    "weights",
}


def run(context: Context, state: AdaptState) -> Output:
    """Write ``plan.json``.

    Raises:
        LegalityError: what the search found is not what the join can certify.
        InfeasibleError: nothing fits, fused operators counted.
    """
    store, stages = context.store, context.stages
    cluster = store.get(state["cluster"], ClusterSpec)

    def compute() -> Output:
        profile = store.get(state["profile"], CheckpointProfile)
        found = store.get(state["search"], SearchArtifact)
        inputs = Inputs(
            profile=profile,
            recipe=context.recipe(state),
            cluster=cluster,
            cluster_ref=stages.cluster_ref(cluster),
            targets=store.get(state["targets"], tuple[LoraTarget, ...]),
            data=store.get(state["data"], DataPin),
            graph=store.get(state["graph"], OpGraph),
            weights=store.get(state["weights"], WeightsPin) if "weights" in state else None,
            evidence=store.get(state["evidence"], tuple[EvidenceFile, ...]) if "evidence" in state else (),
            remote_code=pinned_code(context.checkpoint, context.request.trust_remote_code),
        )
        proposals = store.get(state["proposals"], tuple[FusionProposal, ...])
        chosen = choose(
            stages,
            inputs,
            proposals,
            found.best,
            found.alternatives,
            found.record,
            found.explanation,
        )
        advice = store.get(state["advice"], LlmAdvice).record if "advice" in state else None
        plan = assemble(inputs, chosen.joined, chosen.alternatives, chosen.record, chosen.explanation, advice)
        options = options_of(context.request.search)
        plan = with_loads(with_calibration(plan, options.calibration), options.loads)
        return {"plan": context.keep_plan(plan)}

    keys = {name: value for name, value in sorted(state.items()) if name in INPUTS and isinstance(value, str)}
    keys |= {} if context.request.search is None else {"options": sha256_of(context.request.search)}
    outputs = context.once(NODE, {**keys, **tool_versions(), **worker_environment(cluster)}, compute)
    # A review may already have put a child plan here: only the first join writes.
    if not context.plan_file.exists():
        context.plan(outputs["plan"]).save(context.plan_file)
    return outputs
