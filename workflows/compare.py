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


def differences(left: AdaptationPlan, right: AdaptationPlan) -> tuple[Difference, ...]:
    """Every leaf of decision and evidence that differs, decision first; lists of fusions are matched by proposal."""
    found = []
    for section in ("decision", "evidence"):
        old, new = _leaves(_keyed(getattr(left, section))), _leaves(_keyed(getattr(right, section)))
        for field in sorted({*old, *new}):
            a, b = old.get(field, _ABSENT), new.get(field, _ABSENT)
            if a != b:
                found.append(Difference(section=section, field=field, left=str(a), right=str(b)))
    return tuple(found)


def _keyed(section: Any) -> dict[str, Any]:
    raw: dict[str, Any] = section.whole()
    for name, key in (("fusions", "proposal_id"), ("proposals", "id"), ("lora_targets", "parameter")):
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
