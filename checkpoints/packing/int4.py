"""4-bit integers in groups (compressed-tensors' ``pack-quantized``): eight codes in one I32 along the input dim."""

from __future__ import annotations

from shardwright.checkpoints.packing.dtypes import PLAIN
from shardwright.checkpoints.packing.logical import LogicalTensor, Table

VALUES_PER_WORD = 8
EXTRAS = ("_shape", "_zero_point", "_g_idx")


def rule(name: str, table: Table) -> LogicalTensor | None:
    """``X.weight_packed`` I32 [out, ⌈in / 8⌉] with ``X.weight_scale`` [out, in / group] (and shape, zero points)."""
    if not name.endswith("weight_packed") or table[name].dtype != "I32":
        return None
    stem = name.removesuffix("_packed")
    scale = table.get(f"{stem}_scale")
    *lead, words = table[name].shape
    if scale is None or scale.dtype not in PLAIN or scale.shape[:-1] != tuple(lead):
        return None
    width = words * VALUES_PER_WORD
    groups = scale.shape[-1]
    if not groups or width % groups:
        return None
    companions = (f"{stem}_scale", *(f"{stem}{end}" for end in EXTRAS if f"{stem}{end}" in table))
    block = (1,) * len(lead) + (width // groups,)
    return LogicalTensor(stem, (*lead, width), "int4-group", name, companions, block)
