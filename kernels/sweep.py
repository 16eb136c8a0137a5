"""Try launch configurations on a device: ``python -m shardwright.kernels.sweep OP [--hidden H ...]``.

Every configuration is checked against fp64 with poisoned outputs before it is timed. The table is
for choosing what ``configs.py`` ships; workers never tune.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton import OutOfResources

from shardwright.kernels.cases import SweepCase
from shardwright.kernels.launch import Launch
from shardwright.kernels.registry import OPERATORS, operator
from shardwright.kernels.timing import median_ms

BF16_ERROR = 5e-3
"""Largest relative error of a bf16 result against fp64: rounding alone gives 1.7e-3 to 3e-3."""


@dataclass(frozen=True)
class SweepRow:
    launch: Launch
    ms: float | None
    error: float
    remark: str = ""


def sweep(case: SweepCase, H: int, device: str = "cuda", seed: int = 0) -> list[SweepRow]:
    """Check and time all candidates in bf16, fastest first; wrong ones last."""
    run, outputs = case.prepare(H, torch.bfloat16, device, seed)
    rows = []
    for launch in case.candidates(H):
        for produced, _ in outputs:
            produced.fill_(float("nan"))
        try:
            run(launch)
        except OutOfResources as error:
            rows.append(SweepRow(launch, None, float("inf"), str(error)[:60]))
            continue
        worst = max(relative_error(produced[-exact.shape[0] :], exact) for produced, exact in outputs)
        whole = all(bool(torch.isfinite(produced).all()) for produced, _ in outputs)
        if not whole or not worst <= BF16_ERROR:
            rows.append(SweepRow(launch, None, worst, "wrong"))
            continue
        rows.append(SweepRow(launch, median_ms(lambda at=launch: run(at), warmup_ms=10, repeat_ms=40), worst))  # type: ignore[misc]
    return sorted(rows, key=lambda row: (row.ms is None, row.ms or 0.0))


def relative_error(produced: torch.Tensor, exact: torch.Tensor) -> float:
    """``‖produced - exact‖ / ‖exact‖``; NaN where anything is NaN."""
    return float((produced.double() - exact).norm() / exact.norm())


def table(op: str, H: int, case: SweepCase, rows: list[SweepRow], most: int) -> str:
    """The fastest ``most`` rows and every refused one."""
    lines = [f"{op} {case.name} H {H}: {len(rows)} configurations"]
    for row in [*rows[:most], *[r for r in rows[most:] if r.ms is None]]:
        timed = "-" if row.ms is None else f"{row.ms:.4f} ms {case.floor_bytes / row.ms / 1e9:.2f} TB/s"
        at = row.launch
        lines.append(
            f"  rows {at.rows} warps {at.warps} stages {at.stages} programs {at.programs_per_sm} reload {at.reload}: "
            f"{timed} error {row.error:.1e} {row.remark}"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time launch configurations of one operator on this device.")
    parser.add_argument("op", choices=tuple(OPERATORS))
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168])
    parser.add_argument("--passes", nargs="+", default=["fwd", "bwd"])
    parser.add_argument("--most", type=int, default=5)
    chosen = parser.parse_args(arguments)
    suite = operator(chosen.op).load_suite()
    for H in chosen.hidden:
        for case in suite.sweep:
            if case.name in chosen.passes:
                sys.stdout.write(table(suite.op, H, case, sweep(case, H), chosen.most))
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
