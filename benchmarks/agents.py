"""How good the agents are: rules alone, hostile suggestions, cheating kernels, and fusions that nobody wrote.

    python benchmarks/agents.py rules [--families F ...]
    python benchmarks/agents.py cheating-kernels
    python benchmarks/agents.py new-fusions [--device cuda]
    python benchmarks/agents.py compare [--endpoint NAME=MODEL@URL ...] [--real] [--families F ...]
    python benchmarks/agents.py real-model

``rules`` labels regions by module classes, which the patterns never look at, and then plays a model that proposes
everything: all open regions, and seeded random parts of them. ``compare`` puts any OpenAI-compatible servers beside
that, and ``--real`` the small model of ``real-model``, which must be installed. Lines go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents_model import FAMILIES, Opened, opened
from agents_real import real_model
from lines import append, line
from written_kernels.cheats import CHEATS, HONEST

PARTS = 12
"""Random parts of open regions that the played model proposes, a family."""


def rules(families: Sequence[str]) -> dict[str, float]:
    """Recall of labelled regions by rules alone, and what got through the gates that should not have."""
    from agents_fuzz import illegal_proposals
    from agents_labels import labels_of

    labelled = found = proposed = accepted = illegal = 0
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            model = opened(family, Path(folder))
            wanted = labels_of(model.model)
            seen = {(m.pattern.name, place) for m in model.matches for place in model.places(m)}
            labelled += len(wanted)
            found += len(wanted & seen)
            for name, place in sorted(wanted - seen):
                sys.stderr.write(f"{family}: missed {name} at {place}\n")
            one = illegal_proposals(model, PARTS)
            proposed, accepted, illegal = proposed + one[0], accepted + one[1], illegal + one[2]
        sys.stderr.write(f"{family}: {len(wanted & seen)} of {len(wanted)}; {one[1]} of {one[0]} proposals accepted\n")
    return {
        "region_recall": found / labelled,
        "labelled": labelled,
        "proposed": proposed,
        "accepted": accepted,
        "illegal_after_gates": illegal,
        "families": len(families),
    }


def cheating_kernels() -> dict[str, float]:
    """Every written kernel through the judge: the honest one must pass, no other may."""
    from shardwright.agents.llm.kernel_writer.judge import judge
    from shardwright.agents.llm.kernel_writer.sandbox import Limits
    from shardwright.agents.llm.kernel_writer.task import Task
    from shardwright.agents.llm.kernel_writer.writer import seed_of

    with tempfile.TemporaryDirectory() as folder:
        task = Task.of(sink_scores(opened("gpt_oss", Path(folder))))
    sources = {"honest": HONEST} | {name: cheat.source() for name, cheat in CHEATS.items()}
    passed = []
    for name, source in sources.items():
        verdict = judge(source, task, seed=seed_of(source), limits=Limits(seconds=60, memory_bytes=6 << 30))
        passed += [name] if verdict.accepted else []
        sys.stderr.write(f"{name}: {'accepted' if verdict.accepted else verdict.because}\n")
    cheated = [name for name in passed if name != "honest"]
    return {"accepted": len(cheated), "honest_accepted": float("honest" in passed), "cheats": len(CHEATS)}


def sink_scores(model: Opened) -> Any:
    """Scale, mask and sink column of gpt_oss's attention, as a match."""
    from shardwright.agents.llm.proposed import as_match

    for region in model.regions:
        part = region.part([node.id for node in region.op_nodes if node.target in ("mul", "add", "cat")])
        if {n.target for n in part.op_nodes} == {"mul", "add", "cat"} and "softmax" in {
            n.target for n in region.op_nodes
        }:
            return as_match(part)
    raise SystemExit("gpt_oss has no open region with scale, mask and sink")


def comparison(words: Sequence[str], families: Sequence[str], *, real: bool) -> None:
    """Compare endpoints; write the table and one line each."""
    from contextlib import ExitStack

    import agents_compare
    from agents_real import LIMITS, MODEL, served_model

    from shardwright.workflows.llm_options import llm_options

    with ExitStack() as stack:
        asked = agents_compare.endpoints_of(words)
        if real:
            asked["smollm2"] = (MODEL, stack.enter_context(served_model()))
        scores = agents_compare.compare(asked, families, llm_options(None, LIMITS).limits if real else None)
    sys.stdout.write(f"{agents_compare.table(scores)}\n")
    append(agents_compare.lines(scores))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Score the agents.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("rules", "cheating-kernels", "new-fusions", "compare", "real-model"):
        command = commands.add_parser(name)
        command.add_argument("--families", nargs="*", default=list(FAMILIES))
        if name == "new-fusions":
            command.add_argument("--device", default="cpu")
        if name == "compare":
            command.add_argument("--endpoint", action="append", default=[])
            command.add_argument("--real", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.command == "new-fusions":
        from agents_fusions import new_fusions

        append(new_fusions(chosen.device))
        return 0
    if chosen.command == "compare":
        comparison(chosen.endpoint, chosen.families, real=chosen.real)
        return 0
    metrics = {
        "rules": lambda: rules(chosen.families),
        "cheating-kernels": cheating_kernels,
        "real-model": real_model,
    }[chosen.command]()
    unit = "share" if chosen.command == "rules" else "accepted"
    value = metrics["region_recall"] if chosen.command == "rules" else metrics["accepted"]
    made = line(
        {
            "bench": "agents",
            "case": f"agents/{chosen.command}",
            "passes": "-",
            "unit": unit,
            "ours": value,
            "metrics": metrics,
        }
    )
    append([made])
    sys.stdout.write(f"{metrics}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
