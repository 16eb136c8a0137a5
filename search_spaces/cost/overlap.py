"""How much of a gather runs behind computation."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.schemas.cluster import ClusterSpec

SLOWDOWN = 1.1
"""Computation beside a collective takes this much longer while both run; published fits give 1.1–1.3."""


def split_s(
    gather_s: Any, compute_s: Any, cluster: ClusterSpec, prefetch_depth: Any, slowdown: float = SLOWDOWN
) -> tuple[Any, Any]:
    """(exposed, hidden) seconds of a gather, or of another transfer, behind what is computed meanwhile.

    gloo works on the cores that compute, so nothing is hidden; nor without prefetch. Otherwise the
    hidden part is what fits behind the computation, and delays it by ``slowdown − 1`` of itself.
    """
    if cluster.backend == "gloo":
        return gather_s, 0.0 * gather_s
    hidden = np.where(np.asarray(prefetch_depth) > 0, np.minimum(gather_s, compute_s), 0.0)[()]
    return gather_s - hidden + (slowdown - 1) * hidden, hidden
