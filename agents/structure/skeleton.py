"""The model around its layers: embedding, final norm, head and loss, and what each layer is called with.

Every decoder layer is replaced by a boundary that passes hidden states on and records its arguments, so that one
cheap trace of the model's own forward gives the calling convention of each layer, for any family.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwright.agents.structure.opaque import OpaqueExperts, like_meta
from shardwright.agents.structure.opaque_indexers import opaque_indexers
from shardwright.agents.structure.opaque_loops import counted_cuts
from shardwright.agents.structure.opaque_rules import opaque_rules
from shardwright.agents.structure.trace import TRACE_ERRORS
from shardwright.checkpoints.components import component_of
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


@dataclass(frozen=True)
class LayerResult:
    """What a layer returns: its leaves, and which of them are the hidden states."""

    leaves: tuple[Any, ...]
    """Meta tensors stand for tensors."""
    hidden: int
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, value: Any, hidden: torch.Tensor) -> LayerResult:
        """The hidden states are the first result of the same sizes as the hidden states that went in."""
        leaves, spec = pytree.tree_flatten(value)
        like = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.shape == hidden.shape]
        if not like:
            raise RuntimeError(f"the layer returns nothing of the sizes {tuple(hidden.shape)} that it was given")
        kept = tuple(like_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(kept, like[0], spec)

    def passed(self, hidden: torch.Tensor, index: int) -> Any:
        """The layer's result with its place in the graph as one node; other tensors are nodes of unknown values."""
        place = torch.ops.shardwright_capture.layer(hidden, index)
        leaves = [
            place if i == self.hidden else _unknown(place, leaf, index) if isinstance(leaf, torch.Tensor) else leaf
            for i, leaf in enumerate(self.leaves)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


def _unknown(place: torch.Tensor, like: torch.Tensor, index: int) -> torch.Tensor:
    result: torch.Tensor = torch.ops.shardwright_capture.side(place, list(like.shape), like.dtype, index)
    return result


class Boundary(nn.Module):
    """Stands for one decoder layer; other attributes come from the real layer."""

    def __init__(self, layer: nn.Module, index: int, seen: dict[int, LayerInputs], results: dict[int, Any]) -> None:
        super().__init__()
        self.__dict__["replaced"] = layer
        self.__dict__["boundary"] = (index, seen, results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index, seen, results = self.__dict__["boundary"]
        seen[index] = _record(args, kwargs)
        hidden = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point())
        if index not in results:
            results[index] = _try_out(self.__dict__["replaced"], seen[index], like_meta(hidden))
        return results[index].passed(hidden, index)


def _try_out(layer: nn.Module, inputs: LayerInputs, hidden: torch.Tensor) -> LayerResult:
    """What the real layer returns on meta, outside the trace; bare hidden states where it cannot run there."""
    args, kwargs = inputs.rebuild(inputs.tensors)
    try:
        with (
            torch.utils._python_dispatch._disable_current_modes(),
            OpaqueExperts(layer).installed(),
            opaque_rules(layer),
            opaque_indexers(layer),
            counted_cuts(layer),
        ):
            return LayerResult.of(layer(*args, **kwargs), hidden)
    except TRACE_ERRORS:
        return LayerResult.of(hidden, hidden)


def find_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers: of ``count`` modules; the one with most parameters among those.

    Lists inside a vision or audio tower stand back: a tower may have as many layers as the language model.

    Raises:
        CheckpointError: ``no-decoder-layers``.
    """
    found = [
        (not _in_tower(path), sum(p.numel() for p in module.parameters()), path, module)
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
    _, _, path, layers = max(found, key=lambda item: (item[0], item[1], -len(item[2])))
    return path, layers


def _in_tower(path: str) -> bool:
    """Whether a module lies in a vision or audio part or in its projector."""
    return component_of(f"{path}.0.weight", 2) in ("vision", "projector")


@contextmanager
def boundaries(
    model: nn.Module, path: str, seen: dict[int, LayerInputs], results: dict[int, LayerResult]
) -> Iterator[None]:
    """Replace every layer of the list at ``path`` by a boundary while the context is open."""
    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    layers = getattr(owner, name)
    try:
        setattr(owner, name, nn.ModuleList(Boundary(layer, i, seen, results) for i, layer in enumerate(layers)))
        yield
    finally:
        setattr(owner, name, layers)


class LossCall(nn.Module):
    """A training step's forward: token ids and labels in, the mean loss out.

    Args:
        model: the whole model, so that names are its names.
        part: path of the part that is called; empty for the model itself.
    """

    def __init__(self, model: nn.Module, part: str) -> None:
        super().__init__()
        self.captured = model
        self.__dict__["part"] = part

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        called = self.captured.get_submodule(self.__dict__["part"])
        loss: torch.Tensor = called(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss


def loss_parts(model: nn.Module, path: str) -> tuple[str, ...]:
    """Modules around the layers that take labels: the model itself, then the parts inside it, outermost first."""
    found = []
    for name, module in model.named_modules():
        around = not name or path.startswith(name + ".")
        if around and "labels" in inspect.signature(type(module).forward).parameters:
            found.append(name)
    return tuple(found)


def trace_skeleton(model: nn.Module, path: str) -> tuple[torch.export.ExportedProgram, dict[int, LayerInputs]]:
    """Export the model without its layers; each layer runs once on meta, outside the trace, to show what it returns.

    Returns:
        The program (inputs: ids and labels ``[BATCH, SEQUENCE]``) and each layer's arguments.

    Raises:
        RuntimeError: the model cannot be called with ids and labels alone, or never calls these layers. Other errors
            are those of the model's own code.
    """
    parts = loss_parts(model, path)
    if not parts:
        raise RuntimeError("no part of the model takes labels")
    for part in parts:
        try:
            return _trace(model, part, path)
        except (AttributeError, TypeError, NotImplementedError):
            if part == parts[-1]:
                raise
    raise AssertionError("the last part returned or raised")


def _trace(model: nn.Module, part: str, path: str) -> tuple[torch.export.ExportedProgram, dict[int, LayerInputs]]:
    ids, labels = (torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta") for _ in range(2))
    call = LossCall(model, part)
    seen: dict[int, LayerInputs] = {}
    results: dict[int, LayerResult] = {}
    with boundaries(model, path, seen, results):
        program = torch.export.export(call, (ids, labels), strict=False)
    if not seen:
        raise RuntimeError(f"the model's forward never calls the layers at {path}")
    return program, seen
