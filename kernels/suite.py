"""Verify, then time, all operators on this machine's device, from source.

``PYTHONPATH=src python3 -m shardwright.kernels.suite [--ops OP ...] [--out DIR] [--evidence FILE]``
needs torch, triton and pydantic; exits 1 where anything is wrong, and then times nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwright.kernels.bench import bench_all
from shardwright.kernels.registry import OPERATORS
from shardwright.kernels.verify import VerifyResult, verify_all
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.errors import ShardwrightError


def verify_table(results: Sequence[VerifyResult]) -> str:
    """A line for each operator and dtype, and one for each failure."""
    groups: dict[str, list[VerifyResult]] = {}
    for result in results:
        groups.setdefault(f"{result.op} {result.case.split('/')[0]}", []).append(result)
    lines = []
    for label, members in groups.items():
        worst = max(r.error / r.allowed if r.error is not None and r.allowed else 0.0 for r in members)
        passed = sum(r.ok for r in members)
        lines.append(f"{label}: {passed} of {len(members)} right, worst error {worst:.2f} of what is allowed")
        lines += [
            f"  WRONG {r.case} {r.value}: {r.error}, allowed {r.allowed:.2e}, eager {r.eager_error:.2e} {r.detail}"
            for r in members
            if not r.ok
        ]
    return "\n".join(lines) + "\n"


def bench_table(lines: Sequence[BenchLine]) -> str:
    """A line for each case and pass."""
    return "".join(
        f"{line.case} {line.passes}: ours {line.ours:.4f} {line.unit}, {line.rival} {line.rival_value:.4f}, "
        f"ratio {line.ratio:.2f}, floor {line.floor:.4f} ({(line.ours or 0) / (line.floor or 1):.2f}x) "
        f"{ {k: v for k, v in line.metrics.items()} }\n"
        for line in lines
        if line.ours is not None and line.floor
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Verify and time the fused operators on this device.")
    parser.add_argument("--ops", nargs="*", default=None, choices=tuple(OPERATORS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--evidence", type=Path, default=None)
    parser.add_argument("--verify-only", action="store_true")
    chosen = parser.parse_args(arguments)
    try:
        results = verify_all(chosen.ops, chosen.device)
        sys.stdout.write(verify_table(results))
        sys.stdout.flush()
        if not all(result.ok for result in results):
            return 1
        if not chosen.verify_only:
            sys.stdout.write(bench_table(bench_all(chosen.ops, chosen.out, chosen.evidence)))
    except ShardwrightError as error:
        sys.stderr.write(error.text() + "\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
