"""Buffers that no file holds (rotary frequencies, embedding scales): recomputed as the model's class does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.schemas.errors import CheckpointError


def rebuild_buffers(model: nn.Module, device: torch.device | str) -> tuple[str, ...]:
    """Recompute every non-persistent buffer of a transformers model and put it on ``device``.

    A twin of the model is made on meta from ``model.config``, its buffers are filled with a sentinel in host
    memory, the class's own initialisation runs on the twin (its parameters stay on meta), and the results are
    copied over. The given model's parameters are never touched.

    Args:
        model: built by :func:`build_on_meta`; modules may have been wrapped as long as buffer names are the same.
        device: where computation happens.

    Returns:
        Names of the rebuilt buffers.

    Raises:
        CheckpointError: ``buffer-not-rebuilt`` when a buffer's value cannot be recomputed.
    """
    names = non_persistent_buffers(model)
    if not names:
        return ()
    values = _recomputed(model)
    for name in names:
        if name not in values:
            raise _not_rebuilt(name, "the class of the model does not define it")
        owner, leaf = _owner(model, name)
        owner._buffers[leaf] = values[name].to(device)
    return names


def non_persistent_buffers(model: nn.Module) -> tuple[str, ...]:
    """Names of buffers that are not part of a checkpoint."""
    found = []
    for prefix, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name in module._non_persistent_buffers_set:
                found.append(f"{prefix}.{name}" if prefix else name)
    return tuple(found)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _sentinel(buffer: torch.Tensor) -> torch.Tensor:
    """A host tensor whose every value shows that nothing has been written."""
    value = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    if buffer.is_floating_point() or buffer.is_complex():
        return value.fill_(float("nan"))
    if buffer.dtype is torch.bool:
        return value.fill_(False)
    return value.fill_(torch.iinfo(buffer.dtype).min)


def _recomputed(model: nn.Module) -> dict[str, torch.Tensor]:
    config = getattr(model, "config", None)
    library = (one for one in type(model).__mro__ if one.__module__.startswith("transformers."))
    owner_class: Any = next(library, None)
    if config is None or not hasattr(owner_class, "_from_config"):
        raise _not_rebuilt("all", f"{type(model).__name__} is not a transformers model")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    with torch.device("meta"):
        twin = owner_class._from_config(config, dtype=dtype, attn_implementation=config._attn_implementation)
    values = {}
    for name in non_persistent_buffers(twin):
        owner, leaf = _owner(twin, name)
        values[name] = owner._buffers[leaf] = _sentinel(owner.get_buffer(leaf))
    for module in twin.modules():
        module._is_hf_initialized = False
    twin.initialize_weights()
    for name in values:
        owner, leaf = _owner(twin, name)
        value = owner._buffers[leaf]
        if value is None or value.is_meta or _untouched(value):
            raise _not_rebuilt(name, "the class's initialisation did not write it")
        values[name] = value
    return values


def _untouched(value: torch.Tensor) -> bool:
    if value.is_floating_point() or value.is_complex():
        return bool(torch.isnan(value).any())
    if value.dtype is torch.bool:
        return False
    return bool((value == torch.iinfo(value.dtype).min).any())


def _not_rebuilt(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        "buffer-not-rebuilt",
        f"buffer {name} is in no file and cannot be recomputed: {why}",
        where=name,
        next_action="add a rule for this buffer to checkpoints/buffers.py before training this family",
    )
