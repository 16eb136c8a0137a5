"""After load: nothing left uninitialised, and the loss is the plain model's."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.runtime.checks.compare import LOSS_TOLERANCE, equal_numbers
from shardwright.runtime.ownership import owned_parameters
from shardwright.schemas.run import CheckResult


def all_loaded(model: nn.Module) -> CheckResult:
    """Every parameter and buffer of this rank has storage and holds finite values."""
    wrong, parameters, buffers = [], 0, 0
    for name, owned in owned_parameters(model).items():
        parameters += 1
        if not _sound(owned.local()):
            wrong.append(name)
    for name, buffer in model.named_buffers():
        buffers += 1
        if not _sound(buffer):
            wrong.append(name)
    return CheckResult(
        stage="load",
        name="all-loaded",
        passed=not wrong,
        evidence=f"{parameters} parameters and {buffers} buffers loaded or rebuilt; not finite: "
        + (", ".join(wrong[:5]) or "none"),
        scope="local",
    )


def same_base(before: str, now: str) -> tuple[CheckResult, ...]:
    """The frozen weights of a resumed run are those that it began with; nothing where the save does not tell.

    A plan pins names, shapes, types and sizes of a checkpoint's tensors, not their values: another revision of the same
    model has the same headers.

    Args:
        before, now: hashes of this rank's base, of the save and as it is loaded.
    """
    if not before:
        return ()
    result = CheckResult(
        stage="load",
        name="same-base",
        passed=before == now,
        evidence=f"frozen weights and buffers hash to {now[:16]}…, where the run began to {before[:16]}…"
        + ("" if before == now else ": the checkpoint's values were changed since; restore them"),
        scope="local",
    )
    return (result,)


def _sound(value: torch.Tensor) -> bool:
    if value.is_meta:
        return False
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        return True
    return bool(torch.isfinite(value).all())


def same_loss(ours: float, plain: float, base: str) -> CheckResult:
    """Loss of the first batch in the sharded model against the plain one in one process."""
    return equal_numbers(
        "load", "first-loss", ours, plain, LOSS_TOLERANCE[base], "loss of the first batch, sharded against plain"
    )
