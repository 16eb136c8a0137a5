"""Two plans, field by field."""

from __future__ import annotations

from typing import Any

from shardwright.schemas.base import Model
from shardwright.schemas.plan import AdaptationPlan

_ABSENT = "(absent)"


class Difference(Model):
    """One leaf that differs; ``section`` says whether workers do something else or only the reasons differ."""

    section: str
    field: str
    left: str
    right: str


NAMED = {"fusions": "proposal_id", "proposals": "id", "lora_targets": "parameter"}
"""Lists whose entries have names: they are matched by them."""


def differences(left: AdaptationPlan, right: AdaptationPlan) -> tuple[Difference, ...]:
    """Every leaf of decision and evidence that differs, decision first; an entry that one side lacks is one line."""
    found = []
    for section in ("decision", "evidence"):
        old, new = _keyed(getattr(left, section)), _keyed(getattr(right, section))
        rows = {}
        for name in NAMED:
            mine, other = old.get(name, {}), new.get(name, {})
            for key in mine.keys() ^ other.keys():
                rows[f"{name}.{key}"] = (_in_short(mine.pop(key, None)), _in_short(other.pop(key, None)))
        before, after = _leaves(old), _leaves(new)
        for field in {*before, *after}:
            a, b = before.get(field, _ABSENT), after.get(field, _ABSENT)
            if a != b:
                rows[field] = (str(a), str(b))
        found += [Difference(section=section, field=f, left=rows[f][0], right=rows[f][1]) for f in sorted(rows)]
    return tuple(found)


def _in_short(entry: dict[str, Any] | None) -> str:
    """What an entry is, in one line."""
    if entry is None:
        return _ABSENT
    return str(entry.get("title") or entry.get("provider") or "present")


def _keyed(section: Any) -> dict[str, Any]:
    raw: dict[str, Any] = section.whole()
    for name, key in NAMED.items():
        if name in raw:
            raw[name] = {item[key]: item for item in raw[name]}
    cost = raw.get("cost")
    if cost is not None:
        for part in ("memory", "time"):
            cost[part]["components"] = {item["name"]: item for item in cost[part]["components"]}
    return raw


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = ((str(i), item) for i, item in enumerate(value))  # type: ignore[assignment]
    else:
        return {prefix.removesuffix("."): value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves.update(_leaves(item, f"{prefix}{key}."))
    return leaves
