"""Launches of KDA's kernels, and the tensors that pass between them.

Legend: B batch, T tokens, C tokens of a chunk, NT chunks, N documents, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels import device, sound
from shardwright.kernels.gated_delta import launches as scalar_launches
from shardwright.kernels.kda import configs
from shardwright.kernels.kda.chunk_triton import kda_pairs_kernel, kda_widths_kernel
from shardwright.kernels.kda.configs import CHUNK
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.gradients_triton import kda_reverse_kernel
from shardwright.kernels.kda.operands import GATE_CODES, Inputs, Prepared, Settings, Solved, blocks, precision
from shardwright.kernels.kda.triton import kda_gate_kernel, kda_scan_kernel


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


def prepare(inputs: Inputs, docs: Documents, settings: Settings, solved: Solved | None = None) -> Prepared:
    """Everything inside a chunk that does not need the state.

    Args:
        solved: what an earlier call on the same inputs left: then only the rest is made, with the same bits.
    """
    q, HV, K, V, C, NT = inputs.q, inputs.HV, inputs.K, inputs.V, CHUNK, docs.chunks
    total = totals(inputs, docs, settings)
    parts = _solved(inputs, docs) if solved is None else solved
    w, qe, ke = (q.new_empty((NT, HV, C, K)) for _ in range(3))
    found = Prepared(w, q.new_empty((NT, HV, C, V)), qe, ke, parts.p, total, parts.inverse, parts.norms)
    if not inputs.channels:
        scalar_launches.prepare(inputs, docs, settings, found, solved is not None)
        return found
    if solved is None:
        pairs(inputs, docs, settings, found)
    widths(inputs, docs, settings, found)
    return found


def _solved(inputs: Inputs, docs: Documents) -> Solved:
    q, square = inputs.q, (docs.chunks, inputs.HV, CHUNK, CHUNK)
    norms = torch.empty((docs.chunks, inputs.HV, 2, CHUNK), dtype=torch.float32, device=q.device)
    return Solved(q.new_empty(square), q.new_empty(square), norms)


def pairs(inputs: Inputs, docs: Documents, settings: Settings, found: Prepared) -> None:
    """Fills p, the inverse and the norms; reads the running sums."""
    HV, K = inputs.HV, inputs.K
    tile = configs.pairs(K, inputs.V, inputs.value_bytes)
    with device.current(inputs.q):
        sound.start(
            kda_pairs_kernel,
            (HV, docs.chunks),
            inputs.q,
            inputs.k,
            inputs.beta,
            found.total,
            docs.table,
            found.p,
            found.inverse,
            found.norms,
            K**-0.5,
            HV,
            HV // inputs.H,
            K=K,
            BK=min(K, tile.BK),
            SOLVE="tf32x3" if inputs.value_bytes == 4 else configs.SOLVE,
            STAGES=tile.stages,
            **precision(inputs),
            **blocks(settings),
            **tile.options(),
        )


def widths(inputs: Inputs, docs: Documents, settings: Settings, found: Prepared) -> None:
    """Fills w, u and decayed q and k; reads all else."""
    HV, K, V = inputs.HV, inputs.K, inputs.V
    tile = configs.widths(K, V, inputs.value_bytes)
    with device.current(inputs.q):
        sound.start(
            kda_widths_kernel,
            (HV, docs.chunks),
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.beta,
            found.total,
            docs.table,
            found.inverse,
            found.norms,
            found.w,
            found.u,
            found.qe,
            found.ke,
            HV,
            HV // inputs.H,
            K=K,
            V=V,
            BK=min(K, tile.BK),
            BV=min(V, tile.BV),
            C=CHUNK,
            SIGMOID=settings.beta_sigmoid,
            **precision(inputs),
            **tile.options(),
        )


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
    filled = device.multiprocessors(inputs.q)
    tile = configs.scan(K, V, inputs.value_bytes, HV * N, filled, o is not None)
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
    dnew: tuple[Tensor, Tensor] | None,
    first: Tensor | None = None,
) -> None:
    """One launch of the reverse; without ``dstates`` and ``dnew`` only the gradient of the first states is wanted.

    Args:
        dnew: where the new values' gradients go, and where what they lose by rounding does.
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
            *((found.w, found.w) if dnew is None else dnew),
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
