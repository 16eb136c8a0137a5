"""propose: the gate between what structure found and what may be chosen, and the order reviewers see."""

from __future__ import annotations

from shardwright.schemas.advice import LlmAdvice
from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.graph import OpGraph
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.review.subgraphs import with_subgraph

NODE = "propose"


def run(context: Context, state: AdaptState) -> Output:
    """Write the gated, ordered proposals as an artifact."""
    store = context.store

    def compute() -> Output:
        found = store.get(state["captured"], tuple[FusionProposal, ...])
        if "advice" in state:
            found = (*found, *store.get(state["advice"], LlmAdvice).proposals)
        graph = store.get(state["graph"], OpGraph)
        gated = sorted((gate(with_subgraph(proposal, graph)) for proposal in found), key=order)
        return {"proposals": store.put(tuple(gated))}

    keys = {"captured": state["captured"], "graph": state["graph"]}
    keys |= {"advice": state["advice"]} if "advice" in state else {}
    return context.once(NODE, keys, compute)


def gate(proposal: FusionProposal) -> FusionProposal:
    """Refuse what is not proved: without a legal certificate nothing but eager may be chosen."""
    chosen = next((v for v in proposal.variants if v.name == proposal.chosen), None)
    if chosen is None or chosen.provider == "eager" or proposal.certificate.legal:
        return proposal
    reason = f"refused: {proposal.certificate.refused_because()}"
    return proposal.model_copy(update={"chosen": None, "reason": reason})


def saved_ms(proposal: FusionProposal) -> float:
    """Milliseconds a step saves by the chosen variant over all its instances; 0 where unknown."""
    chosen = next((v for v in proposal.variants if v.name == proposal.chosen), None)
    if chosen is None or chosen.gain is None:
        return 0.0
    return (chosen.gain.eager_ms - chosen.gain.time_ms) * len(proposal.region.modules)


def order(proposal: FusionProposal) -> tuple[bool, float, str]:
    """Chosen ones first, largest saving first, then by id."""
    return proposal.chosen is None, -saved_ms(proposal), proposal.id
