"""First values of adapters: the same on every mesh, because each matrix has its own generator."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def generator_for(seed: int, name: str, expert: int | None = None) -> torch.Generator:
    """A generator that depends on the seed, the adapter's name and the expert's global number alone."""
    text = f"{seed}\x00{name}\x00{'' if expert is None else expert}"
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def kaiming_a(seed: int, name: str, shape: tuple[int, int], expert: int | None = None) -> Tensor:
    """A [r, in], fp32: uniform in ±1/√in, which is Kaiming's rule with a = √5, PEFT's default."""
    bound = 1.0 / math.sqrt(shape[1])
    value = torch.empty(shape, dtype=torch.float32)
    return value.uniform_(-bound, bound, generator=generator_for(seed, name, expert))


def initial_box(seed: int, name: str, shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> Tensor:
    """The part of an adapter's first value that a rank owns.

    Args:
        seed: ``recipe.seeds.lora``.
        name: fully qualified name of the adapter parameter, ending in ``lora_a`` or ``lora_b``.
        shape: its whole shape: [r, in] or [E, r, in] for A.
        box: the rank's (start, stop) for each dim.

    Returns:
        fp32 values of the box; B is zero.
    """
    extent = [stop - start for start, stop in box]
    if name.endswith("lora_b"):
        return torch.zeros(extent)
    inner = tuple(slice(start, stop) for start, stop in box[-2:])
    if len(shape) == 2:
        return kaiming_a(seed, name, (shape[0], shape[1]))[inner]
    out = torch.empty(extent)
    for place, expert in enumerate(range(*box[0])):
        out[place] = kaiming_a(seed, name, (shape[1], shape[2]), expert)[inner]
    return out
