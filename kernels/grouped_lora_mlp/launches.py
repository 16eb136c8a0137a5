"""Starts of the grouped kernels: descriptors, grids, configurations. Nothing here waits for the device.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, K slots a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shardwright.kernels import device
from shardwright.kernels.grouped_lora_mlp import configs
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.lora_triton import adapter_grad_kernel, shrink_kernel
from shardwright.kernels.grouped_lora_mlp.triton import activation_bwd_kernel, gate_up_kernel, rows_kernel
from shardwright.kernels.permute.configs import TILE_ROWS
from shardwright.kernels.permute.op import Tiles


@dataclass(frozen=True)
class Rows:
    """The sorted rows of one call: their tiles, and where each comes from if they are gathered from tokens."""

    count: int
    """R, an upper bound known to the host."""
    tiles: Tiles
    entry: Tensor | None = None
    """int32 ``[R]``: token · K + slot, or ``None`` where rows lie in expert order already."""
    slots: int = 1


@dataclass(frozen=True)
class LowRank:
    """An adapter's product ``z [R, r]`` and the factor ``b`` that takes it to the wide side.

    ``stride_n`` and ``stride_r`` say how ``b`` lies: [E, N, r] or [E, r, N].
    """

    z: Tensor
    b: Tensor
    rank: int
    stride_n: int
    stride_r: int


def stack(w: Tensor, BN: int, BK: int, n_first: bool) -> TensorDescriptor:
    """Tiles of a weight stack [E, N, K] (``n_first``) or [E, K, N]; a view with any outer strides."""
    return TensorDescriptor(w, list(w.shape), list(w.stride()), [1, BN, BK] if n_first else [1, BK, BN])


def row_tiles(x: Tensor, BK: int) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Tiles of 128, 64 and 32 contiguous rows."""
    a, b, c = (TensorDescriptor(x, list(x.shape), list(x.stride()), [n, BK]) for n in (128, 64, 32))
    return a, b, c


