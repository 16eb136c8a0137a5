"""An adapter cut along the published (hub) names of the weights that it adapts.

The training model stacks experts and may merge projections; files on the hub keep one weight for each. With
W [out, in] += s · B A, rows ``first … last`` of W get s · B[first:last] A: both halves of a merged one share A.
Legend: E experts, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwright.checkpoints.build import build_from_config, state_shapes
from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.headers import Headers, read_headers
from shardwright.checkpoints.names import NameMap
from shardwright.runtime.lora.inject import adapter_names, adapter_shapes
from shardwright.schemas.errors import RunError
from shardwright.schemas.lora import LoraTarget

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """What one target changes in one file tensor.

    Attributes:
        tensor: logical name in the files.
        target: the adapted parameter.
        expert: its index, or ``None`` for a dense target.
        rows, columns: the part of W [out, in].
        box: the part of the file tensor.
        transposed: the file keeps [in, out].
        stacked: the file tensor has a dim of experts of its own.
    """

    tensor: str
    target: LoraTarget
    expert: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]
    box: Box
    transposed: bool
    stacked: bool

    def halves(self, adapters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A [r, columns] and B [rows, r] of this part."""
        a, b = (adapters[name] for name in adapter_names(self.target))
        if self.expert is not None and not self.target.shared:
            a, b = a[self.expert], b[self.expert]
        return a[:, slice(*self.columns)], b[slice(*self.rows)]

    def delta(self, adapters: dict[str, Tensor]) -> Tensor:
        """s · B A in fp32, in the order of the file's last two dims."""
        a, b = self.halves(adapters)
        change = float(self.target.scaling) * (b.float() @ a.float())
        return change.T if self.transposed else change


def name_map(checkpoint: Path) -> tuple[NameMap, Headers]:
    """File names of the checkpoint's parameters."""
    config, headers = read_config(checkpoint), read_headers(checkpoint)
    model = build_from_config(config, torch.bfloat16)
    return NameMap.for_checkpoint(config, headers, state_shapes(model), model), headers


def parts(targets: tuple[LoraTarget, ...], names: NameMap) -> list[Part]:
    """Every target along its file tensors; packed weights under their logical names."""
    found = []
    for target in targets:
        for piece in names.pieces(target.parameter):
            if target.kind == "dense":
                rows, columns, axes = piece.target[0], piece.target[1], piece.axes
                found.append(Part(piece.tensor, target, None, rows, columns, piece.source, axes == (1, 0), False))
                continue
            first, second = piece.target[1], piece.target[2]
            rows, columns = (first, second) if target.layout == "out_in" else (second, first)
            stacked = piece.axes[0] is not None
            in_order = [axis for axis in piece.axes[1:]]
            swapped = in_order != sorted(in_order, key=lambda axis: -1 if axis is None else axis)
            transposed = swapped != (target.layout == "in_out")
            for expert in range(*piece.target[0]):
                box = _of_expert(piece.source, piece.axes[0], expert - piece.target[0][0])
                found.append(Part(piece.tensor, target, expert, rows, columns, box, transposed, stacked))
    return found


def _of_expert(source: Box, axis: int | None, offset: int) -> Box:
    if axis is None:
        return source
    place = source[axis][0] + offset
    return tuple((place, place + 1) if dim == axis else extent for dim, extent in enumerate(source))


def require_adapters(targets: tuple[LoraTarget, ...], adapters: dict[str, Tensor]) -> None:
    """Every target has both halves in the plan's sizes.

    Raises:
        RunError: ``adapter-shape``.
    """
    for target in targets:
        for name, shape in zip(adapter_names(target), adapter_shapes(target), strict=True):
            value = adapters.get(name)
            if value is None or tuple(value.shape) != shape:
                raise RunError(
                    "adapter-shape",
                    f"the save holds {'nothing' if value is None else list(value.shape)}, the plan says {list(shape)}",
                    where=name,
                    next_action="export with the plan that the run was made with",
                )
