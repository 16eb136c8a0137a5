"""Where chunks of documents begin and end: small tables on the device, made from values alone.

Legend: B batch, T tokens, N documents, NT chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from shardwright.kernels.guards import refuse
from shardwright.kernels.kda.configs import CHUNK
from shardwright.kernels.kda.contract import NAME


@dataclass(frozen=True)
class Documents:
    """Documents in chunks, on one device. Make it once a batch (``documents``) and pass it to every layer."""

    bounds: tuple[int, ...]
    """N + 1 token positions in the flattened batch."""
    table: Tensor
    """``[NT, 2]`` int32: first token of a chunk, and the end of its document."""
    first: Tensor
    """``[N + 1]`` int32: first chunk of each document."""

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    @property
    def chunks(self) -> int:
        return int(self.table.shape[0])


def bounds_of(cu_seqlens: Tensor | Sequence[int], tokens: int) -> tuple[int, ...]:
    """The document bounds as numbers, checked. Reading a device tensor waits for the device.

    Raises:
        KernelError: ``bad-documents`` unless they begin at 0, never fall, and end at the number of tokens.
    """
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point()):
        what = f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        raise refuse(NAME, "bad-documents", what, "pass N + 1 integers")
    found = tuple(int(value) for value in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens))
    if len(found) < 2 or found[0] != 0 or found[-1] != tokens:
        ends = f"{found[:1]} .. {found[-1:]}"
        raise refuse(
            NAME, "bad-documents", f"cu_seqlens are {ends} for {tokens} tokens", "begin at 0, end at the token count"
        )
    for at, (low, high) in enumerate(pairwise(found)):
        if high < low:
            raise refuse(NAME, "bad-documents", f"cu_seqlens falls from {low} to {high} at {at}", "sort cu_seqlens")
    return found


@lru_cache(maxsize=64)
def _tables(bounds: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """Keyed by values, so that a new tensor at an old address cannot be mistaken for the old one."""
    rows, first = [], [0]
    for low, high in pairwise(bounds):
        rows += [(start, high) for start in range(low, high, CHUNK)]
        first.append(len(rows))
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)
    return table.to(device), torch.tensor(first, dtype=torch.int32).to(device)


def documents(
    B: int, T: int, device: torch.device, cu_seqlens: Tensor | Sequence[int] | Documents | None = None
) -> Documents:
    """The documents of a batch ``[B, T]``: each row one, or those that ``cu_seqlens`` names in a batch of 1.

    Raises:
        KernelError: ``bad-documents``.
    """
    if isinstance(cu_seqlens, Documents):
        if cu_seqlens.bounds[-1] != B * T or cu_seqlens.table.device != device:
            what = f"documents of {cu_seqlens.bounds[-1]} tokens on {cu_seqlens.table.device}"
            raise refuse(NAME, "bad-documents", f"{what} for {B * T} on {device}", "make them for this batch")
        return cu_seqlens
    if cu_seqlens is None:
        bounds = tuple(range(0, B * T + 1, T)) if T else (0,) * (B + 1)
    else:
        if B != 1:
            raise refuse(NAME, "bad-documents", f"cu_seqlens with a batch of {B}", "pack documents into a batch of 1")
        bounds = bounds_of(cu_seqlens, T)
    return Documents(bounds, *_tables(bounds, str(device)))
