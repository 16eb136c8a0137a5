"""What fused operators could save at best: while they are still being found, it says whether waiting is worth it."""

from __future__ import annotations

from shardwright.schemas.cluster import ClusterSpec
from shardwright.search_spaces.cost.fusion import EXPERT_OPERATORS, FusedProviders
from shardwright.search_spaces.cost.linear_attention import DELTA_RULES
from shardwright.search_spaces.cost.memory import memory_of
from shardwright.search_spaces.cost.plans import Plans
from shardwright.search_spaces.cost.workload import Workload

SAVING = ("swiglu", "router", "qk_norm_rope", "dsa", *DELTA_RULES, "linear_cross_entropy")
"""Operators, beside experts and norms, whose kernels keep less than eager layers do."""

OWN = "shardwright"


def leanest_operators(layers: int) -> tuple[FusedProviders, ...]:
    """Every operator fused, once for each kernel of the experts and once with eager ones: no plan has a lower peak than
    the best of these.

    Args:
        layers: of the model; every one's norms are fused with their adds.
    """
    chosen: dict[str, tuple[str, tuple[str, ...]]] = {op: (OWN, ()) for op in SAVING}
    norms = {"add_rms_norm": (OWN, ("norm",) * (2 * layers))}
    kernels = {op: op for op in SAVING}
    fused = (
        FusedProviders({**chosen, **norms, "experts": (OWN, ())}, {**kernels, "experts": kernel})
        for kernel in EXPERT_OPERATORS
    )
    return FusedProviders({**chosen, **norms}, kernels), *fused


def might_fit(work: Workload, cluster: ClusterSpec, plans: Plans) -> bool:
    """Whether a plan could fit with fused operators, whichever of them will be certified; a CPU cluster gets none.

    What the allocator holds between tensors is left out: other operators could leave none.
    """
    found = (memory_of(work, cluster, plans, fused) for fused in leanest_operators(work.profile.shape.num_layers))
    return cluster.device.type != "cpu" and any(bool((one.reserved - one.holes <= one.budget).any()) for one in found)
