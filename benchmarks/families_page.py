"""The page of families: one line each, the bars, and every cell that fails with its reason."""

from __future__ import annotations

from typing import Any

from shardwright.checkpoints.models.registry import OWN_MODELS

HEAD = """# Model families

Written by `python benchmarks/families.py` from a run over every mixture-of-experts family that transformers
{transformers} ships with modelling code (torch {torch}), and over this project's own classes
({own}); do not edit.

For each family a tiny checkpoint (a few layers, the family's own class and configuration) is written, profiled from
its headers, captured on meta, matched and certified. *Profile* is exact when the headers give the model's own number
of parameters. *Capture* is yes when every kind of layer became a graph. *Experts* is proved when the block's
arithmetic was matched and all obligations hold, one node when the block was found but its inside has no pattern.
*Legal* counts proposals whose certificate proves every obligation; *refused* counts the reasons for which others are
not offered.
"""

PATTERNS = "Legal regions by pattern, *n of m* where some are refused; each kind of layer counts a region once."


def render(recorded: dict[str, Any]) -> str:
    """The page as text."""
    rows = list(recorded["rows"].values())
    note = [recorded["note"], ""] if recorded.get("note") else []
    lines = [
        HEAD.format(**recorded, own=own_classes(rows)),
        *note,
        "## Summary",
        "",
        "| Bar | Families |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {count} of {len(rows)} |" for name, count in bars(rows).items()]
    lines += ["", "## Families", ""]
    lines += ["| Family | Profile | Capture | Experts | Norms | Activations | Legal | Refused |", "| --- " * 8 + "|"]
    for row in rows:
        certified = "legal" in row
        legal, refused = (sum(row["legal"].values()), len(row["refused"])) if certified else ("-", "-")
        cells = [row["family"], row["profile"], row["capture"], row.get("experts", "-")]
        cells += [row.get("norms", "-"), row.get("activations", "-"), legal, refused]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    lines += ["", "## Patterns", "", PATTERNS, "", *_patterns(rows)]
    lines += ["", "## Cells that fail, and why", ""]
    for row in rows:
        lines += [f"- **{row['family']}**, {cell}: {_plain(why)}" for cell, why in _failing(row)]
    return "\n".join(lines) + "\n"


def own_classes(rows: list[dict[str, Any]]) -> str:
    """The classes of the registry of our own models that rows were made with, each with its rows."""
    named = {model.model_path.rpartition(":")[2] for model in OWN_MODELS.values()}
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.get("class") in named:
            found.setdefault(row["class"], []).append(row["family"])
    return "; ".join(f"{name}: {', '.join(families)}" for name, families in sorted(found.items())) or "none in this run"


def _patterns(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each family, one column for each pattern that some family has."""
    names = sorted({name for row in rows for name in row.get("found", {})})
    lines = [f"| Family | {' | '.join(name.replace('_', ' ') for name in names)} |", "| --- " * (1 + len(names)) + "|"]
    for row in (row for row in rows if "found" in row):
        cells = []
        for name in names:
            found, legal = row["found"].get(name, 0), row["legal"].get(name, 0)
            cells.append("" if not found else str(legal) if legal == found else f"{legal} of {found}")
        lines.append(f"| {row['family']} | {' | '.join(cells)} |")
    return lines


def bars(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many families reach each bar."""
    captured = [row for row in rows if row["capture"] == "yes"]
    whole = [r for r in captured if r["experts"] != "no" and r["norms"] and r["activations"]]
    return {
        "profiled exactly": sum(row["profile"] == "exact" for row in rows),
        "captured": len(captured),
        "captured, with experts block, norms and activation found": len(whole),
        "experts block proved": sum(row.get("experts") == "proved" for row in rows),
        "with a match refused by the differential test": sum(row.get("failed_differential", 0) > 0 for row in rows),
    }


def _failing(row: dict[str, Any]) -> list[tuple[str, str]]:
    cells = []
    if row["profile"] != "exact":
        cells.append(("profile", row.get("profile_reason", row.get("capture_reason", ""))))
    if row["capture"] != "yes":
        cells.append(("capture", row.get("capture_reason", "")))
    for kind, why in row.get("lost", {}).items():
        if kind.endswith("/experts"):
            cells.append(("inside the experts", why))
    return cells + [(f"refused {name}", why) for name, why in row.get("refused", {}).items()]


def _plain(text: str) -> str:
    return " ".join(str(text).split())
