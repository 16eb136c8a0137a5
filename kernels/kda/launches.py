"""Launches of KDA's kernels, and the tensors that pass between them.

Legend: B batch, T tokens, C tokens of a chunk, NT chunks, N documents, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels import device, sound
from shardwright.kernels.gated_delta import launches as scalar_launches
from shardwright.kernels.kda import configs
from shardwright.kernels.kda.configs import CHUNK
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.gradients_triton import kda_reverse_kernel
from shardwright.kernels.kda.operands import GATE_CODES, Inputs, Prepared, Settings, blocks, levels, precision
from shardwright.kernels.kda.triton import kda_gate_kernel, kda_prepare_kernel, kda_scan_kernel


def totals(inputs: Inputs, docs: Documents, settings: Settings) -> Tensor:
    """Running sums of log2-decays inside each chunk, fp32 ``[NT, HV, C, K]``; without K where a head has one gate."""
    if not inputs.channels:
        return scalar_launches.totals(inputs, docs, settings)
    HV, K, NT = inputs.HV, inputs.K, docs.chunks
    total = torch.empty((NT, HV, CHUNK, K), dtype=torch.float32, device=inputs.q.device)
    tile = configs.gate(K, inputs.value_bytes)
    with device.current(total):
        kda_gate_kernel[(K // tile.BK, HV, NT)](
            inputs.g,
            total if inputs.A_log is None else inputs.A_log,
            total if inputs.dt_bias is None else inputs.dt_bias,
            docs.table,
            total,
            settings.lower_bound,
            HV,
            K=K,
            BK=tile.BK,
            C=CHUNK,
            GATE=GATE_CODES[settings.gate],
            **tile.options(),
        )
    return total


def prepare(inputs: Inputs, docs: Documents, settings: Settings, backward: bool) -> Prepared:
    """Everything inside a chunk that does not need the state."""
    q, HV, K, V, C, NT = inputs.q, inputs.HV, inputs.K, inputs.V, CHUNK, docs.chunks
    w, qe, ke = (q.new_empty((NT, HV, C, K)) for _ in range(3))
    u, p = q.new_empty((NT, HV, C, V)), q.new_empty((NT, HV, C, C))
    total = totals(inputs, docs, settings)
    inverse = q.new_empty((NT, HV, C, C)) if backward else p
    norms = torch.empty((NT, HV, 2, C), dtype=torch.float32, device=q.device) if backward else total
    found = Prepared(w, u, qe, ke, p, total, inverse, norms)
    if not inputs.channels:
        scalar_launches.prepare(inputs, docs, settings, found, backward)
        return found
    tile = configs.prepare(K, V, inputs.value_bytes)
    with device.current(q):
        sound.start(
            kda_prepare_kernel,
            (HV, NT),
            q,
            inputs.k,
            inputs.v,
            inputs.beta,
            total,
            docs.table,
            w,
            u,
            qe,
            ke,
            p,
            inverse,
            norms,
            K**-0.5,
            HV,
            HV // inputs.H,
            levels(settings),
            CHUNK.bit_length() - 1,
            K=K,
            V=V,
            BK=min(K, tile.BK),
            BV=min(V, tile.BV),
            BACKWARD=backward,
            SOLVE="tf32x3" if inputs.value_bytes == 4 else configs.SOLVE,
            **precision(inputs),
            **blocks(settings),
            **tile.options(),
        )
    return found


def scan_documents(
    inputs: Inputs,
    docs: Documents,
    found: Prepared,
    initial: Tensor | None,
    o: Tensor | None,
    final_state: Tensor | None,
    states: Tensor | None,
    first: Tensor | None = None,
) -> None:
    """One launch of the scan.

    Args:
        first: first chunk of every document and the end, where other pieces than the documents run.
    """
    first = docs.first if first is None else first
    HV, K, V, N = inputs.HV, inputs.K, inputs.V, first.shape[0] - 1
    tile = configs.scan(K, V, inputs.value_bytes, HV * N, device.multiprocessors(inputs.q))
    with device.current(inputs.q):
        sound.start(
            kda_scan_kernel,
            (V // tile.BV, HV, N),
            found.w,
            found.u,
            found.qe,
            found.ke,
            found.p,
            found.total,
            docs.table,
            first,
            found.total if initial is None else initial,
            found.total if final_state is None else final_state,
            found.w if o is None else o,
            found.w if states is None else states,
            HV,
            K=K,
            V=V,
            BV=tile.BV,
            C=CHUNK,
            WITH_INITIAL=initial is not None,
            WITH_FINAL=final_state is not None,
            CHANNELS=inputs.channels,
            OUTPUT=o is not None,
            STATES=states is not None,
            STAGES=tile.stages,
            **precision(inputs),
            **tile.options(),
        )


def reverse_documents(
    inputs: Inputs,
    docs: Documents,
    found: Prepared,
    do: Tensor,
    dfinal: Tensor | None,
    dinitial: Tensor | None,
    dstates: Tensor | None,
    dnew: Tensor | None,
    first: Tensor | None = None,
) -> None:
    """One launch of the reverse; without ``dstates`` and ``dnew`` only the gradient of the first states is wanted.

    Args:
        first: first chunk of every document and the end, where other pieces than the documents run.
    """
    first = docs.first if first is None else first
    HV, K, V, N = inputs.HV, inputs.K, inputs.V, first.shape[0] - 1
    tile = configs.reverse(K, V, inputs.value_bytes, HV * N, device.multiprocessors(do))
    with device.current(do):
        sound.start(
            kda_reverse_kernel,
            (V // tile.BV, HV, N),
            do,
            found.w,
            found.qe,
            found.ke,
            found.p,
            found.total,
            docs.table,
            first,
            found.total if dfinal is None else dfinal,
            found.total if dinitial is None else dinitial,
            found.w if dstates is None else dstates,
            found.w if dnew is None else dnew,
            HV,
            K=K,
            V=V,
            BV=tile.BV,
            C=CHUNK,
            CHUNKS=dnew is not None,
            CHANNELS=inputs.channels,
            WITH_FINAL=dfinal is not None,
            WITH_INITIAL=dinitial is not None,
            STAGES=tile.stages,
            **precision(inputs),
            **tile.options(),
        )
