"""Permute and combine as torch functions: a routing's metadata, rows by expert, weighted sum to tokens.

Nothing here waits for the device: counts stay in device memory.

Legend: T tokens, K experts a token, E experts, R rows (T·K, and padding where it is asked for), H hidden.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.permute import configs, contract
from shardwright.kernels.permute.route import Routing, launch_route
from shardwright.kernels.permute.triton import combine_bwd_kernel, combine_kernel, gather_rows_kernel

ADMITTED_IDS, ADMITTED_ROWS = Admitted(), Admitted()


def route(ids: Tensor, experts: int, multiple: int = 1) -> Routing:
    """Metadata of a routing: stable, deterministic, without a host synchronisation.

    Args:
        ids: ``[T, K]`` int32 or int64; an id outside ``0 .. experts-1`` is not routed and has no row.
        experts: E.
        multiple: each expert's rows are padded to whole multiples of this; an expert without rows stays so.
            Padding rows belong to no entry: ``gather_rows`` fills them with zeros, ``combine`` never reads them,
            and no gradient leaves them.

    Raises:
        KernelError: an input outside ``contract.check_ids`` or ``contract.check_multiple``.
    """

    def guards() -> None:
        contract.check_ids(contract.NAME, ids, experts, interpreted=device.interpreted())
        contract.check_multiple(contract.NAME, ids, experts, multiple)

    return launch_route(ids, experts, ADMITTED_IDS.check((ids,), (experts, multiple), guards), multiple)


def launch_gather(x: Tensor, place: Tensor, out: Tensor, key: Hashable = None) -> None:
    """Fill ``out [R, H]`` with the tokens' rows; rows that no entry takes keep what they have."""
    (T, K), H = place.shape, x.shape[-1]
    if T == 0:
        return
    tensors = (x, place, out)
    if again(key, tensors):
        return
    tile = {"COLUMNS": configs.columns(H), "num_warps": configs.WARPS}
    with device.current(x):
        start(key, tensors, gather_rows_kernel, (T,), x, place, out, T, H, K=K, **tile)


def launch_combine(
    y: Tensor,
    place: Tensor,
    weights: Tensor | None,
    out: Tensor,
    key: Hashable = None,
    *,
    part: Tensor | None = None,
    dweights: Tensor | None = None,
) -> None:
    """Fill ``out [T, H]`` with the (weighted) sums of the tokens' rows.

    Args:
        part: fp32 ``[R]``, the rows' shares of their routing weights' gradient ...
        dweights: ... which fill this ``[T, K]`` in the same launch.
    """
    (T, K), H = place.shape, y.shape[-1]
    if T == 0:
        return
    tensors = (y, place, weights, out, part, dweights)
    if again(key, tensors):
        return
    with device.current(y):
        start(
            key,
            tensors,
            combine_kernel,
            (T,),
            y,
            place,
            y if weights is None else weights,
            out,
            y if part is None else part,
            y if dweights is None else dweights,
            T,
            H,
            K=K,
            SLOTS=configs.slots(K),
            WEIGHTED=weights is not None,
            PARTS=part is not None,
            COLUMNS=configs.columns(H),
            num_warps=configs.WARPS,
        )


def launch_combine_bwd(
    dout: Tensor, y: Tensor, place: Tensor, weights: Tensor, dy: Tensor, dweights: Tensor, key: Hashable
) -> None:
    """Fill ``dy [R, H]`` (rows that no entry takes keep what they have) and ``dweights [T, K]``."""
    (T, K), H = place.shape, y.shape[-1]
    tensors = (dout, y, place, weights, dy, dweights)
    if T == 0 or again(key, tensors):
        return
    tile = {"COLUMNS": configs.columns(H), "num_warps": configs.WARPS}
    with device.current(y):
        start(key, tensors, combine_bwd_kernel, (T,), *tensors, T, H, K=K, **tile)


class GatherRows(torch.autograd.Function):
    """Rows by expert from tokens; the gradient is the plain sum over a token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, rows: int, token: object | None) -> Tensor:
        ctx.save_for_backward(place)
        ctx.token = token
        out = x.new_zeros((rows, x.shape[-1]))
        launch_gather(x, place, out, key_of(token, "gather"))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        dx = drows.new_empty((place.shape[0], drows.shape[-1]))
        launch_combine(drows.contiguous(), place, None, dx, key_of(ctx.token, "dx"))
        return dx, None, None, None


class Combine(torch.autograd.Function):
    """Weighted sums of rows; gradients for rows and weights."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, place: Tensor, weights: Tensor, token: object | None) -> Tensor:
        ctx.save_for_backward(y, place, weights)
        ctx.token = token
        out = y.new_empty((place.shape[0], y.shape[-1]))
        launch_combine(y, place, weights, out, key_of(token, "combine"))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, Tensor, None]:
        y, place, weights = ctx.saved_tensors
        dy, dweights = torch.zeros_like(y), torch.empty_like(weights)
        launch_combine_bwd(dout.contiguous(), y, place, weights, dy, dweights, key_of(ctx.token, "combine-bwd"))
        return dy, None, dweights, None


def gather_rows(x: Tensor, routing: Routing) -> Tensor:
    """``[T, H]`` → ``[R, H]``, sorted by expert; rows of no entry (padding, past ``sum(counts)``) are zero.

    Raises:
        KernelError: an input outside ``contract.check_rows``.
    """
    token = ADMITTED_ROWS.check(
        (x, routing.place),
        ("x", routing.rows),
        lambda: contract.check_rows(contract.NAME, "x", x, interpreted=device.interpreted()),
    )
    return cast(Tensor, GatherRows.apply(x, routing.place, routing.rows, token))


def combine(y: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """``[R, H]`` and ``weights [T, K]`` → ``[T, H]``: summed in fp32 in slot order, rounded once.

    Rows of no entry are never read, and their gradient is zero.

    Raises:
        KernelError: an input outside ``contract.check_rows``, ``check_row_count`` or ``check_weights``.
    """

    def guards() -> None:
        contract.check_rows(contract.NAME, "y", y, interpreted=device.interpreted())
        contract.check_row_count(contract.NAME, y, routing.rows)
        contract.check_weights(contract.NAME, weights, tuple(routing.place.shape))

    token = ADMITTED_ROWS.check((y, routing.place, weights), ("y", routing.rows), guards)
    return cast(Tensor, Combine.apply(y, routing.place, weights, token))
