"""Fusions that nobody wrote: found in captured graphs, proposed, certified, compiled, measured beside eager.

A script plays the model: it proposes the open regions that waste most, through the agent's own tools and gates. What
is accepted is compiled by torch.compile and compared with eager on this device: errors of outputs and gradients in
fp64 terms, then medians of forward + backward with fresh inputs.

Legend: T tokens a sequence (batch of 2).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from agents_model import opened
from lines import line

from shardwright.schemas.bench import BenchLine

WIDTHS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    "deepseek_v4": {"hidden_size": 4096},
}
"""Published widths of what the regions compute on; experts and depth stay tiny."""

TOKENS = {"cuda": {"gpt_oss": 2048, "deepseek_v4": 4096}, "cpu": {"gpt_oss": 40, "deepseek_v4": 40}}
CHECKED_TOKENS = 65
REGIONS = 4
"""Distinct regions a family that are taken further."""

CALLS = 20


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
    from shardwright.agents.llm.kernel_writer.task import SizedRegion, Task, sizes_of

    task = Task.of(match)
    errors = [compared(task, device, seed) for seed in (1, 2)]
    region = SizedRegion(task.region, sizes_of(tokens))
    compiled: Callable[..., Any] = torch.compile(lambda *values: tuple(_call(region, task, values)), dynamic=False)
    values = [v.to(device).requires_grad_(r in task.trained) for r, v in task.draw(tokens, 3).items()]
    given = [v.to(device) for v in task.cotangents(tokens, 4).values()]
    ways = {"compile": compiled, "eager": lambda *v: tuple(_call(region, task, v))}
    times = {name: timed(way, values, given, device) for name, way in ways.items()}
    moved = sum(v.numel() * v.element_size() for v in (*values, *given))
    return {
        "unit": "ms",
        "ours": round(times["compile"], 5),
        "rival": "eager",
        "rival_value": round(times["eager"], 5),
        "floor": round(3 * moved / 4.3e9, 5) if device == "cuda" else None,
        "metrics": {
            "tokens": 2 * tokens,
            "error_over_eager": max(error for error, _ in errors),
            "compiled_error": max(error for _, error in errors),
        },
    }


def _call(region: Any, task: Any, values: Any) -> list[torch.Tensor]:
    results = region(dict(zip(task.inputs, values, strict=True)))
    return [results[role] for role in task.outputs]


def compared(task: Any, device: str, seed: int) -> tuple[float, float]:
    """Largest error of the compiled region over eager's (at least one rounding), and that error itself."""
    from shardwright.agents.llm.kernel_writer.judge import ROUNDING
    from shardwright.agents.llm.kernel_writer.task import SizedRegion, sizes_of

    values, given = task.draw(CHECKED_TOKENS, seed), task.cotangents(CHECKED_TOKENS, seed)
    truth = task.truth(values, given, CHECKED_TOKENS)
    region = SizedRegion(task.region, sizes_of(CHECKED_TOKENS))
    compiled = torch.compile(region, dynamic=False)
    worst, largest = 0.0, 0.0
    on = {r: v.to(device) for r, v in values.items()}, {r: v.to(device) for r, v in given.items()}
    ours, eager = (task.both(way, *on) for way in (compiled, region))
    for part in (0, 1):
        for role, right in truth[part].items():
            scale = float(right.abs().max()) or 1.0
            errors = [float((way[part][role].cpu().double() - right).abs().max()) / scale for way in (ours, eager)]
            least = ROUNDING.get(str(eager[part][role].dtype).removeprefix("torch."), 2**-20)
            worst, largest = max(worst, errors[0] / max(errors[1], least)), max(largest, errors[0])
    return round(worst, 4), largest


def timed(way: Callable[..., Any], values: list[torch.Tensor], given: list[torch.Tensor], device: str) -> float:
    """Median milliseconds of forward and backward; inputs change between calls."""
    import time

    trained = [v for v in values if v.requires_grad]
    found = []
    for at in range(CALLS + 5):
        with torch.no_grad():
            for value in trained:
                value.mul_(1.0009765625)
        _wait(device)
        start = time.perf_counter()
        results = way(*values)
        grown = [(r, g) for r, g in zip(results, given, strict=True) if r.requires_grad]
        torch.autograd.grad([r for r, _ in grown], trained, [g for _, g in grown], allow_unused=True)
        _wait(device)
        if at >= 5:
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
