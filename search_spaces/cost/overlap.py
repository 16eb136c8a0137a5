"""How much of a gather runs behind computation."""

from __future__ import annotations

from shardwright.schemas.cluster import ClusterSpec

SLOWDOWN = 1.1
"""Computation beside a collective takes this much longer while both run; published fits give 1.1–1.3."""


def split_s(gather_s: float, compute_s: float, cluster: ClusterSpec, prefetch_depth: int) -> tuple[float, float]:
    """(exposed, hidden) seconds of one layer's gather behind the layer computed meanwhile.

    gloo works on the cores that compute, so nothing is hidden; nor without prefetch. Otherwise the
    hidden part is what fits behind the computation, and slows it by ``SLOWDOWN − 1``.
    """
    if cluster.backend == "gloo" or prefetch_depth == 0:
        return gather_s, 0.0
    hidden = min(gather_s, compute_s)
    return gather_s - hidden + (SLOWDOWN - 1) * hidden, hidden
