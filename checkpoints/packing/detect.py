"""Which packing each tensor of a checkpoint has: decided by dtype, name and shape together, else refused."""

from __future__ import annotations

from typing import Any

from shardwright.checkpoints.packing import fp8, int4, mxfp4
from shardwright.checkpoints.packing.dtypes import FP8
from shardwright.checkpoints.packing.logical import LogicalTensor, Rule, Table
from shardwright.schemas.errors import CheckpointError

FOREIGN_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".absmax",
    ".quant_map",
    ".weight_packed",
    "_blocks",
    ".weight_global_scale",
    ".SCB",
)
"""Endings that only packed tensors have; one left over means a packing that is not known here."""


def declares_fp4(document: dict[str, Any]) -> bool:
    """Whether a config.json (or its quantization part) says that weights are 4-bit floats kept in bytes."""
    quantization = document.get("quantization_config")
    places = [document, quantization if isinstance(quantization, dict) else {}]
    values = [place.get(key) for place in places for key in ("expert_dtype", "fmt", "quant_method", "format", "dtype")]
    return any(isinstance(value, str) and ("fp4" in value.lower() or "e2m1" in value.lower()) for value in values)


def logical_tensors(table: Table, document: dict[str, Any]) -> dict[str, LogicalTensor]:
    """Group file tensors into logical weights.

    Args:
        table: name → file tensor.
        document: the checkpoint's config.json.

    Returns:
        Logical name → weight; companions (scales) are members of their weight and not entries.

    Raises:
        CheckpointError: ``unknown-quantization`` for packed tensors that no rule knows,
            ``duplicate-tensor`` when a weight is stored packed and plain.
    """
    rules: list[Rule] = [fp8.rule, mxfp4.compressed_rule, int4.rule, mxfp4.blocks_rule]
    if declares_fp4(document):
        rules.append(mxfp4.int8_rule)
    grouped: list[LogicalTensor] = []
    members: set[str] = set()
    for name in table:
        if table[name].dtype in ("U8", "I8", "I32") or table[name].dtype in FP8:
            for rule in rules:
                found = rule(name, table)
                if found is not None:
                    grouped.append(found)
                    members.update((found.values, *found.companions))
                    break
    result = {weight.name: weight for weight in grouped}
    for name in table:
        if name in members:
            continue
        if table[name].dtype in FP8 or name.endswith(FOREIGN_SUFFIXES):
            raise CheckpointError(
                "unknown-quantization",
                f"{name}: {table[name].dtype} {list(table[name].shape)} is packed in a way that is not known",
                where="tensor headers",
                next_action="known: bf16, fp8 blocks, MXFP4 (compressed-tensors, gpt-oss), int4 groups",
            )
        if name in result:
            raise CheckpointError(
                "duplicate-tensor",
                f"{name} is stored plain and packed ({result[name].values})",
                where="tensor headers",
                next_action="remove one of the two; one folder may hold one revision of a checkpoint",
            )
        result[name] = LogicalTensor(name, table[name].shape, "plain", name)
    return result
