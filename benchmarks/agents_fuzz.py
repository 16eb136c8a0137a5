"""A model that proposes everything, and an examiner that the gates do not know."""

from __future__ import annotations

import random
from typing import Any

from agents_model import Opened

SIZES = (5, 19, 40)
TOLERANCE = 1e-8


def illegal_proposals(model: Opened, parts: int) -> tuple[int, int, int]:
    """Propose all open regions and random parts of them; examine what the gates let through.

    Returns:
        How many were proposed, how many accepted, and how many of those are wrong.
    """
    from shardwright.agents.llm.structure_advisor import ProposeArguments

    advisor, draw = model.advisor(), random.Random(7)
    names = list(advisor.regions)
    asked = [ProposeArguments(region=name, nodes=[], reason="all") for name in names]
    for _ in range(parts):
        name = draw.choice(names) if names else ""
        count = len(advisor.regions[name].nodes) if name else 0
        nodes = [f"node-{at}" for at in range(count) if draw.random() < 0.7]
        asked.append(ProposeArguments(region=name, nodes=nodes, reason="a part"))
    for one in asked:
        advisor.propose(one)
    wrong = sum(not examined(match) for match, _ in advisor.advice.matches.values())
    return len(asked), len(advisor.advice.proposals), wrong


def examined(match: Any) -> bool:
    """Whether traced and canonical forms agree in fp64 on sizes and seeds of its own, and nothing inside escapes."""
    import torch

    from shardwright.agents.llm.kernel_writer.task import Task, sizes_of
    from shardwright.agents.llm.meaning import evaluate

    inside = set(match.region.canonical_ids)
    for node in match.region.canonical.nodes:
        read_inside = inside.intersection(node.inputs) - set(match.region.outputs.values())
        if node.id not in inside and read_inside:
            return False
    task = Task.of(match)
    for seed, tokens in enumerate(SIZES):
        values = task.draw(tokens, seed, 2.0)
        try:
            right, _ = task.truth(values, task.cotangents(tokens, seed), tokens)
        except RuntimeError:
            continue
        wide = {match.region.inputs[r]: v.double() if v.is_floating_point() else v for r, v in values.items()}
        seen = evaluate(match.region.op_nodes, wide, sizes_of(tokens))
        for role, node in match.region.outputs.items():
            one, other = seen[node].double(), right[role].double()
            # A part may begin at a root of a drawn negative number: NaN in both, in the same places, agrees.
            if not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                return False
    return True
