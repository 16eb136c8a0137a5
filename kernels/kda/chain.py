"""The state from chunk to chunk, and its gradient: whole documents, or their pieces side by side.

A document that would leave the device idle is cut (``configs.pieces``): its pieces run at once, each from its own
first state, which the pieces' summaries give.

Legend: C tokens of a chunk, NT chunks, N documents, HV value heads, K, V widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.kda import launches, segments
from shardwright.kernels.kda.configs import CHUNK
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.operands import Inputs, Prepared


def scan(
    inputs: Inputs,
    docs: Documents,
    found: Prepared,
    *,
    o: Tensor | None = None,
    final_state: Tensor | None = None,
    states: Tensor | None = None,
) -> None:
    """The state from chunk to chunk: fills what is given; with ``states`` u becomes the new values."""
    cut = segments.cut(inputs, docs)
    if cut is None:
        launches.scan_documents(inputs, docs, found, inputs.initial_state, o, final_state, states)
        return
    summary = segments.summaries(inputs, docs, found, cut.chunks)
    starts = segments.starts(inputs, docs, summary, cut, final_state)
    launches.scan_documents(inputs, docs, found, starts, o, None, states, cut.chunks)


def reverse(
    inputs: Inputs,
    docs: Documents,
    found: Prepared,
    do: Tensor,
    dfinal: Tensor | None,
    dinitial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the state after each chunk ``[NT, HV, K, V]`` and of the new values ``[NT, HV, C, V]``, and what the
    latter lost by rounding, like v."""
    HV, K, V, NT = inputs.HV, inputs.K, inputs.V, docs.chunks
    dstates, dnew = do.new_empty((NT, HV, K, V)), do.new_empty((NT, HV, CHUNK, V))
    lost = torch.empty_like(inputs.v)
    cut = segments.cut(inputs, docs)
    if cut is None:
        launches.reverse_documents(inputs, docs, found, do, dfinal, dinitial, dstates, (dnew, lost))
        return dstates, dnew, lost
    summary = segments.summaries(inputs, docs, found, cut.chunks)
    own = segments.ends(inputs, docs, found, do, cut.chunks)
    after = segments.starts(inputs, docs, summary, cut, dinitial, own=own, last=dfinal)
    launches.reverse_documents(inputs, docs, found, do, after, None, dstates, (dnew, lost), cut.chunks)
    return dstates, dnew, lost
