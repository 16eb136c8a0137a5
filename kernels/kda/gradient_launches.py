"""Launches of the gradients inside chunks, and the sums over chunks and grouped heads.

Legend: B batch, T tokens, C tokens of a chunk, NT chunks, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import device, sound
from shardwright.kernels.gated_delta import launches as scalar_launches
from shardwright.kernels.kda import configs
from shardwright.kernels.kda.configs import CHUNK, Tile
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.flow import Flow, Targets, key_operands
from shardwright.kernels.kda.gradients_triton import kda_keys_kernel, kda_strengths_kernel, kda_values_kernel
from shardwright.kernels.kda.keys_hopper import kda_keys_hopper_kernel
from shardwright.kernels.kda.operands import GATE_CODES, Inputs, Settings, blocks, levels, precision


@dataclass
class Gradients:
    """What a backward returns; dq and dk are per key head, those of A_log and dt_bias in their dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None


def on_hopper(inputs: Inputs) -> bool:
    """Whether the keys kernel with layouts chosen by hand runs."""
    return device.capability(inputs.q) == (9, 0) and inputs.value_bytes == 2


def keys_tile(inputs: Inputs) -> Tile:
    """Tile of the keys kernel that runs."""
    return configs.keys_hopper() if on_hopper(inputs) else configs.keys(inputs.K, inputs.V, inputs.value_bytes)


def gradient(inputs: Inputs, docs: Documents, settings: Settings, flow: Flow) -> Gradients:
    """Gradients of all inputs inside their chunks, in parts that bound the workspace, then the sums.

    ``flow.dnew`` and ``flow.dv`` are used up.
    """
    q, H, HV, K, NT = inputs.q, inputs.H, inputs.HV, inputs.K, docs.chunks
    B, T = q.shape[:2]
    groups = HV // H
    kept = q.dtype if groups == 1 else torch.float32
    learns = inputs.A_log is not None
    share = K // min(K, keys_tile(inputs).BK)
    width = (K,) if inputs.channels else ()

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    into = Targets(
        torch.empty((B, T, HV, K), dtype=kept, device=q.device),
        torch.empty((B, T, HV, K), dtype=kept, device=q.device),
        flow.dv,
        torch.empty_like(inputs.g),
        torch.empty_like(inputs.beta),
        fp32(NT, HV, share if inputs.channels else 1) if learns else fp32(1),
        fp32(NT, HV, *width) if learns else fp32(1),
    )
    each = configs.part(NT, HV)
    dp = q.new_empty((min(each, NT), HV, CHUNK, CHUNK))
    da = q.new_empty((min(each, NT), HV, 2 if inputs.channels else 1, CHUNK, CHUNK))
    along = fp32(min(each, NT), HV, 3 if inputs.channels else 2, CHUNK)
    shares = fp32(min(each, NT), HV, 1 + share, CHUNK) if inputs.channels else None
    for low in range(0, NT, each):
        piece = slice(low, min(low + each, NT))
        values(inputs, docs, settings, flow, into, dp, da, along, shares, piece)
        if shares is None:
            scalar_launches.keys(inputs, docs, settings, flow, into, dp, da, along, piece)
        else:
            keys(inputs, docs, settings, flow, into, dp, da, along, shares, piece)
            strengths(inputs, docs, settings, into, shares, piece)
    dq, dk = into.dq, into.dk
    if groups > 1:
        dq, dk = (tensor.view(B, T, H, groups, K).sum(3).to(q.dtype) for tensor in (dq, dk))
    dA_log = into.dspeed.sum((0, 2)).to(inputs.A_log.dtype) if inputs.A_log is not None else None
    ddt_bias = into.dbias.sum(0).to(inputs.dt_bias.dtype) if inputs.dt_bias is not None else None
    return Gradients(dq, dk, into.dv, into.dg, into.dbeta, dA_log, ddt_bias)


def values(
    inputs: Inputs,
    docs: Documents,
    settings: Settings,
    flow: Flow,
    into: Targets,
    dp: Tensor,
    da: Tensor,
    along: Tensor,
    shares: Tensor | None,
    piece: slice,
) -> None:
    """dv, dP, dA of the chunks in ``piece``, and dbeta or the first of its ``shares``; dnew there becomes x."""
    HV, K, V = inputs.HV, inputs.K, inputs.V
    tile = configs.values(K, V, inputs.value_bytes)
    with device.current(inputs.q):
        sound.start(
            kda_values_kernel,
            (HV, piece.stop - piece.start),
            inputs.v,
            inputs.beta,
            docs.table[piece],
            flow.o,
            flow.do,
            flow.found.inverse[piece],
            flow.found.norms[piece],
            flow.found.u[piece],
            flow.dnew[piece],
            into.dv,
            into.dbeta,
            dp,
            da,
            along,
            along if shares is None else shares,
            HV,
            V=V,
            BV=min(V, tile.BV),
            C=CHUNK,
            SIGMOID=settings.beta_sigmoid,
            SHARES=0 if shares is None else shares.shape[2],
            **precision(inputs),
            **tile.options(),
        )


def keys(
    inputs: Inputs,
    docs: Documents,
    settings: Settings,
    flow: Flow,
    into: Targets,
    dp: Tensor,
    da: Tensor,
    along: Tensor,
    shares: Tensor,
    piece: slice,
) -> None:
    """dq, dk, dg of the chunks in ``piece``, and their parts of the gradients of beta and the gate's parameters."""
    HV, K, V = inputs.HV, inputs.K, inputs.V
    tile = keys_tile(inputs)
    BK = min(K, tile.BK)
    grid = (K // BK, HV, piece.stop - piece.start)
    operands = key_operands(inputs, docs, settings, flow, into, (dp, da, along, shares), piece)
    shape = {"K": K, "V": V, "BK": BK, "BV": min(V, tile.BV), "GATE": GATE_CODES[settings.gate], **blocks(settings)}
    with device.current(inputs.q):
        if on_hopper(inputs):
            sound.start(kda_keys_hopper_kernel, grid, *operands, **shape, **tile.options())
        else:
            constants = {**shape, **precision(inputs), **tile.options()}
            sound.start(kda_keys_kernel, grid, *operands, levels(settings), 0, **constants)


def strengths(inputs: Inputs, docs: Documents, settings: Settings, into: Targets, shares: Tensor, piece: slice) -> None:
    """dbeta of the chunks in ``piece`` from its ``shares [.., HV, 1 + K / BK, C]``."""
    tile = configs.strengths()
    with device.current(shares):
        kda_strengths_kernel[(-(-inputs.HV // tile.BK), piece.stop - piece.start)](
            shares,
            inputs.beta,
            docs.table[piece],
            into.dbeta,
            inputs.HV,
            SHARES=shares.shape[2],
            BH=tile.BK,
            C=CHUNK,
            SIGMOID=settings.beta_sigmoid,
            **tile.options(),
        )
