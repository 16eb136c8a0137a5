"""Which parameters of a model are filled from packed tensors, without matching every tensor of the files.

Experts of one block are stored alike, so one expert's names stand for all: a checkpoint of half a million tensors has a
few hundred different ones.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.names import Rules
from shardwright.checkpoints.packing.detect import logical_tensors

_EXPERT = re.compile(r"(experts\.)\d+\.")


def packed_parameters(folder: Path, model: nn.Module) -> dict[str, str]:
    """Parameter → storage format, for parameters with a part that is not stored plainly.

    Args:
        folder: the checkpoint; headers alone are read.
        model: its model on meta.

    Raises:
        CheckpointError: as ``read_config`` and ``read_headers``; ``unknown-quantization``.
    """
    config, headers = read_config(folder), read_headers(folder)
    logical = logical_tensors(headers.tensors, config.raw)
    packed: dict[str, str] = {}
    for name, tensor in logical.items():
        if tensor.format != "plain":
            packed.setdefault(_EXPERT.sub(r"\g<1>0.", name), tensor.format)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    rules = Rules(model, shapes)
    found: dict[str, str] = {}
    for name, form in sorted(packed.items()):
        for target in _targets(rules, name):
            found[target] = form
    return found


def _targets(rules: Rules, name: str) -> tuple[str, ...]:
    """The parameters that one file tensor has a part in."""
    layer, place, _ = rules.rename(name)
    if place < 0:
        return (layer,)
    patterns = rules.converters[place].target_patterns
    return tuple(rules.with_prefix(layer.replace(patterns[0], pattern, 1)) for pattern in patterns)
