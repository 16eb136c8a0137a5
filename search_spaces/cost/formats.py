"""Packed formats of the frozen base: bytes per value kept and gathered, and what unpacking needs.

``fp8``: every layer weight at one byte and a scale per 128 × 128 block. ``mxfp4``: routed experts at four
bits and a scale byte per 32 values. The search offers a format only where the files already hold it.
"""

from __future__ import annotations

import numpy as np

from shardwright.kernels.packed_experts.configs import DEQUANTISE_ROWS
from shardwright.search_spaces.cost.plans import FORMATS, Array, Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload

FP8_BYTES = 1.0 + 4.0 / (128 * 128)
MXFP4_BYTES = 0.5 + 1.0 / 32


def dense_bytes(work: Workload, plans: Plans) -> Array:
    """Stored bytes per value of a layer's other weights."""
    return np.where(plans.format == FORMATS.index("fp8"), FP8_BYTES, float(work.base_bytes))


def expert_bytes(work: Workload, plans: Plans) -> Array:
    """Stored bytes per value of a routed expert's weights."""
    return np.select(
        [plans.format == FORMATS.index("fp8"), plans.format == FORMATS.index("mxfp4")],
        [FP8_BYTES, MXFP4_BYTES],
        float(work.base_bytes),
    )


def dequantised_bytes(work: Workload, layer: LayerWork, plans: Plans, rows: Array) -> Array:
    """One layer unpacked for computing: ``b·N`` of what is packed on this rank; 0 where nothing is.

    Experts: only where a rank's rows an expert reach what makes a decoded copy pay; below it they are decoded tile by
    tile (``kernels/packed_experts``) or one expert at a time.
    """
    held = work.profile.shape.num_experts / plans.ep
    copied = (plans.format > 0) & (rows >= DEQUANTISE_ROWS * held)
    experts = np.where(copied, layer.expert_parameters / (plans.ep * plans.expert_tp), 0.0)
    dense = np.where(plans.format == FORMATS.index("fp8"), layer.dense_parameters / plans.tp, 0.0)
    return work.base_bytes * (experts + dense)
