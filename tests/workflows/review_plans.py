"""Plans for tests of the review page: many proposals, drawn regions, and texts that try to be markup."""

from __future__ import annotations

import workflow_fakes as fakes

from shardwright.schemas.fusion import FusionProposal, RegionNode
from shardwright.schemas.plan import AdaptationPlan, DataPin
from shardwright.schemas.recipe import BatchSpec, DataSpec, Recipe
from shardwright.workflows.certifying import certify
from shardwright.workflows.nodes.propose import gate
from shardwright.workflows.planning import Inputs, assemble

EVIL = '<script>window.pwned=1</script><img src=x onerror="window.pwned=1">{{7*7}}\'"'


def region(nodes: int) -> tuple[RegionNode, ...]:
    """A chain of operations with a parameter at every fifth."""
    found = [RegionNode(id="x", kind="input", label="hidden_states", output="[24, 64] bfloat16")]
    last = "x"
    while len(found) < nodes:
        number = len(found)
        if number % 5 == 0 and len(found) < nodes - 1:
            found.append(
                RegionNode(id=f"p{number}", kind="parameter", label="model.norm.weight", output="[64] float32")
            )
        inputs = (last, found[-1].id) if found[-1].kind == "parameter" else (last,)
        found.append(RegionNode(id=f"n{number}", kind="op", label="mul", inputs=inputs, source="modeling.py:1"))
        last = found[-1].id
    return tuple(found[:nodes])


def many(count: int = 32, nodes: int = 8, evil: str = "") -> tuple[FusionProposal, ...]:
    """Proved proposals; every second runs by a kernel, the others have only the eager way."""
    made = []
    for index in range(count):
        item = fakes.proposal(f"norm.{index:02d}", "proved")
        update: dict[str, object] = {"subgraph": region(nodes)}
        if index % 2:
            update |= {"chosen": "eager", "variants": item.variants[1:], "reason": "eager: nothing else applies"}
        if evil:
            node = RegionNode(id=evil, kind="parameter", label=evil, output=evil, source=evil)
            certificate = item.certificate.model_copy(
                update={
                    "source_lines": (evil,),
                    "bound_constants": {evil: evil},
                    "obligations": tuple(o.model_copy(update={"evidence": evil}) for o in item.certificate.obligations),
                }
            )
            update |= {
                "title": evil,
                "reason": evil,
                "certificate": certificate,
                "subgraph": (*region(nodes), node),
                "region": item.region.model_copy(update={"modules": (evil,), "roles": {evil: evil}}),
            }
        made.append(item.model_copy(update=update))
    return tuple(made)


def plan_of(proposals: tuple[FusionProposal, ...], evil: str = "") -> AdaptationPlan:
    """A sealed plan with these proposals."""
    recipe = Recipe(
        name=evil or "fake", data=DataSpec(train="a", held_out="b"), batch=BatchSpec(global_batch_sequences=4)
    )
    found, cluster, stages = fakes.searched(), fakes.cluster_spec(), fakes.fake_stages()
    gated = tuple(map(gate, proposals))
    joined = certify(stages, fakes.profile(), recipe, cluster, (fakes.target(),), gated, found.best)
    pins = DataPin(train_sha256=fakes.H, held_out_sha256=fakes.H)
    inputs = Inputs(
        fakes.profile(), recipe, cluster, fakes.cluster_ref(cluster), (fakes.target(),), pins, fakes.structured().graph
    )
    explanation = (evil,) if evil else found.explanation
    return assemble(inputs, joined, found.alternatives, found.record, explanation)
