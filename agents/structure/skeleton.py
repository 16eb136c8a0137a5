"""The model around its layers: embedding, final norm, head and loss, and what each layer is called with.

Every decoder layer is replaced by a boundary that passes hidden states on and records its arguments, so that one
cheap trace of the model's own forward gives the calling convention of each layer, for any family.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwright.agents.structure.opaque import like_meta
from shardwright.schemas.errors import CheckpointError

BATCH, SEQUENCE = 2, 12
"""Sizes of the captured micro-batch: small, and different from usual head counts."""


@dataclass(frozen=True)
class LayerInputs:
    """Arguments of one layer's forward: tensors apart from everything else."""

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    """All leaves; ``None`` stands where a tensor goes."""
    slots: tuple[int, ...]
    """Positions of the tensors among the leaves."""
    spec: pytree.TreeSpec

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def _record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerInputs:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = tuple(like_meta(leaves[i]) for i in slots)
    return LayerInputs(tensors, tuple(None if i in slots else leaf for i, leaf in enumerate(leaves)), slots, spec)


class Boundary(nn.Module):
    """Stands for one decoder layer; other attributes come from the real layer."""

    def __init__(self, layer: nn.Module, index: int, seen: dict[int, LayerInputs], as_tuple: bool) -> None:
        super().__init__()
        self.__dict__["replaced"] = layer
        self.__dict__["boundary"] = (index, seen, as_tuple)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index, seen, as_tuple = self.__dict__["boundary"]
        seen[index] = _record(args, kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        passed = torch.ops.shardwright_capture.layer(hidden, index)
        return (passed,) if as_tuple else passed


def find_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers: of ``count`` modules, and the one with most parameters among those.

    Raises:
        CheckpointError: ``no-decoder-layers``.
    """
    found = [
        (sum(p.numel() for p in module.parameters()), path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise CheckpointError(
            "no-decoder-layers",
            f"the model has no list of {count} layers",
            where=type(model).__name__,
            next_action="check num_hidden_layers in config.json",
        )
    _, path, layers = max(found, key=lambda item: (item[0], -len(item[1])))
    return path, layers


@contextmanager
def boundaries(model: nn.Module, path: str, seen: dict[int, LayerInputs], as_tuple: bool) -> Iterator[None]:
    """Replace every layer of the list at ``path`` by a boundary while the context is open."""
    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    layers = getattr(owner, name)
    try:
        setattr(owner, name, nn.ModuleList(Boundary(layer, i, seen, as_tuple) for i, layer in enumerate(layers)))
        yield
    finally:
        setattr(owner, name, layers)


class LossCall(nn.Module):
    """A training step's forward: token ids and labels in, the mean loss out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.captured = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.captured(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def trace_skeleton(model: nn.Module, path: str) -> tuple[torch.export.ExportedProgram, dict[int, LayerInputs]]:
    """Export the model without its layers.

    Layers return a tensor in most families and a tuple in some; the wrong guess loses the batch dimension, which
    the next layer's input shows.

    Returns:
        The program (inputs: ids and labels ``[BATCH, SEQUENCE]``) and each layer's arguments.
    """
    hidden_rank = 3
    for as_tuple in (False, True):
        seen: dict[int, LayerInputs] = {}
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta")
        labels = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta")
        with boundaries(model, path, seen, as_tuple):
            program = torch.export.export(LossCall(model), (ids, labels), strict=False)
        if all(inputs.tensors[0].dim() >= hidden_rank for inputs in seen.values()):
            break
    return program, seen
