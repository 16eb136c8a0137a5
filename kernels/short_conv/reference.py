"""The short causal convolution in plain torch. Runs in fp64.

Legend: B batch, T tokens, C channels, J taps, N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    initial: Tensor | None = None,
    *,
    silu: bool = True,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Each document convolved by itself.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, J]``, the last tap on the token itself.
        initial: ``[N, C, J - 1]``: the inputs before each document; zeros where ``None``.
        cu_seqlens: N + 1 document bounds inside a batch of 1; each batch row is a document where ``None``.

    Returns:
        ``y [B, T, C]`` in x's dtype and the last inputs of each document ``[N, C, J - 1]`` in x's dtype.
    """
    B, T, C = x.shape
    J = weight.shape[1]
    wide = torch.promote_types(x.dtype, weight.dtype)
    spans = [(b, 0, T) for b in range(B)] if cu_seqlens is None else [(0, *span) for span in pairwise(cu_seqlens)]
    rows: dict[int, list[Tensor]] = {b: [] for b in range(B)}
    finals = []
    for at, (b, low, high) in enumerate(spans):
        before = x.new_zeros((C, J - 1)) if initial is None else initial[at]
        padded = torch.cat((before.to(wide), x[b, low:high].T.to(wide)), dim=1)
        finals.append(padded[:, padded.shape[1] - (J - 1) :].to(x.dtype))
        if high > low:
            z = F.conv1d(padded[None], weight.to(wide)[:, None], groups=C)[0]
            rows[b].append((F.silu(z) if silu else z).T.to(x.dtype))
    return torch.stack([torch.cat(found) for found in rows.values()]), torch.stack(finals)
