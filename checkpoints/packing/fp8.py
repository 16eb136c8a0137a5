"""FP8 weights with one scale for a block of values (DeepSeek-V3 and its descendants: 128 × 128)."""

from __future__ import annotations

from shardwright.checkpoints.packing.dtypes import FP8
from shardwright.checkpoints.packing.logical import LogicalTensor, Table

SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0", "U8"})


def scale_names(name: str) -> tuple[str, ...]:
    """Spellings under which the scale of ``name`` is stored."""
    stem = name.removesuffix(".weight")
    return (f"{name}_scale_inv", f"{name}_scale", f"{stem}.scale", f"{stem}.scales")


def block_of(shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...] | None:
    """Elements per scale in each dim, or ``None`` when the shapes do not fit.

    A dim of n elements with b scales has blocks of ⌈n / b⌉ rounded up to a power of two; a scalar scale covers all.
    """
    if all(dim == 1 for dim in scale):
        return shape
    if len(scale) != len(shape):
        return None
    block = []
    for size, count in zip(shape, scale, strict=True):
        if not 0 < count <= size:
            return None
        step = -(-size // count)
        if count not in (1, size):
            step = 1 << (step - 1).bit_length()
            if -(-size // step) != count:
                return None
        block.append(step)
    return tuple(block)


def rule(name: str, table: Table) -> LogicalTensor | None:
    """An FP8 tensor and its scale."""
    tensor = table[name]
    if tensor.dtype not in FP8 or name.endswith(("_scale", "_scale_inv", ".scale")):
        return None
    for scale in scale_names(name):
        found = table.get(scale)
        if found is not None and found.dtype in SCALE_DTYPES:
            block = block_of(tensor.shape, found.shape)
            if block is not None:
                activation = f"{name.removesuffix('.weight')}.input_scale"
                companions = (scale, activation) if activation in table else (scale,)
                return LogicalTensor(name, tensor.shape, "fp8-block", name, companions, block)
    return None
