"""What an exchange of rows keeps alive at its fullest: all rows on one way, and one chunk's own copies.

One rank that sends its rows to itself; every storage is counted from its making to its end.
Legend: T tokens, K experts per token, R = T · K rows, C chunks, H hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.runtime.experts.dispatch import combine, dispatch, padded, plan_route
from shardwright.runtime.experts.overlap import in_chunks

T, K, E, H = 2048, 8, 8, 128
R = T * K
BYTES = 4


class LiveBytes(TorchDispatchMode):
    """Bytes of storages made inside, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


class Moving:
    """An exchange under way: holds both of its tensors until it is waited for."""

    def __init__(self, out: Tensor, rows: Tensor) -> None:
        self.held: tuple[Tensor, ...] = (out, rows)
        out.copy_(rows)

    def wait(self) -> None:
        self.held = ()


def to_itself(out: Tensor, rows: Tensor, *sizes: Any, async_op: bool = False, **options: Any) -> Moving | None:
    """``all_to_all_single`` of one rank. Gloo's thread may let go of what it moved a moment after the wait returned."""
    moving = Moving(out, rows)
    if async_op:
        return moving
    moving.wait()
    return None


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "all_to_all_single", to_itself)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("padding", [1, 64])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_an_exchange_holds_one_way_and_one_chunk(
    chunks: int, gradients: bool, padding: int, group: dist.ProcessGroup
) -> None:
    """T·K rows sent, R received, R / C reordered; the output [T, H] and indices beside them. Nothing is kept for
    backward but indices and the routing weights' product."""
    index = torch.rand(T, E, generator=torch.Generator().manual_seed(0)).topk(K).indices
    weights, hidden = torch.rand(T, K), torch.randn(T, H, requires_grad=gradients)
    with torch.set_grad_enabled(gradients), LiveBytes() as live:
        if chunks == 1:
            route = replace(padded(plan_route(index, E, 1, group), padding), send=[R], receive=[R])
            out = combine(dispatch(hidden, route, group), route, weights, group)
        else:
            out, _ = in_chunks(
                hidden,
                index,
                weights,
                lambda rows, route: rows,
                chunks=chunks,
                num_experts=E,
                ep=1,
                group=group,
                weigh_inputs=False,
                padding=padding,
            )
    torch.testing.assert_close(out, hidden * weights.sum(1, keepdim=True))
    modelled = (R + R + R / chunks) * H * BYTES
    beside = T * H * BYTES + 16 * R * 8
    assert 0.7 * modelled < live.most <= modelled + beside, (live.most / modelled, beside / modelled)
