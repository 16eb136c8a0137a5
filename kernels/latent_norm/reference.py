"""Latent norm in plain torch.

Legend: T rows, W width of the joint projection, H width of the latent.
"""

from __future__ import annotations

from torch import Tensor

from shardwright.kernels.rms_norm.reference import rms_norm_reference


def latent_norm_reference(joint: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Split ``joint [..., W]`` into a latent ``[..., H]``, which is normalised, and the rest ``[..., W - H]``.

    Returns:
        RMSNorm of the latent, as transformers defines it, and the rest unchanged.
    """
    latent, rest = joint.split([weight.shape[0], joint.shape[-1] - weight.shape[0]], dim=-1)
    return rms_norm_reference(latent, weight, eps), rest
