"""Every mixture-of-experts family of the installed transformers, and this project's own, through the structure stage.

``python benchmarks/families.py`` runs all families and rewrites ``benchmarks/families.json`` and ``docs/families.md``;
with names, only those rows are renewed; with ``--render``, only the page. Each family runs in a process of its own
under a time limit.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from families_own import OWN
from families_page import render
from families_row import row_of
from families_tiny import moe_families

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "families.json"
PAGE = ROOT / "docs" / "families.md"
SECONDS = 600
WARM = "mixtral"


def _child(family: str, folder: str, out: str) -> None:
    row: dict[str, Any] = {"family": family, "profile": "no", "capture": "no"}
    try:
        row = row_of(family, Path(folder))
    except Exception as error:  # noqa: BLE001 - a family that breaks the run is a row, and the page shows it
        row["capture_reason"] = f"{type(error).__name__}: {error}"[:240]
    Path(out).write_text(json.dumps(row))


def run(family: str) -> dict[str, Any]:
    """One family's row, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, out = Path(folder) / "checkpoint", Path(folder) / "row.json"
        checkpoint.mkdir()
        process = multiprocessing.get_context("fork").Process(target=_child, args=(family, str(checkpoint), str(out)))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if out.exists():
            row: dict[str, Any] = json.loads(out.read_text())
            return row
        why = f"the process ended with {process.exitcode} or ran past {SECONDS} s"
        return {"family": family, "profile": "no", "capture": "no", "capture_reason": why}


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


def main(arguments: list[str]) -> None:
    import torch

    recorded: dict[str, Any] = json.loads(ROWS.read_text()) if ROWS.exists() else {"rows": {}}
    if arguments != ["--render"]:
        torch.set_num_threads(1)
        families = arguments or [*moe_families(), *OWN]
        with tempfile.TemporaryDirectory() as folder:
            row_of(WARM, Path(folder))
        rows = {} if not arguments else recorded["rows"]
        for family in families:
            rows[family] = run(family)
            recorded = {**versions(), "rows": dict(sorted(rows.items()))}
            ROWS.write_text(json.dumps(recorded, indent=1) + "\n")
    PAGE.write_text(render(recorded))


if __name__ == "__main__":
    main(sys.argv[1:])
