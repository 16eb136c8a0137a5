"""Launches of attention residuals that are worth timing on a device (``python -m shardwright.kernels.sweep``).

Legend: T tokens, R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.kernels.attention_residual.cost import cost
from shardwright.kernels.attention_residual.launches import Kept, launch_backward, launch_forward
from shardwright.kernels.attention_residual.op import compute_forward
from shardwright.kernels.attention_residual.reference import attention_residual_reference
from shardwright.kernels.cases import SweepCase, normal, normal_on_device
from shardwright.kernels.launch import Launch, columns

ROWS, ELEMENTS, EPS = 5, 8192 * 7168, 1e-6
"""Rows of a mix in the middle of Kimi K3, and values of each: its tokens at every width."""
CHECKED = 256
"""Tokens that are compared with fp64, the last ones."""
WHOLE = cost(8192, ROWS, 7168, "bfloat16")

Prepared = tuple[Callable[[Launch], None], list[tuple[Tensor, Tensor]]]


def launches(H: int) -> tuple[Launch, ...]:
    """8 to 64 values a thread; no, one, two or three rows on their way; one to four programs a multiprocessor."""
    found = []
    for warps in (2, 4, 8, 16):
        for rows in (1, 2, 4, 8, 16):
            values = rows * columns(H)
            if not (1024 <= values <= 8192 and 8 <= values // (32 * warps) <= 64):
                continue
            for stages in (1, 2, 3, 4):
                found += [Launch(rows, warps, stages, programs) for programs in (1, 2, 4) if programs * warps <= 48]
    return tuple(found)


def drawn(H: int, dtype: torch.dtype, device: str, seed: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Rows, norm, projection and a gradient of the mix."""
    T = ELEMENTS // H
    rows = [normal_on_device((T, H), dtype, device, seed + at) for at in range(ROWS + 1)]
    projection = normal((H,), dtype, device, seed + 50).mul_(H**-0.5)
    return rows[:ROWS], torch.ones(H, dtype=dtype, device=device), projection, rows[ROWS]


def sweep_forward(H: int, dtype: torch.dtype, device: str, seed: int) -> Prepared:
    rows, norm, projection, _ = drawn(H, dtype, device, seed)
    y, kept = torch.empty_like(rows[0]), statistics(rows)
    tails = [row[-CHECKED:].double() for row in rows]
    exact = attention_residual_reference(tails, norm.double(), projection.double(), EPS)
    return lambda at: launch_forward(rows, norm, projection, EPS, y, kept, at), [(y, exact)]


def sweep_backward(H: int, dtype: torch.dtype, device: str, seed: int) -> Prepared:
    rows, norm, projection, dy = drawn(H, dtype, device, seed)
    y, kept = compute_forward(rows, norm, projection, EPS, True, None)
    assert kept is not None and y.shape == dy.shape
    drows = [torch.empty_like(row) for row in rows]
    leaves = [row[-CHECKED:].double().requires_grad_() for row in rows]
    mixed = attention_residual_reference(leaves, norm.double(), projection.double(), EPS)
    exact = torch.autograd.grad(mixed, leaves, dy[-CHECKED:].double())
    run = lambda at: launch_backward(dy, rows, norm, projection, kept, drows, None, at)  # noqa: E731
    return run, list(zip(drows, exact, strict=True))


def statistics(rows: list[Tensor]) -> Kept:
    """Room for what a backward needs."""
    T = rows[0].shape[0]
    one, two, three = (torch.empty(size, device=rows[0].device) for size in ((ROWS, T), (ROWS, T), (T,)))
    return one, two, three


def _floor(part: str) -> int:
    found = WHOLE.forward if part == "fwd" else WHOLE.backward
    assert found is not None
    return found.floor_bytes


SWEEP = (
    SweepCase("fwd", _floor("fwd"), launches, sweep_forward),
    SweepCase("bwd", _floor("bwd"), launches, sweep_backward),
)
