"""A strategy with other values on some axes, given as text, and with what follows from them."""

from __future__ import annotations

import math
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwright.schemas.errors import UsageError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.schemas.validation import explain

LAYERS = "checkpointed_layers"


def completed(plan: AdaptationPlan, values: dict[str, str]) -> ParallelStrategy:
    """The plan's strategy with other values, and with what follows from them."""
    return _accumulated(plan, _filled(plan, edited(plan.decision.strategy, values), values), values)


def edited(strategy: ParallelStrategy, values: dict[str, str]) -> ParallelStrategy:
    """The strategy with other values; types and ranges are checked, legality is not."""
    raw: dict[str, Any] = strategy.whole()
    for axis, text in values.items():
        group, _, name = axis.rpartition(".")
        target = raw["mesh"] if group == "mesh" else raw if not group else {}
        if name not in target or name == "mesh":
            known = [f"mesh.{field}" for field in Mesh.model_fields] + [f for f in raw if f != "mesh"]
            raise UsageError(
                "unknown-axis", f"no axis {axis!r}", where="--edit", next_action=f"name one of: {', '.join(known)}"
            )
        target[name] = [part for part in text.split(",") if part.strip()] if name == LAYERS else text
    _together(raw, values)
    try:
        return TypeAdapter(ParallelStrategy).validate_python(raw)
    except ValidationError as error:
        raise UsageError("bad-value", explain(error), where="--edit", next_action="correct the value") from error


def _together(raw: dict[str, Any], values: dict[str, str]) -> None:
    """Axes that only mean something together follow each other where one of them was not named."""
    if "overlap" in values and "overlap_chunks" not in values:
        raw["overlap_chunks"] = 2 if values["overlap"] == "chunked" else 1
    elif "overlap_chunks" in values and "overlap" not in values and raw["overlap"] != "shared":
        raw["overlap"] = "none" if values["overlap_chunks"].strip() in ("0", "1") else "chunked"
    if "checkpointing" in values and LAYERS not in values and values["checkpointing"] != "layers":
        raw[LAYERS] = []
    elif LAYERS in values and "checkpointing" not in values:
        raw["checkpointing"] = "layers" if raw[LAYERS] else "none"
    if values.get("expert_placement", "").strip() == "contiguous":
        raw["expert_slots"] = []
        raw["redundant_experts"] = values.get("redundant_experts", 0)


def _filled(plan: AdaptationPlan, strategy: ParallelStrategy, values: dict[str, str]) -> ParallelStrategy:
    """``shard`` and ``replicate``, where they were not named, so that an edited mesh covers the same ranks again."""
    mesh, world = strategy.mesh, plan.decision.strategy.mesh.world_size
    free = [axis for axis in ("replicate", "shard") if f"mesh.{axis}" not in values]
    if mesh.world_size == world or not free:
        return strategy
    fixed = math.prod(degree for axis, degree in mesh.model_dump().items() if axis not in free)
    rest, left_over = divmod(world, fixed)
    if left_over or not rest:
        return strategy
    replicate = math.gcd(mesh.replicate, rest) if len(free) == 2 else rest
    degrees = {"replicate": replicate, "shard": rest // replicate} if len(free) == 2 else {free[0]: rest}
    return strategy.model_copy(update={"mesh": mesh.model_copy(update=degrees)})


def _accumulated(plan: AdaptationPlan, strategy: ParallelStrategy, values: dict[str, str]) -> ParallelStrategy:
    if "accumulation_steps" in values:
        return strategy
    wanted = plan.decision.recipe.batch.global_batch_sequences
    steps, rest = divmod(wanted, strategy.mesh.data_ranks * strategy.micro_batch_sequences)
    return strategy.model_copy(update={"accumulation_steps": steps}) if steps and not rest else strategy


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping of dotted names."""
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            leaves.update(flat(item, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = item
    return leaves
