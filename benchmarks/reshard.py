"""Resume on half of the ranks: ``python benchmarks/reshard.py`` runs the reshard test and keeps what it measured.

ep 4 → ep 2 and FSDP 4 → FSDP 2 on gloo ranks: the difference of the loss at the first step after the change of mesh and
twenty steps later, against a run that never changed it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
TEST = "tests/runtime/test_reshard.py"
MEASURED = re.compile(r"(\w+): first step (\S+), after 20 steps (\S+)")


def main() -> int:
    """Add the line to ``benchmarks/results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    from lines import append, line

    words = [sys.executable, "-m", "pytest", TEST, "-q", "-s"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    found = MEASURED.findall(done.stdout)
    if done.returncode or len(found) != 2:
        sys.stderr.write(done.stdout[-3000:] + done.stderr[-2000:])
        return 1
    metrics = {
        "first_step_diff": max(float(first) for _, first, _ in found),
        "after_20_diff": max(float(last) for _, _, last in found),
    }
    append([line({"bench": "resume", "case": "resume/reshard", "unit": "loss", "metrics": metrics})])
    sys.stdout.write(f"{metrics}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
