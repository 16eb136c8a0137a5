"""Measured slices of docs/k3-slice.md from the newest line of each case: ``python benchmarks/k3_page.py [--write]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lines import RESULTS, ROOT
from render import latest, read_lines

from shardwright.schemas.bench import BenchLine
from shardwright.schemas.files import write_atomic

PAGE = ROOT / "docs" / "k3-slice.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
DEVICE = "NVIDIA H200"
SLICES = ("k3-slice", "k3-gated-dsa-slice", "glm5-slice", "v32-slice")
RATIOS = {
    "kda_fused_ratio": (
        "KDA between its projections",
        "flash-linear-attention's operators",
        "kda_between_ms",
        "kda_fla_between_ms",
    ),
    "kda_layer_ratio": ("KDA layer, projections in it", "the same", "kda_ours_ms", "kda_fla_ms"),
    "kda_op_ratio": ("KDA recurrence alone", "flash-linear-attention's `chunk_kda`", "kda_op_ms", "kda_fla_op_ms"),
    "kda_unfused_ratio": ("KDA layer", "the model's own code", "kda_ours_ms", "kda_unfused_ms"),
    "dsa_fused_ratio": ("gated sparse attention", "the model's own code", "dsa_ours_ms", "dsa_unfused_ms"),
}
"""Metric → what, beside what, ours, the other's."""


def newest(folder: Path = RESULTS) -> dict[str, BenchLine]:
    """Case → its newest line of an H200."""
    found = latest(read_lines(folder))
    return {one.case: one for one in found if one.bench == "k3-slice" and one.device == DEVICE}


def tables(found: dict[str, BenchLine]) -> str:
    """What stands between the page's markers; empty where nothing was measured."""
    slices = [found[f"{name}/h200"] for name in SLICES if f"{name}/h200" in found]
    every = list(found.values())
    parts = [_steps(slices), _kinds(slices, every), _ratios(every), _assembled(found)]
    return "\n\n".join(part for part in parts if part)


def _steps(slices: Sequence[BenchLine]) -> str:
    if not slices:
        return ""
    rows = [
        "| Slice | Layers | Tokens/s | Step | Predicted | Error | Peak | Predicted | Error | Measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in slices:
        m = one.metrics
        time = f"{1e3 * m['step_s']:.0f} ms | {1e3 * m['predicted_step_s']:.0f} ms | {m['time_error_pct']:.1f} %"
        peak, modelled = (one.peak_bytes or 0) / 1e9, m["predicted_peak_bytes"] / 1e9
        memory = f"{peak:.1f} GB | {modelled:.1f} GB | {m['memory_error_pct']:.1f} %"
        case = one.case.removesuffix("/h200")
        rows.append(f"| {case} | {m['layers']:.0f} | {one.ours:,.0f} | {time} | {memory} | {one.date}, {one.device} |")
    return "\n".join(rows)


def _kinds(slices: Sequence[BenchLine], every: Sequence[BenchLine]) -> str:
    """Kinds of layer; what no kernel runs in is from any line of the same slice that was measured without."""
    rows = []
    for one in slices:
        case = one.case.removesuffix("/h200")
        ratios = {
            name: value for other in every if other.case.startswith(case) for name, value in other.metrics.items()
        }
        for name, predicted in one.metrics.items():
            if name.endswith("_predicted_ms"):
                kind = name.removesuffix("_predicted_ms")
                measured, spread = one.metrics[f"{kind}_ms"], one.metrics[f"{kind}_spread_pct"]
                ratio = ratios.get(f"{kind}_unfused_ratio")
                without = "not measured" if ratio is None else f"{ratio:.2f} ×"
                label = kind.replace("_", " ")
                rows.append(f"| {case} | {label} | {measured:.1f} ± {spread:.1f} % | {predicted:.1f} | {without} |")
    if not rows:
        return ""
    head = [
        "| Slice | Kind of layer | Forward, recomputation, backward, ms | Predicted, ms | Without kernels |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows])


def _ratios(lines: Sequence[BenchLine]) -> str:
    metrics: dict[str, float] = {}
    for one in lines:
        metrics |= {name: one.metrics[name] for name in one.metrics if name.startswith(("kda_", "dsa_"))}
    rows = []
    for name, (what, beside, ours, other) in RATIOS.items():
        if name in metrics:
            tokens = f"{metrics[name[:3] + '_tokens']:,.0f}"
            times = f"{metrics[ours]:.2f} | {metrics[other]:.2f}"
            rows.append(f"| {what} | {tokens} | {beside} | {times} | {metrics[name]:.2f} (`{name}`) |")
    if not rows:
        return ""
    head = ["| Layer | Tokens | Beside | Ours, ms | The other's, ms | Ratio |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


def _assembled(found: dict[str, BenchLine]) -> str:
    one = found.get("k3-assembled/h200-128")
    if one is None or one.ours is None:
        return ""
    m = one.metrics
    low, high, modelled = (m[name] / 1e3 for name in ("low_ms", "high_ms", "modelled_step_ms"))
    return (
        f"The step of 128 × H200 (replicas × EP64, 128 sequences of 4,096 tokens) put together from these layers:\n"
        f"{one.ours / 1e3:.2f} s, between {low:.2f} and {high:.2f} s; the cost model alone says {modelled:.2f} s."
    )


def main(arguments: list[str]) -> int:
    text = tables(newest())
    sys.stdout.write(text + "\n")
    if "--write" in arguments:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        middle = f"\n\n{text}\n\n" if text else "\n"
        write_atomic(PAGE, (before + middle + after).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
