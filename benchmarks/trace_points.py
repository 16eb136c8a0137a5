"""The cost model's peaks beside traces of the runtime's executor over fake tensors: ``trace_points.py [MODEL ...]``.

One step of each eager point of ``points_shapes.py`` runs forward and backward without data: every storage that appears
counts from its creation to its last reference, in blocks of 512 bytes as the CUDA allocator rounds. Routing is even.
What a kernel takes inside itself is not seen, and CPU attention stands for CUDA's. Where autograd adds two gradients it
does so in place, but out of place under a dispatch mode: such a sum counts only once what was added is let go. Nothing
is written.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from cost_model import GIB, predict, static_bytes
from points_model import Recomputed, Side, adapted_model, open_rank, owned_parameters
from points_shapes import Point, points
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.runtime.experts import grouped
from shardwright.runtime.load.stream import materialize
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.simulate import even_routing

BLOCK = 512


class Live(TorchDispatchMode):
    """Bytes of all storages alive, and their peak since the last reset."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.summing = False
        self.known: dict[int, weakref.ref[Any]] = {}

    def reset(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.summing:
            self.peak = max(self.peak, self.now)
        self.summing = _adds_gradients(func, args)
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        seen = self.known.get(key)
        if not size or (seen is not None and seen() is not None):
            return

        def gone(_: object) -> None:
            self.now -= size
            self.known.pop(key, None)

        self.known[key] = weakref.ref(storage, gone)
        self.now += size
        if not self.summing:
            self.peak = max(self.peak, self.now)


def _adds_gradients(func: Any, args: Any) -> bool:
    """Whether this is a sum of two tensors inside a backward."""
    inside = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return inside and func is torch.ops.aten.add.Tensor and all(isinstance(one, Tensor) for one in args[:2])


class Allocations:
    """What the grouped products of CUDA allocate, without the products."""

    @staticmethod
    def rows(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        return x.new_zeros((x.shape[0], weight.shape[2]))

    @staticmethod
    def add_rows(out: Tensor, x: Tensor, weight: Tensor, sizes: list[int], scaling: float) -> None:
        out.add_(x.new_zeros((x.shape[0], weight.shape[2])), alpha=scaling)

    @staticmethod
    def outer(left: Tensor, right: Tensor, sizes: list[int]) -> Tensor:
        return left.new_zeros((len(sizes), left.shape[1], right.shape[1]))


@contextmanager
def without_values() -> Iterator[None]:
    """Everything that looks at values answers as for one plain sequence with even routing."""
    import transformers.masking_utils as masks

    before = grouped._choose, masks.find_packed_sequence_indices
    grouped._choose = lambda *_: Allocations  # type: ignore[assignment, return-value]
    masks.find_packed_sequence_indices = lambda _: None
    try:
        with even_routing():
            yield
    finally:
        grouped._choose, masks.find_packed_sequence_indices = before


def trace(point: Point) -> tuple[int, int]:
    """(bytes before the first step, peak of a step with AdamW's moments present)."""
    model, meter, _, _ = adapted_model(point, torch.bfloat16)
    device, _ = open_rank()
    live = Live()
    with without_values(), FakeTensorMode(allow_non_fake_inputs=True), live:
        materialize(model, device)
        weights = live.now
        adapters = [owned for owned in owned_parameters(model).values() if owned.adapter]
        moments = [torch.empty_like(owned.local()) for owned in adapters for _ in range(2)]
        ids = torch.zeros((point.batch, point.tokens), dtype=torch.long)
        side = Side(model, None, meter, device)  # type: ignore[arg-type]
        with Recomputed(side, point.how):
            for _ in range(2):
                for owned in adapters:
                    owned.parameter.grad = None
                live.reset()
                summed_loss(model, ids).backward()
        del moments
    return weights, live.peak


def main(models: list[str]) -> int:
    for point in points(tuple(models), ("eager",)):
        weights, peak = trace(point)
        report = predict(point)
        ours, static = report.memory.peak_bytes, static_bytes(report)
        above = 100 * ((ours - static) / (peak - weights) - 1)
        sys.stdout.write(
            f"{point.case}: {ours / GIB:.2f} GiB predicted, {peak / GIB:.2f} traced, {100 * (ours / peak - 1):+.2f} %; "
            f"above the weights {above:+.2f} %\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
