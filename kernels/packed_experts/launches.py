"""Starts of the packed kernels: descriptors, grids, configurations. Nothing here waits for the device.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, N out and K in of a stack.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.grouped_lora_mlp.contract import Activation
from shardwright.kernels.grouped_lora_mlp.rows import LowRank, Rows
from shardwright.kernels.packed_experts import configs
from shardwright.kernels.packed_experts.backward_triton import packed_activation_bwd_kernel, packed_dx_kernel
from shardwright.kernels.packed_experts.configs import Pieces
from shardwright.kernels.packed_experts.copies_triton import dequantise_kernel, zero_tail_kernel
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.kernels.packed_experts.triton import packed_gate_up_kernel, packed_rows_kernel
from shardwright.kernels.permute.configs import WARPS, power_of_two
from shardwright.kernels.permute.op import Tiles
from shardwright.kernels.permute.triton import tile_kernel


def make_rows(counts: Tensor, R: int, most_rows: int, token: object | None = None) -> Rows:
    """The tile list of ``counts [E]``, with tiles of at most ``most_rows`` rows."""
    E = counts.shape[0]
    most = R // most_rows + min(R, E)
    whole = -(-(E + 1) // 4) * 4
    buffer = torch.empty(whole + 4 + 3 * 4 * -(-max(most, 1) // 4), dtype=torch.int32, device=counts.device)
    tiles = Tiles(buffer, E, most)
    expert, first, last = tiles.lists()
    rows = Rows(R, tiles, token=token)
    tensors, key = (counts, tiles.offsets, expert, first, last, tiles.count), key_of(token, "tiles")
    if again(key, tensors):
        return rows
    with device.current(counts):
        start(
            key,
            tensors,
            tile_kernel,
            (1,),
            counts,
            tiles.offsets,
            expert,
            first,
            last,
            tiles.count,
            E,
            TILE=most_rows,
            BINS=power_of_two(E),
            num_warps=WARPS,
        )
    return rows


def _row_tiles(x: Tensor, pieces: Pieces, BK: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    a, b = (TensorDescriptor(x, list(x.shape), list(x.stride()), [n, BK]) for n in (pieces.BA, pieces.BB or pieces.BA))
    return a, b


def _stack(values: Tensor, BN: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor(values, list(values.shape), list(values.stride()), [1, BN, depth])


def _bytes(stack: PackedStack, columns: int) -> int:
    """Stored elements of ``columns`` weights along the packed dim."""
    return columns // 2 if stack.kind == "mxfp4" else columns


def launch_gate_up(
    x: Tensor,
    w: PackedStack,
    interleaved: bool,
    rows: Rows,
    pieces: Pieces,
    low: LowRank | None,
    activation: Activation,
    gu: Tensor | None,
    h: Tensor,
) -> None:
    """Fill ``h [R, I]`` and, where given, the pre-activations ``gu [R, F]``."""
    if rows.tiles.most == 0:
        return
    H, I, at = x.shape[1], h.shape[1], configs.GATE_UP
    F = (2 if activation.gated else 1) * I
    v, up = w.values, None
    gate = v
    if activation.gated:
        gate, up = (v[:, 0::2], v[:, 1::2]) if interleaved else (v[:, :I], v[:, I:])
    expert, first, last = rows.tiles.lists()
    P0, P1, P2 = activation.parameters
    z, b = (None, None) if low is None else (low.z, low.b)
    tensors = (x, gate, up, w.scales, gu, h, z, b, expert, first, last, rows.tiles.count)
    key = key_of(rows.token, "gate_up", gu is None)
    if again(key, tensors):
        return
    gate_desc = _stack(gate, at.BN, _bytes(w, 64))
    up_desc = gate_desc if up is None else _stack(up, at.BN, _bytes(w, 64))
    with device.current(x):
        start(
            key,
            tensors,
            packed_gate_up_kernel,
            (rows.tiles.most * -(-I // at.BN),),
            *_row_tiles(x, pieces, 64),
            gate_desc,
            up_desc,
            w.scales,
            h if gu is None else gu,
            h,
            h if low is None else low.z,
            h if low is None else low.b,
            expert,
            first,
            last,
            rows.tiles.count,
            H=H,
            I=I,
            F=F,
            RANK=1 if low is None else low.rank,
            BA=pieces.BA,
            BB=pieces.BB,
            BN=at.BN,
            GROUP=at.group,
            MX=w.kind == "mxfp4",
            ASM=not device.interpreted(),
            STEP=2 if interleaved else 1,
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


def launch_down(x: Tensor, w: PackedStack, rows: Rows, pieces: Pieces, low: LowRank | None, y: Tensor) -> None:
    """Fill ``y [R, N] = x [R, K] Wᵀ (+ z Bᵀ)``; ``low.b`` is [E, N, r]."""
    if rows.tiles.most == 0:
        return
    N, K, at = y.shape[1], x.shape[1], configs.ALONG
    expert, first, last = rows.tiles.lists()
    z, b = (None, None) if low is None else (low.z, low.b)
    tensors = (x, w.values, w.scales, y, z, b, expert, first, last, rows.tiles.count)
    key = key_of(rows.token, "down")
    if again(key, tensors):
        return
    with device.current(x):
        start(
            key,
            tensors,
            packed_rows_kernel,
            (rows.tiles.most * -(-N // at.BN),),
            *_row_tiles(x, pieces, 64),
            _stack(w.values, at.BN, _bytes(w, 64)),
            w.scales,
            y,
            y if low is None else low.z,
            y if low is None else low.b,
            expert,
            first,
            last,
            rows.tiles.count,
            N=N,
            K=K,
            RANK=1 if low is None else low.rank,
            BA=pieces.BA,
            BB=pieces.BB,
            BN=at.BN,
            GROUP=at.group,
            MX=w.kind == "mxfp4",
            ASM=not device.interpreted(),
            LORA=low is not None,
            RP=16 if low is None else configs.rank_columns(low.rank),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_activation_bwd(
    dy: Tensor,
    w: PackedStack,
    interleaved: bool,
    rows: Rows,
    pieces: Pieces,
    low: LowRank | None,
    activation: Activation,
    gu: Tensor,
    dgu: Tensor,
) -> None:
    """Fill ``dgu [R, F]`` from ``dy [R, H]``; ``low.b`` is the down adapter's a, [E, r, I]."""
    if rows.tiles.most == 0:
        return
    H, F, at = dy.shape[1], gu.shape[1], configs.ACTIVATION_BWD
    I = F // (2 if activation.gated else 1)
    expert, first, last = rows.tiles.lists()
    P0, P1, P2 = activation.parameters
    z, b = (None, None) if low is None else (low.z, low.b)
    tensors = (dy, w.values, w.scales, gu, dgu, z, b, expert, first, last, rows.tiles.count)
    key = key_of(rows.token, "activation-bwd")
    if again(key, tensors):
        return
    with device.current(dy):
        start(
            key,
            tensors,
            packed_activation_bwd_kernel,
            (rows.tiles.most * -(-I // at.BN),),
            *_row_tiles(dy, pieces, at.BK),
            _stack(w.values, at.BK, at.BN // 2),
            w.scales,
            gu,
            dgu,
            dgu if low is None else low.z,
            dgu if low is None else low.b,
            expert,
            first,
            last,
            rows.tiles.count,
            H=H,
            I=I,
            F=F,
            RANK=1 if low is None else low.rank,
            BA=pieces.BA,
            BB=pieces.BB,
            BN=at.BN,
            BK=at.BK,
            GROUP=at.group,
            MX=w.kind == "mxfp4",
            ASM=not device.interpreted(),
            STEP=2 if interleaved else 1,
            KIND=activation.kind,
            P0=P0,
            P1=P1,
            P2=P2,
            GATED=activation.gated,
            LORA=low is not None,
            RP=16 if low is None else configs.rank_columns(low.rank),
            STRIP=configs.STRIP_ROWS,
            num_warps=at.warps,
            num_stages=at.stages,
        )


def launch_dx(dgu: Tensor, w: PackedStack, rows: Rows, pieces: Pieces, low: LowRank | None, dx: Tensor) -> None:
    """Fill ``dx [R, H] = dgu [R, F] W (+ t A)``; ``low.b`` is the up adapter's a, [E, r, H]."""
    if rows.tiles.most == 0:
        return
    N, K, at = dx.shape[1], dgu.shape[1], configs.ACROSS
    expert, first, last = rows.tiles.lists()
    z, b = (None, None) if low is None else (low.z, low.b)
    tensors = (dgu, w.values, w.scales, dx, z, b, expert, first, last, rows.tiles.count)
    key = key_of(rows.token, "dx")
    if again(key, tensors):
        return
    with device.current(dgu):
        start(
            key,
            tensors,
            packed_dx_kernel,
            (rows.tiles.most * -(-N // at.BN),),
            *_row_tiles(dgu, pieces, at.BK),
            _stack(w.values, at.BK, at.BN // 2),
            w.scales,
            dx,
            dx if low is None else low.z,
            dx if low is None else low.b,
            expert,
            first,
            last,
            rows.tiles.count,
            N=N,
            K=K,
            RANK=1 if low is None else low.rank,
            BA=pieces.BA,
            BB=pieces.BB,
            BN=at.BN,
            BK=at.BK,
            GROUP=at.group,
            MX=w.kind == "mxfp4",
            ASM=not device.interpreted(),
            LORA=low is not None,
            RP=16 if low is None else configs.rank_columns(low.rank),
            num_warps=at.warps,
            num_stages=at.stages,
        )


def dequantise(w: PackedStack) -> Tensor:
    """The bf16 weight [E, N, K] of a stack, in fresh memory."""
    E, N, K = w.shape
    out = torch.empty((E, N, K), dtype=torch.bfloat16, device=w.values.device)
    columns, rows = 64 * configs.DEQUANTISE_BLOCKS, configs.DEQUANTISE_ROWS_A_PROGRAM
    with device.current(out):
        dequantise_kernel[(-(-K // columns), -(-N // rows), E)](
            w.values,
            w.scales,
            out,
            N=N,
            K=K,
            BLOCKS=configs.DEQUANTISE_BLOCKS,
            BN=rows,
            MX=w.kind == "mxfp4",
            ASM=not device.interpreted(),
            num_warps=configs.DEQUANTISE_WARPS,
        )
    return out


def launch_zero_tail(role: str, y: Tensor, tiles: Tiles, token: object | None = None) -> None:
    """Zero the rows of ``y [R, H]`` that belong to no expert."""
    R, H = y.shape
    if R == 0:
        return
    tensors, key = (y, tiles.offsets), key_of(token, role)
    if again(key, tensors):
        return
    with device.current(y):
        start(
            key,
            tensors,
            zero_tail_kernel,
            (-(-R // configs.TAIL_ROWS),),
            y,
            tiles.offsets,
            R,
            tiles.experts,
            H=H,
            ROWS=configs.TAIL_ROWS,
            COLUMNS=configs.TAIL_COLUMNS,
            num_warps=configs.TAIL_WARPS,
        )
