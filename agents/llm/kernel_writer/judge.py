"""The verdict on a written kernel, from files that it wrote in a sandbox.

Outputs and gradients are compared with fp64 on shapes, seeds and spreads that its author never saw, each shape twice
with other values; memory was NaN, inputs must be untouched, and both passes must have launched a kernel. A time below
the floor is not a fast kernel but a wrong measurement.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwright.agents.llm.kernel_writer.sandbox import Limits, run_apart
from shardwright.agents.llm.kernel_writer.screen import screen
from shardwright.agents.llm.kernel_writer.task import Task, Tensors

CASES = ((24, 1.0), (37, 1.0), (24, 3.0), (1, 1.0), (65, 0.1), (37, 8.0))
"""Tokens and spread of each case; two shapes come twice with other values."""

EAGER_ERRORS = 2.0
"""Times the eager path's own error that a kernel may have."""

ROUNDING = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-20}
"""Least error allowed, relative to the largest magnitude: one rounding of the output's format."""

WORKER = "shardwright.agents.llm.kernel_writer.worker"
TIMED_TOKENS = 8192


@dataclass(frozen=True)
class Verdict:
    """What was seen of one candidate."""

    accepted: bool
    because: str
    worst: float = 0.0
    """Largest error over what was allowed."""
    cases: int = 0
    ms: float | None = None
    """Both passes on the device; ``None`` on a CPU."""


def judge(source: str, task: Task, *, seed: int, device: str = "cpu", limits: Limits | None = None) -> Verdict:
    """Screen, run apart, compare.

    Args:
        source: the candidate's text.
        seed: drawn after the text was written.
        device: ``cpu`` runs it in Triton's interpreter.

    Raises:
        LlmError: ``no-sandbox``.
    """
    if wrong := screen(source):
        return Verdict(False, f"screen: {wrong[0]}")
    cases = [*CASES, (TIMED_TOKENS, 1.0)] if device == "cuda" else list(CASES)
    with tempfile.TemporaryDirectory(prefix="kernel-") as name:
        folder = Path(name)
        (folder / "candidate.py").write_text(source)
        drawn = []
        for at, (tokens, spread) in enumerate(cases):
            values, cotangents = task.draw(tokens, seed + 2 * at, spread), task.cotangents(tokens, seed + 2 * at + 1)
            drawn.append((tokens, values, cotangents))
            case = {"inputs": list(values.values()), "cotangents": [cotangents[r] for r in task.outputs]}
            torch.save(case, folder / f"case-{at}.pt")
        bounds = limits or Limits(memory_bytes=None if device == "cuda" else Limits().memory_bytes)
        ended = run_apart(WORKER, [str(folder), device], folder, bounds)
        if ended.timed_out:
            return Verdict(False, f"sandbox: no end within {bounds.seconds:g} s")
        if ended.code != 0:
            return Verdict(False, f"sandbox: exit {ended.code}: {ended.errors.strip().splitlines()[-1:]}"[:300])
        worst = 0.0
        for at, (tokens, values, cotangents) in enumerate(drawn):
            share, because = _compare(folder / f"result-{at}.pt", task, tokens, values, cotangents)
            worst = max(worst, share)
            if because:
                return Verdict(False, f"case {at}, {tokens} tokens: {because}", worst, at + 1)
        timed = folder / "times.json"
        ms = float(json.loads(timed.read_text())["ms"]) if timed.exists() else None
    return Verdict(True, f"{len(cases)} cases within {worst:.2f} of what is allowed", worst, len(cases), ms)


def plausible(verdict: Verdict, floor_ms: float) -> Verdict:
    """Refuse a time that no machine of these rates can reach."""
    if verdict.accepted and verdict.ms is not None and verdict.ms < floor_ms:
        words = f"timing: {verdict.ms:.4f} ms is below the floor of {floor_ms:.4f} ms"
        return Verdict(False, words, verdict.worst, verdict.cases, verdict.ms)
    return verdict


def _compare(path: Path, task: Task, tokens: int, values: Tensors, cotangents: Tensors) -> tuple[float, str]:
    """Largest error over what is allowed, and what is wrong; empty where nothing is."""
    try:
        result = torch.load(path, weights_only=True)
        outputs = dict(zip(task.outputs, result["outputs"], strict=True))
        gradients = dict(zip(task.trained, result["gradients"], strict=True))
    except (OSError, ValueError, KeyError, RuntimeError, EOFError) as error:
        return 0.0, f"no result of the asked form: {type(error).__name__}"
    if not result["untouched"]:
        return 0.0, "an input was changed, or an output shares memory with one"
    if min(result["launches"]) < 1:
        return 0.0, f"launches of forward and backward: {result['launches']}; nothing was computed by a kernel"
    truth, eager = task.truth(values, cotangents, tokens), task.eager(values, cotangents, tokens)
    worst = 0.0
    for kind, seen, right, own in (("", outputs, truth[0], eager[0]), ("gradient of ", gradients, truth[1], eager[1])):
        for role, expected in right.items():
            found, allowed, words = _error(seen[role], expected, own[role])
            worst = max(worst, found / allowed)
            if words or found > allowed:
                return worst, f"{kind}{role}: {words or f'error {found:.1e}, allowed {allowed:.1e}'}"
    return worst, ""


def _error(seen: torch.Tensor, expected: torch.Tensor, eager: torch.Tensor) -> tuple[float, float, str]:
    """Error and allowance relative to the largest expected magnitude."""
    if seen.shape != expected.shape or seen.dtype != eager.dtype:
        return 1.0, 1.0, f"{list(seen.shape)} {seen.dtype} where {list(expected.shape)} {eager.dtype} is due"
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    scale = scale or 1.0
    least = ROUNDING.get(str(eager.dtype).removeprefix("torch."), 2**-20)
    own = float((eager.double() - expected).abs().max()) / scale if expected.numel() else 0.0
    found = float((seen.double() - expected).abs().max()) / scale if expected.numel() else 0.0
    if found != found:
        return 1.0, 1.0, "NaN where a number is due"
    return found, max(EAGER_ERRORS * own, least), ""
