"""One captured layer of each kind as a graph of tensor operations."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from shardwright.schemas.base import CountInt, Model, Sha256


class TensorSpec(Model):
    """Shape, dtype and strides of one value."""

    shape: tuple[CountInt, ...]
    dtype: str
    stride: tuple[int, ...] = ()


class OpNode(Model):
    """One operation, with where it comes from."""

    id: str
    """Stable inside the graph: position in canonical order."""
    kind: Literal["input", "parameter", "buffer", "op", "output"]
    target: str
    """Canonical operator name (``linear``, ``mul``, ``experts``) or parameter name."""
    inputs: tuple[str, ...] = ()
    arguments: dict[str, JsonValue] = {}
    """Constants bound in the call, by parameter name."""
    output: TensorSpec | None = None
    module_path: str = ""
    module_class: str = ""
    source: str = ""
    """``file.py:line`` inside its package; never an absolute path."""


class LayerGraph(Model):
    """The graph of one kind of region and where it occurs."""

    kind: str
    """A layer kind of the profile, or ``embedding``, ``final``, ``loss``."""
    module_path: str
    """Of the captured instance."""
    occurrences: tuple[str, ...]
    """Module paths of all instances built alike."""
    nodes: tuple[OpNode, ...]
    capture: Literal["export", "make_fx", "opaque"]
    digest: Sha256
    """Hash of the canonical nodes without names and sources."""


class OpGraph(Model):
    """All layer graphs of a model."""

    schema_version: Literal[1] = 1
    layers: tuple[LayerGraph, ...]
    torch_version: str
    transformers_version: str
    capture_dtype: str
    sequence_tokens: CountInt
