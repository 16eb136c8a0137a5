"""Delta-rule layers over cut sequences: states pass between pieces, and the inputs before a piece; tokens do not.

A rank runs the last document of each of its pieces with the values ``[v | 0]`` from the state ``[0 | I]``: what comes
out is ``[N | M]`` of ``S⁺ = M S + N``. All ranks gather those of all pieces, in fp32, so each knows the states before
its own, and runs its tokens from there. Where a document begins in a piece nothing passes it: M is zero. The
convolution gathers the J − 1 inputs before each piece, zeros where they belong to another document. All of it is
differentiable.

Legend: B rows, T tokens of a rank, P of a piece, N parts of documents, H heads, K, V widths, C channels, J taps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.runtime.context import Cut, gather_pieces
from shardwright.schemas.errors import LegalityError

Recurrence = Callable[[list[Tensor], tuple[int, ...], Tensor], tuple[Tensor, Tensor]]
"""Query, key, value, log-decay and step size [1, t, …] of parts with such bounds, and the states [N, H, K, V] before
them → outputs [1, t, H, V] and the states after."""


def delta_rule(run: Recurrence, streams: tuple[Tensor, ...], cut: Cut) -> Tensor:
    """[B, T, H, V] of this rank's tokens.

    Args:
        run: the recurrence.
        streams: query, key, value, log-decay and step size [B, T, …], the value in the third place.
    """
    rows, value = len(streams[0]), streams[2]
    heads, K, V = value.shape[2], streams[1].shape[-1], value.shape[-1]
    flat = [stream.reshape(1, -1, *stream.shape[2:]) for stream in streams]
    arrived = _arriving(gather_pieces(_effects(run, flat, cut, heads, K), cut.place), V, cut)
    continues = torch.tensor(cut.packed.continues, device=value.device).view(-1, 1, 1, 1)
    first = torch.tensor(cut.packed.first, device=value.device)
    states = arrived.new_zeros((len(cut.packed.sizes), heads, K, V))
    states = states.index_copy(0, first, torch.where(continues, arrived, 0))
    return run(flat, cut.packed.bounds, states)[0].reshape(rows, -1, heads, V)


def _effects(run: Recurrence, flat: list[Tensor], cut: Cut, heads: int, K: int) -> Tensor:
    """``[N | M]`` of this rank's pieces, [2, B, H, K, V + K], fp32 at least; M is zero where a document begins."""
    packed, V = cut.packed, flat[2].shape[-1]
    spans = [slice(packed.bounds[part], packed.bounds[part + 1]) for part in packed.last]
    whole = len(packed.sizes) == len(spans)
    q, k, v, g, beta = flat if whole else [torch.cat([one[:, span] for span in spans], dim=1) for one in flat]
    bounds = [0]
    for span in spans:
        bounds.append(bounds[-1] + span.stop - span.start)
    kind = torch.promote_types(v.dtype, torch.float32)
    passes = torch.tensor(packed.passes, device=v.device, dtype=kind).view(-1, 1, 1, 1)
    moved = passes * torch.eye(K, device=v.device, dtype=kind).expand(len(spans), heads, K, K)
    states = F.pad(moved, (V, 0))
    after = run([q, k, F.pad(v, (0, K)), g, beta], tuple(bounds), states)[1].to(kind)
    return after.unflatten(0, (-1, 2)).transpose(0, 1)


def _arriving(effects: Tensor, V: int, cut: Cut) -> Tensor:
    """The states before this rank's pieces [2·B, H, K, V], from ``[N | M]`` of all pieces [2·cp, B, H, K, V + K]."""
    state, found = torch.zeros_like(effects[0, ..., :V]), []
    for piece, effect in enumerate(effects[: max(cut.place.pieces) + 1]):
        if piece in cut.place.pieces:
            found.append(state)
        state = effect[..., :V] + effect[..., V:] @ state
    return torch.stack(found, dim=1).flatten(0, 1)


def inputs_before(x: Tensor, before: int, cut: Cut) -> Tensor:
    """[2·B, before, C]: the inputs before each of this rank's pieces of x [B, T, C]; zeros of other documents.

    Raises:
        LegalityError: ``context-length`` where a piece is shorter than that.
    """
    if cut.piece < before:
        raise LegalityError(
            "context-length",
            f"pieces of {cut.piece} tokens, a convolution looks back {before}",
            where="decision.strategy.mesh.cp",
            next_action="choose longer sequences, or a smaller cp",
        )
    tails = torch.stack([piece[:, cut.piece - before :] for piece in x.split(cut.piece, dim=1)])
    whole = gather_pieces(tails, cut.place)
    earlier = torch.cat((torch.zeros_like(whole[:1]), whole))[list(cut.place.pieces)].transpose(0, 1).flatten(0, 1)
    back = torch.arange(before, 0, -1, device=x.device)
    inside = cut.positions[:, :: cut.piece].reshape(-1, 1) >= back
    return torch.where(inside.unsqueeze(-1), earlier, 0)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """Depthwise causal convolution of this rank's tokens: x [B, T, C], weight [C, J], the last tap on the token itself.

    Raises:
        LegalityError: ``context-length``.
    """
    before = weight.shape[-1] - 1
    wide = x.to(weight.dtype)
    pieces = wide.unflatten(1, (2, cut.piece)).flatten(0, 1)
    row = torch.cat((inputs_before(wide, before, cut), pieces), dim=1)
    place = cut.positions.reshape(-1, cut.piece, 1)
    out = pieces * weight[:, -1]
    for back in range(1, before + 1):
        earlier = row[:, before - back : before - back + cut.piece]
        out = out + torch.where(place >= back, earlier, 0) * weight[:, before - back]
    out = out.unflatten(0, (-1, 2)).flatten(1, 2)
    return (out if bias is None else out + bias).to(x.dtype)
