"""Pieces of documents that run side by side, and what a run of chunks does to the state.

A piece's summary reads w, u and ke and writes ``[K, V + K]`` of fp32. The chain of a document of n chunks in p pieces
is 2 n / p chunks long in the forward in place of n, and 5 n / p in the backward in place of 2 n.

Legend: N documents, S pieces, HV value heads, K, V widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from shardwright.kernels import device, sound
from shardwright.kernels.kda import configs, launches
from shardwright.kernels.kda.configs import CHUNK
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.operands import Inputs, Prepared, precision
from shardwright.kernels.kda.segments_triton import kda_combine_kernel, kda_summary_kernel


@dataclass(frozen=True)
class Cut:
    """Documents in pieces."""

    chunks: Tensor
    """``[S + 1]`` int32: first chunk of each piece, and the end."""
    pieces: Tensor
    """``[N + 1]`` int32: first piece of each document, and the end."""


@lru_cache(maxsize=64)
def _tables(bounds: tuple[int, ...], length: int, place: str) -> tuple[Tensor, Tensor]:
    """Tables of pieces of at most ``length`` chunks; keyed by values."""
    chunks, pieces, at = [], [0], 0
    for low, high in pairwise(bounds):
        end = at + -(-(high - low) // CHUNK)
        chunks += list(range(at, end, length))
        pieces.append(len(chunks))
        at = end
    both = (torch.tensor(found, dtype=torch.int32).to(place) for found in ([*chunks, at], pieces))
    first, second = both
    return first, second


def cut(inputs: Inputs, docs: Documents) -> Cut | None:
    """How the documents are cut on this device; ``None`` where whole ones fill it."""
    longest = max(-(-(high - low) // CHUNK) for low, high in pairwise(docs.bounds))
    count = configs.pieces(longest, inputs.HV * docs.count, inputs.V, device.multiprocessors(inputs.q))
    if count == 1:
        return None
    return Cut(*_tables(docs.bounds, -(-longest // count), str(docs.table.device)))


def summaries(inputs: Inputs, docs: Documents, found: Prepared, first: Tensor) -> Tensor:
    """``[N | M]`` of every piece, fp32 ``[S, HV, K, V + K]``.

    Args:
        first: ``[S + 1]``: first chunk of each piece, and the end.
    """
    HV, K, V, S = inputs.HV, inputs.K, inputs.V, first.shape[0] - 1
    summary = torch.empty((S, HV, K, V + K), dtype=torch.float32, device=inputs.q.device)
    tile = configs.summary(K, inputs.value_bytes)
    with device.current(summary):
        sound.start(
            kda_summary_kernel,
            ((V + K) // tile.BV, HV, S),
            found.w,
            found.u,
            found.ke,
            found.total,
            first,
            summary,
            HV,
            K=K,
            V=V,
            BV=tile.BV,
            C=CHUNK,
            CHANNELS=inputs.channels,
            STAGES=tile.stages,
            **precision(inputs),
            **tile.options(),
        )
    return summary


def starts(
    inputs: Inputs,
    docs: Documents,
    summary: Tensor,
    cut: Cut,
    end: Tensor | None,
    *,
    own: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """The state before each piece, fp32 ``[S, HV, K, V]``; ``end`` gets the documents' final states.

    Args:
        own: each piece's own share of the gradient of its first state: then the walk is the backward's, from ``last``
            (the gradient of the final states), and ``end`` gets the gradient of the initial states.
    """
    HV, K, V, N = inputs.HV, inputs.K, inputs.V, docs.count
    found = summary.new_empty((summary.shape[0], HV, K, V))
    begin = last if own is not None else inputs.initial_state
    tile = configs.combine(K)
    with device.current(summary):
        sound.start(
            kda_combine_kernel,
            (V // tile.BV, HV, N),
            summary,
            summary if own is None else own,
            cut.pieces,
            summary if begin is None else begin,
            found,
            summary if end is None else end,
            HV,
            K=K,
            V=V,
            BK=tile.BK,
            BV=tile.BV,
            WITH_INITIAL=begin is not None,
            WITH_FINAL=end is not None,
            REVERSE=own is not None,
            **tile.options(),
        )
    return found


def ends(inputs: Inputs, docs: Documents, found: Prepared, do: Tensor, first: Tensor) -> Tensor:
    """Each piece's own share of the gradient of its first state, fp32 ``[S, HV, K, V]``."""
    shape = (first.shape[0] - 1, inputs.HV, inputs.K, inputs.V)
    own = torch.empty(shape, dtype=torch.float32, device=do.device)
    launches.reverse_documents(inputs, docs, found, do, None, own, None, None, first)
    return own
