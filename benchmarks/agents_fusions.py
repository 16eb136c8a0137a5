"""Fusions that nobody wrote: found in captured graphs, proposed, certified, compiled, measured beside eager.

A script plays the model: it proposes the open regions that waste most, through the agent's own tools and gates. What
is accepted is compiled by torch.compile and compared with eager on this device: errors of outputs and gradients in
fp64 terms, then medians of forward + backward with fresh inputs.

Legend: T tokens a sequence (batch of 2).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from agents_model import opened
from lines import line

from shardwright.schemas.bench import BenchLine

WIDTHS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    "deepseek_v4": {"hidden_size": 4096},
}
"""Published widths of what the regions compute on; experts and depth stay tiny."""

TOKENS = {"cuda": {"gpt_oss": 2048, "deepseek_v4": 4096}, "cpu": {"gpt_oss": 40, "deepseek_v4": 40}}
H200_BYTES_PER_MS = 4.3e9
"""Reached by a copy on one H200."""
REGIONS = 4
"""Distinct regions a family that are taken further."""


def new_fusions(device: str) -> list[BenchLine]:
    """One line for each accepted region, and a last one with their number."""
    made = []
    for family in WIDTHS:
        with tempfile.TemporaryDirectory() as folder:
            model = opened(family, Path(folder), **WIDTHS[family])
        for at, (match, region, proposal) in enumerate(accepted(model)):
            fields = measured(match, device, TOKENS[device][family])
            fields["metrics"] |= {
                "launches_eager": region.launches,
                "modelled_speedup": next(v.gain.speedup for v in proposal.variants if v.provider == "compile"),
                "places": len(match.modules()),
            }
            operators = sorted({node.target for node in region.op_nodes})
            sys.stderr.write(f"{family} {at + 1}: {', '.join(operators)}: {fields}\n")
            fields |= {"case": f"agents/new-fusions/{family}-{at + 1}", "bench": "agents", "passes": "fwd+bwd"}
            made.append(line(fields))
    total = {"bench": "agents", "case": "agents/new-fusions", "passes": "-", "unit": "accepted", "ours": len(made)}
    return [*made, line(total | {"metrics": {"accepted": len(made)}})]


def accepted(model: Any) -> list[tuple[Any, Any, Any]]:
    """Propose every open region through the agent's tool; the first of each kind that is accepted."""
    from shardwright.agents.llm.reply import ToolCall

    advisor = model.advisor()
    box, kinds, found = advisor.toolbox(), set(), []
    for name, region in advisor.regions.items():
        kind = tuple(sorted(node.target for node in region.op_nodes))
        if kind in kinds or len(found) == REGIONS:
            continue
        call = ToolCall("scripted", "propose_region", f'{{"region": "{name}", "nodes": [], "reason": "waste"}}')
        result, _ = box.call(call)
        if result.get("result") == "accepted":
            kinds.add(kind)
            proposal = advisor.advice.proposals[-1]
            found.append((*advisor.advice.matches[proposal.id], proposal))
    return found


def measured(match: Any, device: str, tokens: int) -> dict[str, Any]:
    """Errors against fp64 at a small size, then times of both at the large one."""
    from shardwright.agents.llm.kernel_writer.compiled import compile_region
    from shardwright.agents.llm.kernel_writer.task import Task

    seen = compile_region(Task.of(match), device, tokens)
    return {
        "unit": "ms",
        "ours": round(seen.ms, 5),
        "rival": "eager",
        "rival_value": round(seen.eager_ms, 5),
        "floor": round(seen.floor_bytes / H200_BYTES_PER_MS, 5) if device == "cuda" else None,
        "metrics": {"tokens": 2 * tokens, "error_over_eager": seen.over_eager, "compiled_error": seen.error},
    }
