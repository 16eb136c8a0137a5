"""Side tensors that stay in fp32 where the model runs in bf16: what the files hold so and the model's class keeps so.

A class of transformers lists them (``_keep_in_fp32_modules_strict``): router biases and weights, A_log and dt_bias of
recurrent layers, short convolutions, gates of residual streams. Loading with ``from_pretrained`` widens all of them;
here only those whose files hold fp32, for a value that was stored in bf16 is the same number in both.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from torch import nn

from shardwright.checkpoints.build import model_class_for, state_shapes
from shardwright.checkpoints.config import ModelConfig
from shardwright.checkpoints.headers import Headers
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.packing.logical import LogicalTensor

LISTED = "_keep_in_fp32_modules_strict"
STORED = "F32"


def keep_stored_fp32(model: nn.Module, names: NameMap, headers: Headers) -> tuple[str, ...]:
    """Widen parameters and buffers on meta that the files hold in fp32 and the class keeps so.

    Args:
        model: on meta, in a narrower format than fp32; an fp32 model is left as it is.
        names: which file tensors fill what.
        headers: their formats.

    Returns:
        Full names of what is fp32 now and was not.
    """
    listed = _pattern(getattr(model, LISTED, None))
    if listed is None:
        return ()
    widened = []
    for name in state_shapes(model):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        value = module._parameters.get(leaf, module._buffers.get(leaf))
        if value is None or not value.is_floating_point() or value.dtype.itemsize >= torch.float32.itemsize:
            continue
        if not listed.search(name) or not _stored_fp32(names, headers, name):
            continue
        wide = torch.empty_like(value, dtype=torch.float32)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(wide, requires_grad=value.requires_grad)
        else:
            module._buffers[leaf] = wide
        widened.append(name)
    return tuple(widened)


def listed_pattern(config: ModelConfig) -> re.Pattern[str] | None:
    """What a family's classes list, without building them; ``None`` where they list nothing.

    Raises:
        CheckpointError: ``unknown-architecture``.
    """
    one = model_class_for(config)
    beside = vars(sys.modules[one.__module__]).values()
    classes = [one, *(other for other in beside if isinstance(other, type) and hasattr(other, LISTED))]
    return _pattern({name for listing in classes for name in getattr(listing, LISTED) or ()})


def stored_fp32(logical: dict[str, LogicalTensor], headers: Headers, listed: re.Pattern[str]) -> list[str]:
    """File tensors, by logical name, that a class keeps in fp32 and that are stored so."""
    return [
        name
        for name, tensor in logical.items()
        if tensor.format == "plain" and headers.tensors[tensor.values].dtype == STORED and listed.search(name)
    ]


def _stored_fp32(names: NameMap, headers: Headers, parameter: str) -> bool:
    tensors = [names.logical(piece.tensor) for piece in names.pieces(parameter)]
    plain = all(one.format == "plain" for one in tensors)
    return bool(tensors) and plain and all(headers.tensors[one.values].dtype == STORED for one in tensors)


def _pattern(listed: Any) -> re.Pattern[str] | None:
    """One pattern for all names of a list, in which ``*`` stands for anything, as the library reads it."""
    if not listed:
        return None
    return re.compile("|".join(sorted(name.replace("*", ".*") for name in listed)))
