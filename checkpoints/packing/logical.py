"""File tensors grouped into logical weights: packed values and their scales count as one weight tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Format = Literal["plain", "fp8-block", "mxfp4", "gpt-oss-mxfp4", "int4-group"]


class StoredTensor(Protocol):
    """What grouping needs to know of a file tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def stored_bytes(self) -> int: ...


Table = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One weight as the model sees it.

    Attributes:
        name: the weight's name without packing suffixes.
        shape: logical shape, packing undone.
        values: the file tensor that holds the values.
        companions: file tensors that hold scales, zero points or shapes.
        block: logical elements that share one scale, per trailing dim; empty when unscaled.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    values: str
    companions: tuple[str, ...] = ()
    block: tuple[int, ...] = ()


Rule = Callable[[str, Table], LogicalTensor | None]
"""Looks at one file tensor; answers with the logical weight whose values it holds, or ``None``."""
