"""Packed formats of the frozen base: bytes per value kept and gathered, and what unpacking needs.

Routed experts alone stay packed; everything else is decoded at load. ``fp8``: one byte a value and a scale per
128 × 128 block. ``mxfp4``: four bits and a scale byte per 32 values. ``int4``: four bits and a 16-bit scale per 32. The
search offers a format only where the files already hold it.
"""

from __future__ import annotations

import numpy as np

from shardwright.kernels.packed_experts.configs import DEQUANTISE_ROWS
from shardwright.search_spaces.cost.plans import FORMATS, Array, Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload

FP8_BYTES = 1.0 + 4.0 / (128 * 128)
MXFP4_BYTES = 0.5 + 1.0 / 32
INT4_BYTES = 0.5 + 2.0 / 32


def expert_bytes(work: Workload, plans: Plans) -> Array:
    """Stored bytes per value of a routed expert's weights."""
    return np.select(
        [plans.format == FORMATS.index(one) for one in ("fp8", "mxfp4", "int4")],
        [FP8_BYTES, MXFP4_BYTES, INT4_BYTES],
        float(work.base_bytes),
    )


def gathered_adapter_bytes(work: Workload, plans: Plans) -> Array:
    """Bytes per value of an expert adapter in FSDP's gather: the compute dtype, beside packed stacks its own.

    FSDP casts a whole unit or nothing of it, and codes must not be cast.
    """
    return np.where(plans.format > 0, float(work.adapter_bytes), float(work.base_bytes))


def dequantised_bytes(work: Workload, layer: LayerWork, plans: Plans, rows: Array) -> Array:
    """One layer's experts unpacked for computing: ``b·N`` of what is packed on this rank; 0 where nothing is.

    Only where a rank's rows an expert reach what makes a decoded copy pay; below it they are decoded tile by tile
    (``kernels/packed_experts``) or one expert at a time.
    """
    held = work.profile.shape.num_experts / plans.ep
    copied = (plans.format > 0) & (rows >= DEQUANTISE_ROWS * held)
    return work.base_bytes * np.where(copied, layer.expert_parameters / (plans.ep * plans.expert_tp), 0.0)
