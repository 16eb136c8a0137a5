"""Inputs of the cases of sparse attention, drawn by seed; how its selections are drawn is named by a kind.

Legend: T queries, S keys, H query heads, G key heads, V width of the latent (of q, k, v in the grouped form), R
rotated width, K entries, B keys of an entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.cases import Shape, normal, normal_on_device
from shardwright.kernels.dsa.attention.visibility import bounds_of

CAUSAL, SHARED, HOLES = 0, 1, 2
"""Kinds of selection: random of what is visible, the rest -1 at the end; the same keys for all queries; -1 anywhere,
with rows of a single key and of none."""

BLOCK_OF = {6: 1, 2: 16, 3: 8, 4: 32, 5: 64, 32: 64, 64: 32}
"""Entries of a row of the grouped cases → keys of an entry."""

MOST_DRAWN = 1 << 26
"""Random numbers alive at once while a large selection is drawn on the device."""


def selection(at: Tensor, S: int, K: int, kind: int, seed: int) -> Tensor:
    """``[T, K]`` int32 for queries that see the keys (blocks) up to ``at [T]``."""
    T, device = at.shape[0], at.device
    step = max(1, MOST_DRAWN // max(1, S))
    generator = torch.Generator(device).manual_seed(seed)
    found = torch.full((T, K), -1, dtype=torch.int32, device=device)
    keys = torch.arange(S, device=device)
    for start in range(0, T, step):
        run = slice(start, min(start + step, T))
        drawn = torch.rand((len(at[run]), S), generator=generator, device=device)
        if kind == SHARED:
            drawn = (S - keys).to(drawn.dtype).expand_as(drawn)
        else:
            drawn = drawn.masked_fill(keys[None] > at[run][:, None], -1)
        best, key = drawn.topk(min(K, S), -1)
        found[run, : min(K, S)] = key.masked_fill(best < 0, -1).to(torch.int32)
    if kind == HOLES and T:
        found = torch.where(torch.rand((T, K), generator=generator, device=device) < 0.3, -1, found)
        found[T // 2] = -1
        found[T // 3] = -1
        found[T // 3, K - 1] = 0
    return found


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    large = torch.Size(shape).numel() > 1 << 24
    return (normal_on_device if large else normal)(shape, dtype, device, seed)


def latent_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """q_nope, q_rope, latent, k_rope, indices."""
    T, H, S, K, V, R = (shape[name] for name in ("T", "H", "S", "K", "V", "R"))
    sizes = ((T, H, V), (T, H, R), (S, V), (S, R))
    parts = tuple(draw(size, dtype, device, seed + at) for at, size in enumerate(sizes))
    at = torch.arange(S - T, S, device=device)
    return (*parts, selection(at, S, K, shape.get("kind", CAUSAL), seed + 9))


def gated_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """Those of the latent form, a gate of each value, sinks."""
    gate = draw((shape["T"], shape["H"], shape["V"]), dtype, device, seed + 10)
    return (*latent_inputs(shape, dtype, device, seed), gate, draw((shape["H"],), dtype, device, seed + 11))


def grouped_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """q, k, v, indices of blocks, a gate of each head, bounds of two documents."""
    T, H, S, K, V, G = (shape[name] for name in ("T", "H", "S", "K", "V", "G"))
    B = BLOCK_OF[K]
    at = torch.arange(S - T, S, device=device) // B
    chosen = [selection(at, -(-S // B), K, shape.get("kind", CAUSAL), seed + 20 + g) for g in range(G)]
    bounds = bounds_of(T, device, [0, S // 3, S] if S > 3 else None, first_query=S - T, keys=S)
    sizes = ((T, H, V), (S, G, V), (S, G, V))
    parts = tuple(draw(size, dtype, device, seed + at) for at, size in enumerate(sizes))
    return (*parts, torch.stack(chosen, 1).contiguous(), draw((T, H), dtype, device, seed + 8), bounds)