def launch_gate_up(
    x: Tensor,
    gate_up: Tensor,
    rows: Rows,
    low: LowRank | None,
    activation: Activation,
    layout: Layout,
    gu: Tensor | None,
    h: Tensor,
) -> None:
    """Fill ``h [R, I]`` and, where given, the pre-activations ``gu [R, F]``."""
    if rows.tiles.most == 0:
        return
    H, I = x.shape[1], h.shape[1]
    F = (2 if activation.gated else 1) * I
    at = configs.gate_up(x.element_size(), rows.count, rows.tiles.experts)
    n_first, step = layout.order == "out_in", 2 if layout.interleaved else 1
    split = layout.interleaved and not n_first
    fast = gate_up if n_first else gate_up.mT  # [E, F, H], whatever the storage
    gate, up = (fast[:, 0::2], fast[:, 1::2]) if layout.interleaved else (fast[:, :I], fast[:, I:])
    if split:
        gate_desc = up_desc = stack(gate_up, 2 * at.BN, at.BK, False)
    elif activation.gated:
        gate_desc, up_desc = (stack(w if n_first else w.mT, at.BN, at.BK, n_first) for w in (gate, up))
    else:
        gate_desc = up_desc = stack(gate_up, at.BN, at.BK, n_first)
    expert, first, last = rows.tiles.lists()
    P0, P1, P2 = activation.parameters
    with device.current(x):
        gate_up_kernel[(rows.tiles.most * -(-I // at.BN),)](
            x,
            *row_tiles(x, at.BK),
            gate_desc,
            up_desc,
            h if gu is None else gu,
            h,
            rows.tiles.offsets if rows.entry is None else rows.entry,
            h if low is None else low.z,
            h if low is None else low.b,
            expert,
            first,
            last,
            rows.tiles.count,
            H,
            I,
            F,
            1 if low is None else low.rank,
            rows.slots,
            BN=at.BN,
            BK=at.BK,
            GROUP=at.group,
            GATHER=rows.entry is not None,
            EVEN=H % at.BK == 0,
            N_FIRST=n_first,
            SPLIT=split,
            STEP=step,
            KIND=activation.kind,
            P0=P0,
            P1=P1,
            P2=P2,
            GATED=activation.gated,
            SAVE=gu is not None,
            LORA=low is not None,
            RP=16 if low is None else configs.rank_columns(low.rank),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_rows(x: Tensor, w: Tensor, n_first: bool, rows: Rows, low: LowRank | None, y: Tensor) -> None:
    """Fill ``y [R, N]`` from contiguous ``x [R, K]`` and ``w`` [E, N, K] (``n_first``) or [E, K, N]."""
    if rows.tiles.most == 0:
        return
    N, K = y.shape[1], x.shape[1]
    at = configs.rows(x.element_size(), rows.count, rows.tiles.experts)
    expert, first, last = rows.tiles.lists()
    with device.current(x):
        rows_kernel[(rows.tiles.most * -(-N // at.BN),)](
            *row_tiles(x, at.BK),
            stack(w, at.BN, at.BK, n_first),
            y,
            y if low is None else low.z,
            y if low is None else low.b,
            expert,
            first,
            last,
            rows.tiles.count,
            N,
            K,
            1 if low is None else low.rank,
            1 if low is None else low.stride_n,
            1 if low is None else low.stride_r,
            BN=at.BN,
            BK=at.BK,
            GROUP=at.group,
            N_FIRST=n_first,
            LORA=low is not None,
            RP=16 if low is None else configs.rank_columns(low.rank),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def bwd_columns(value_bytes: int, rows: Rows, I: int) -> int:
    """Columns of ``part`` that ``launch_activation_bwd`` fills."""
    return -(-I // configs.activation_bwd(value_bytes, rows.count, rows.tiles.experts).BN)


def launch_activation_bwd(
    dout: Tensor,
    down: Tensor,
    rows: Rows,
    low: LowRank | None,
    activation: Activation,
    layout: Layout,
    gu: Tensor,
    weights: Tensor | None,
    dgu: Tensor,
    part: Tensor | None,
) -> None:
    """Fill ``dgu [R, F]`` and, where given, ``part [R, columns]`` (fp32), from ``dout`` of tokens or rows."""
    if rows.tiles.most == 0:
        return
    H, F = dout.shape[1], gu.shape[1]
    I = F // (2 if activation.gated else 1)
    at = configs.activation_bwd(dout.element_size(), rows.count, rows.tiles.experts)
    n_first = layout.order == "in_out"  # the product runs over H: stored [E, H, I] means depth first
    expert, first, last = rows.tiles.lists()
    P0, P1, P2 = activation.parameters
    with device.current(dout):
        activation_bwd_kernel[(rows.tiles.most * -(-I // at.BN),)](
            dout,
            *row_tiles(dout, at.BK),
            stack(down, at.BN, at.BK, n_first),
            gu,
            dgu,
            dgu if part is None else part,
            dgu if weights is None else weights,
            rows.tiles.offsets if rows.entry is None else rows.entry,
            dgu if low is None else low.z,
            dgu if low is None else low.b,
            expert,
            first,
            last,
            rows.tiles.count,
            H,
            I,
            F,
            1 if low is None else low.rank,
            rows.slots,
            BN=at.BN,
            BK=at.BK,
            GROUP=at.group,
            GATHER=rows.entry is not None,
            EVEN=H % at.BK == 0,
            N_FIRST=n_first,
            STEP=2 if layout.interleaved else 1,
            KIND=activation.kind,
            P0=P0,
            P1=P1,
            P2=P2,
            GATED=activation.gated,
            WEIGHTED=weights is not None,
            PARTS=part is not None,
            LORA=low is not None,
            RP=16 if low is None else configs.rank_columns(low.rank),
            STRIP=configs.STRIP_ROWS,
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_shrink(
    x: Tensor, a: Tensor, stride_n: int, stride_r: int, scaling: float, rows: Rows, gather: bool, z: Tensor
) -> None:
    """Fill ``z [R, r] = scaling · x A``; ``a`` is [E, N, r] in the given strides, x tokens (gather) or rows."""
    if rows.tiles.most == 0:
        return
    expert, first, last = rows.tiles.lists()
    gathered = gather and rows.entry is not None
    with device.current(x):
        shrink_kernel[(rows.tiles.most, -(-TILE_ROWS // configs.SHRINK_ROWS))](
            x,
            a,
            z,
            rows.entry if gathered else rows.tiles.offsets,
            expert,
            first,
            last,
            rows.tiles.count,
            scaling,
            x.shape[1],
            z.shape[1],
            rows.slots,
            stride_n,
            stride_r,
            GATHER=gathered,
            BR=configs.SHRINK_ROWS,
            BN=configs.SHRINK_COLUMNS,
            RP=configs.rank_columns(z.shape[1]),
            num_warps=configs.SHRINK_WARPS,
            num_stages=configs.SHRINK_STAGES,
        )


def launch_adapter_grad(
    q: Tensor, p: Tensor, rows: Rows, gather: bool, weights: Tensor | None, out: Tensor, stride_n: int, stride_r: int
) -> None:
    """Fill ``out`` ([E, N, r] in the given strides) with each expert's ``Σ q[row]ᵀ p[row]``."""
    N, r = q.shape[1], p.shape[1]
    gathered = gather and rows.entry is not None
    with device.current(q):
        adapter_grad_kernel[(-(-N // configs.GRAD_COLUMNS), rows.tiles.experts)](
            q,
            p,
            out,
            rows.tiles.offsets if rows.entry is None else rows.entry,
            p if weights is None else weights,
            rows.tiles.offsets,
            N,
            r,
            rows.slots,
            stride_n,
            stride_r,
            GATHER=gathered,
            WEIGHTED=weights is not None,
            BR=configs.GRAD_ROWS,
            BN=configs.GRAD_COLUMNS,
            RP=configs.rank_columns(r),
            num_warps=configs.GRAD_WARPS,
            num_stages=configs.GRAD_STAGES,
        )
