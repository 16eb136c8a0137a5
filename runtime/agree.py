"""Errors that all ranks raise together, so that none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwright.schemas.errors import ShardwrightError

T = TypeVar("T")


def together(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank; if it fails anywhere, every rank raises the failure of the lowest such rank.

    ``work`` must not use collectives that a failing rank would skip.
    """
    failure: ShardwrightError | None = None
    result: Any = None
    try:
        result = work()
    except ShardwrightError as error:
        failure = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, failure)
        failure = next((error for error in seen if error is not None), None)
    if failure is not None:
        raise failure
    return result


def on_first_rank(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 while the others wait; its result, or its failure, is everyone's."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except ShardwrightError as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]
