"""MXFP4: two 4-bit floats (E2M1) a byte and one power-of-two scale (E8M0) for 32 values along the input dim.

Sources of the layouts: the OCP Microscaling format (32 values a scale); compressed-tensors' ``mxfp4-pack-quantized``
(``weight_packed`` and ``weight_scale``); gpt-oss (``_blocks`` and ``_scales``).
"""

from __future__ import annotations

from shardwright.checkpoints.packing.logical import LogicalTensor, Table

GROUP = 32
VALUES_PER_BYTE = 2
SCALE_DTYPES = frozenset({"U8", "F8_E8M0"})


def compressed_rule(name: str, table: Table) -> LogicalTensor | None:
    """``X.weight_packed`` U8 [out, in / 2] with ``X.weight_scale`` [out, in / 32]."""
    if not name.endswith("weight_packed") or table[name].dtype != "U8":
        return None
    stem = name.removesuffix("_packed")
    scale = table.get(f"{stem}_scale")
    *lead, half = table[name].shape
    if scale is None or scale.dtype not in SCALE_DTYPES or scale.shape != (*lead, half * VALUES_PER_BYTE // GROUP):
        return None
    shape = (*lead, half * VALUES_PER_BYTE)
    return LogicalTensor(stem, shape, "mxfp4", name, (f"{stem}_scale",), (1,) * len(lead) + (GROUP,))


def blocks_rule(name: str, table: Table) -> LogicalTensor | None:
    """gpt-oss: ``P_blocks`` U8 [E, out, groups, 16] with ``P_scales`` U8 [E, out, groups].

    The logical weight is [E, out, groups · 32]: the file keeps out before in, unlike the module.
    """
    if not name.endswith("_blocks") or table[name].dtype != "U8" or len(table[name].shape) < 3:
        return None
    stem = name.removesuffix("_blocks")
    scale = table.get(f"{stem}_scales")
    *lead, groups, width = table[name].shape
    if scale is None or scale.dtype not in SCALE_DTYPES or scale.shape != (*lead, groups):
        return None
    if width * VALUES_PER_BYTE != GROUP:
        return None
    block = (1,) * len(lead) + (GROUP,)
    return LogicalTensor(stem, (*lead, groups * GROUP), "gpt-oss-mxfp4", name, (f"{stem}_scales",), block)


def int8_rule(name: str, table: Table) -> LogicalTensor | None:
    """4-bit floats kept as I8 or U8 ``X.weight`` [out, in / 2] with ``X.scale`` or ``X.weight_scale`` [out, in / 32].

    Used only where the configuration declares 4-bit floats.
    """
    tensor = table[name]
    if tensor.dtype not in ("I8", "U8") or not name.endswith(".weight") or len(tensor.shape) < 2:
        return None
    stem = name.removesuffix(".weight")
    *lead, half = tensor.shape
    shape = (*lead, half * VALUES_PER_BYTE)
    block = (1,) * len(lead) + (GROUP,)
    for scale in (f"{stem}.scale", f"{name}_scale", f"{name}_scale_inv"):
        found = table.get(scale)
        if found is not None and found.shape == (*lead, shape[-1] // GROUP):
            return LogicalTensor(name, shape, "mxfp4", name, (scale,), block)
    return LogicalTensor(name, shape, "mxfp4", name, (), block)
