"""Starts of what stands between the products.

Legend: R rows, H hidden, I expert width, F = 2I with a gate (else I).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.grouped_lora_mlp import configs
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.elementwise import activation_bwd_kernel, activation_kernel
from shardwright.kernels.grouped_lora_mlp.rows import Rows
from shardwright.kernels.permute.configs import TILE_ROWS


class BiasPart(NamedTuple):
    """What a biased down stack adds to the routing weights' gradient: ``dout [T, H]`` times ``bias [E, H]``."""

    dout: Tensor
    bias: Tensor


def _fixed(activation: Activation, layout: Layout) -> dict[str, Any]:
    """The kernels' compile-time choices."""
    P0, P1, P2 = activation.parameters
    at = configs.ACTIVATION
    return {
        "STEP": 2 if layout.interleaved else 1,
        "KIND": activation.kind,
        "P0": P0,
        "P1": P1,
        "P2": P2,
        "GATED": activation.gated,
        "BR": at.rows,
        "BN": at.columns,
        "num_warps": at.warps,
        "num_stages": at.stages,
    }


def _grid(rows: Rows) -> tuple[int, int]:
    return rows.tiles.most, -(-TILE_ROWS // configs.ACTIVATION.rows)


def launch_activation(gu: Tensor, rows: Rows, activation: Activation, layout: Layout, h: Tensor) -> None:
    """Fill ``h [R, I] = act(gu [R, F])``."""
    _, first, last = rows.tiles.lists()
    tensors, key = (gu, h, first, last, rows.tiles.count), key_of(rows.token, "activation")
    if again(key, tensors):
        return
    fixed = _fixed(activation, layout)
    with device.current(gu):
        start(key, tensors, activation_kernel, _grid(rows), *tensors, h.shape[1], gu.shape[1], **fixed)


def launch_activation_bwd(
    dh: Tensor,
    rows: Rows,
    activation: Activation,
    layout: Layout,
    gu: Tensor,
    weights: Tensor | None,
    dgu: Tensor,
    part: Tensor | None,
    biased: BiasPart | None = None,
) -> None:
    """Fill ``dgu [R, F]`` from ``dh [R, I]`` and, where given, ``part [R]`` (fp32), of ``biased`` too."""
    if rows.tiles.most == 0:
        return
    dout, bias = (None, None) if biased is None or part is None else biased
    lists = rows.tiles.lists()
    tensors = (dh, gu, dgu, part, weights, dout, bias, rows.tiles.offsets, rows.entry, *lists, rows.tiles.count)
    key = key_of(rows.token, "activation-bwd", part is None, weights is None)
    if again(key, tensors):
        return
    with device.current(dh):
        start(
            key,
            tensors,
            activation_bwd_kernel,
            _grid(rows),
            dh,
            gu,
            dgu,
            dgu if part is None else part,
            dgu if weights is None else weights,
            dgu if dout is None else dout,
            dgu if bias is None else bias,
            rows.tiles.offsets if rows.entry is None else rows.entry,
            *lists,
            rows.tiles.count,
            dh.shape[1],
            gu.shape[1],
            1 if bias is None else bias.shape[1],
            rows.slots,
            WEIGHTED=weights is not None,
            PARTS=part is not None,
            BIAS=bias is not None,
            **_fixed(activation, layout),
        )
