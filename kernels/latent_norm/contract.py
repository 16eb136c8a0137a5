"""What latent norm demands of its inputs, and what its fusion must prove. No torch.

Legend: T rows, W width of the joint projection, H width of the latent.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.admitted import Strided
from shardwright.kernels.gated_rms_norm.contract import dense_rows
from shardwright.kernels.guards import TensorLike, refuse
from shardwright.kernels.rms_norm.contract import DTYPES
from shardwright.kernels.rms_norm.contract import OBLIGATIONS as NORM_OBLIGATIONS

NAME = "latent_norm"
MAX_W = 8192
"""Widest joint row that stays in one program's registers without spills (sm_90 compile gate)."""

ROLES = {
    "joint": "activation [..., W]",
    "weight": "parameter [H]",
    "latent": "activation [..., H]",
    "rest": "activation [..., W - H]",
}
OBLIGATIONS = NORM_OBLIGATIONS
"""As RMSNorm. The latent before its norm and the joint projection are read by nothing else."""


def check_static(joint: TensorLike, weight: TensorLike, eps: float) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``nothing-beside``,
            ``hidden-too-large`` or ``bad-epsilon``.
    """
    guards.one_dtype(NAME, {"joint": joint, "weight": weight}, DTYPES)
    shape, latent = tuple(joint.shape), tuple(weight.shape)
    if len(shape) < 1 or len(latent) != 1 or not 1 <= latent[0] <= shape[-1]:
        found = f"joint is {list(shape)}, weight is {list(latent)}"
        raise refuse(NAME, "wrong-shape", found, "pass joint [..., W] and weight [H] with 1 <= H < W")
    if latent[0] == shape[-1]:
        what = f"the latent is the whole row of {shape[-1]}"
        raise refuse(NAME, "nothing-beside", what, "use rms_norm for it")
    if shape[-1] > MAX_W:
        what = f"W is {shape[-1]}; one row must fit in one program's registers (W <= {MAX_W})"
        raise refuse(NAME, "hidden-too-large", what, "keep this module eager or use torch.compile for it")
    guards.epsilon(NAME, eps)


def check(joint: Strided, weight: Strided, eps: float, *, interpreted: bool) -> None:
    """All guards, on real tensors. Zero rows are allowed; the joint projection may be strided between rows.

    Raises:
        KernelError: as ``check_static``; also ``device-mixed``, ``device-unsupported``,
            ``not-contiguous``, ``misaligned``, ``row-layout`` or ``too-many-rows``.
    """
    check_static(joint, weight, eps)
    guards.one_device(NAME, {"joint": joint, "weight": weight}, interpreted=interpreted)
    guards.dense(NAME, {"weight": weight})
    dense_rows(NAME, "joint", joint)
