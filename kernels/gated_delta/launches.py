"""Launches where a head has one gate: what is inside a chunk, and its gradients.

Legend: T tokens, C tokens of a chunk, NT chunks, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels import device, sound
from shardwright.kernels.gated_delta.triton import scalar_gate_kernel, scalar_keys_kernel, scalar_prepare_kernel
from shardwright.kernels.kda import configs
from shardwright.kernels.kda.configs import CHUNK
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.flow import Flow, Targets, key_operands
from shardwright.kernels.kda.operands import GATE_CODES, Inputs, Prepared, Settings, precision


def totals(inputs: Inputs, docs: Documents, settings: Settings) -> Tensor:
    """Running sums of log2-decays inside each chunk, fp32 ``[NT, HV, C]``."""
    HV, NT = inputs.HV, docs.chunks
    total = torch.empty((NT, HV, CHUNK), dtype=torch.float32, device=inputs.q.device)
    tile = configs.scalar_gate()
    with device.current(total):
        scalar_gate_kernel[(-(-HV // tile.BK), NT)](
            inputs.g,
            total if inputs.A_log is None else inputs.A_log,
            total if inputs.dt_bias is None else inputs.dt_bias,
            docs.table,
            total,
            settings.lower_bound,
            HV,
            BH=tile.BK,
            C=CHUNK,
            GATE=GATE_CODES[settings.gate],
            **tile.options(),
        )
    return total


def prepare(inputs: Inputs, docs: Documents, settings: Settings, found: Prepared, solved: bool) -> None:
    """Fills ``found`` but for its running sums, which it reads; ``solved`` says that p, the inverse and the norms are
    there already."""
    HV, K, V = inputs.HV, inputs.K, inputs.V
    tile = configs.scalar_prepare(K, V, inputs.value_bytes)
    with device.current(inputs.q):
        sound.start(
            scalar_prepare_kernel,
            (HV, docs.chunks),
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.beta,
            found.total,
            docs.table,
            found.w,
            found.u,
            found.qe,
            found.ke,
            found.p,
            found.inverse,
            found.norms,
            K**-0.5,
            HV,
            HV // inputs.H,
            CHUNK.bit_length() - 1,
            K=K,
            V=V,
            BK=min(K, tile.BK),
            BV=min(V, tile.BV),
            C=CHUNK,
            SIGMOID=settings.beta_sigmoid,
            SOLVED=solved,
            SOLVE="tf32x3" if inputs.value_bytes == 4 else configs.SOLVE,
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
    piece: slice,
) -> None:
    """dq, dk, dg of the chunks in ``piece``, and their shares of the gate's parameters."""
    HV, K, V = inputs.HV, inputs.K, inputs.V
    tile = configs.scalar_keys(K, V, inputs.value_bytes)
    with device.current(inputs.q):
        sound.start(
            scalar_keys_kernel,
            (HV, piece.stop - piece.start),
            *key_operands(inputs, docs, settings, flow, into, (dp, da, along), piece),
            K=K,
            V=V,
            BK=min(K, tile.BK),
            BV=min(V, tile.BV),
            C=CHUNK,
            GATE=GATE_CODES[settings.gate],
            SIGMOID=settings.beta_sigmoid,
            **precision(inputs),
            **tile.options(),
        )
