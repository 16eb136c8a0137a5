"""What the router demands of its inputs, and what a fusion that uses it must prove. No torch.

NaN policy: a NaN score ranks above every number, the lower expert first, as in a stable descending sort;
its weights are NaN and its experts are valid, distinct indices. Other rows do not change.

Legend: T tokens, E experts, k chosen experts, G groups.
"""

from __future__ import annotations

import math

from shardwright.kernels import guards
from shardwright.kernels.guards import TensorLike
from shardwright.schemas.fusion import ObligationName

NAME = "router"
DTYPES = ("bfloat16", "float16", "float32")
SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")
MAX_EXPERTS = 1024
"""Most experts that one warp keeps in registers without spills (sm_90 compile gate)."""
MAX_CHOSEN = 32

ROLES = {
    "logits": "activation [T, E]",
    "bias": "buffer [E], optional",
    "weights": "activation [T, k] fp32",
    "experts": "indices [T, k] int64",
    "counts": "tokens of each expert [E] int32",
    "mean_probability": "statistic [E] fp32",
}

OBLIGATIONS: tuple[ObligationName, ...] = (
    "no-escaping-value",
    "no-mutation-or-alias",
    "no-randomness",
    "dtype-shape-stride-device",
    "hooks",
    "lora-inside",
    "sharding-boundary",
    "differential-test",
)
"""Each must be ``proved`` before this operator replaces a router's scoring and choice; the product that
makes the logits stays outside, in the model's own dtype."""


def check_static(
    logits: TensorLike,
    bias: TensorLike | None,
    *,
    k: int,
    scoring: str,
    groups: int,
    groups_kept: int,
    group_score: str,
    scale: float,
) -> None:
    """What can be refused from shapes, dtypes and settings alone (fake tensors too).

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape``, ``too-many-experts``, ``bad-top-k``,
            ``bad-groups``, ``bad-scoring`` or ``bad-scale``.
    """
    guards.one_dtype(NAME, {"logits": logits}, DTYPES)
    if len(logits.shape) != 2 or logits.shape[1] < 1:
        raise guards.refuse(NAME, "wrong-shape", f"logits are {list(logits.shape)}", "pass logits [T, E] with E >= 1")
    E = logits.shape[1]
    if E > MAX_EXPERTS:
        what = f"{E} experts; one row must fit in one warp's registers (E <= {MAX_EXPERTS})"
        raise guards.refuse(NAME, "too-many-experts", what, "keep this router eager")
    if bias is not None:
        guards.one_dtype(NAME, {"bias": bias}, DTYPES)
        if tuple(bias.shape) != (E,):
            what = f"bias is {list(bias.shape)}, logits are {list(logits.shape)}"
            raise guards.refuse(NAME, "wrong-shape", what, "pass bias [E]")
    if scoring not in SCORINGS:
        raise guards.refuse(NAME, "bad-scoring", f"scoring is {scoring!r}", f"use one of {', '.join(SCORINGS)}")
    check_groups(E, k, groups, groups_kept, group_score)
    if not math.isfinite(scale):
        raise guards.refuse(NAME, "bad-scale", f"scale is {scale!r}", "pass the model's routed_scaling_factor")


def check_groups(E: int, k: int, groups: int, groups_kept: int, group_score: str) -> None:
    """Groups divide the experts, and what they leave is enough for k.

    Raises:
        KernelError: ``bad-groups`` or ``bad-top-k``.
    """
    if group_score not in GROUP_SCORES:
        what = f"group_score is {group_score!r}"
        raise guards.refuse(NAME, "bad-groups", what, f"use one of {', '.join(GROUP_SCORES)}")
    if groups < 1 or E % groups or not 1 <= groups_kept <= groups:
        what = f"{groups_kept} of {groups} groups of {E} experts"
        raise guards.refuse(NAME, "bad-groups", what, "use groups that divide E, and keep between one and all")
    if groups_kept < groups and group_score == "top2" and E // groups < 2:
        what = f"groups of {E // groups} expert have no second-best score"
        raise guards.refuse(NAME, "bad-groups", what, "use group_score 'max'")
    available = groups_kept * (E // groups)
    if not 1 <= k <= min(MAX_CHOSEN, available):
        what = f"top-{k} of {available} experts that stand"
        raise guards.refuse(NAME, "bad-top-k", what, f"use k between 1 and {min(MAX_CHOSEN, available)}")


def check(logits: TensorLike, bias: TensorLike | None, *, interpreted: bool) -> None:
    """Guards that need real tensors; ``check_static`` comes first. Zero rows are allowed.

    Raises:
        KernelError: ``device-mixed``, ``device-unsupported``, ``not-contiguous`` or ``misaligned``.
    """
    tensors = {"logits": logits} if bias is None else {"logits": logits, "bias": bias}
    guards.one_device(NAME, tensors, interpreted=interpreted)
    guards.dense(NAME, tensors)
