"""Where plain weights go for a comparison: beside the loaded model there is only so much room."""

from __future__ import annotations

import torch

from shardwright.runtime.device import Device, available_host_bytes
from shardwright.schemas.errors import RunError

WHOLE_MODEL_SHARE = 0.5
"""The plain model is run whole where its weights take at most this share of the free memory; a step takes the rest."""
LAYER_SHARE = 0.75
"""As much for one plain layer, whose activations are those of one layer."""
HOST = torch.device("cpu")


def whole_model_fits(needed: int, device: Device) -> tuple[bool, str]:
    """Whether the plain model of ``needed`` bytes runs whole on this rank's device, and why, for the log."""
    free = device.free_bytes()
    fits = needed <= WHOLE_MODEL_SHARE * free
    return fits, f"the plain model takes {needed / 1e9:.2f} GB of {free / 1e9:.2f} GB free on {device.name}"


def place_of_layer(name: str, needed: int, device: Device) -> torch.device:
    """Where one plain layer of ``needed`` bytes runs: on the device, or on its host where the device has no room.

    Raises:
        RunError: ``check-no-room`` where neither has.
    """
    free = device.free_bytes()
    if needed <= LAYER_SHARE * free:
        return device.torch_device
    host = available_host_bytes()
    if device.torch_device != HOST and needed <= LAYER_SHARE * host:
        return HOST
    raise RunError(
        "check-no-room",
        f"{name} takes {needed / 1e9:.1f} GB as a plain layer; {free / 1e9:.1f} GB are free on {device.name}, "
        f"{host / 1e9:.1f} GB on the host, of which {LAYER_SHARE:.0%} may be used",
        where="checks before the first step",
        next_action="run on a host with more memory, or choose a plan that keeps less on each device: what cannot be "
        "compared is not trained",
    )
