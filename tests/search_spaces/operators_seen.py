"""What operators do while a dispatch mode looks: bytes moved, kernels started, memory alive; and layers to look at.

Legend: T tokens, N residual streams, H hidden.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"}

CLASSES = {
    "deepseek_v4": "DeepseekV4HyperConnection",
    "glm5_next": "Glm5NextTextHyperConnection",
    "hy_v4": "HYV4HyperConnection",
    "qwen4_exp": "Qwen4ExpTextGatedResidual",
}
"""Hyper-connections by family."""


def distinct_bytes(value: Tensor) -> int:
    """Of a tensor's own values: an expanded dimension repeats the same ones."""
    return (
        value.element_size()
        * torch.Size(size for size, stride in zip(value.shape, value.stride(), strict=True) if stride).numel()
    )


class Moved(TorchDispatchMode):
    """Bytes that operators read and write, and how many there are, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels = [0, 0], [0, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if func.namespace == "aten" and made and not func.is_view and func._schema.name[6:] not in NO_KERNEL:
            back = torch._C._current_graph_task_id() != -1
            read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self.bytes[back] += sum(map(distinct_bytes, (*read, *made)))
            self.kernels[back] += 1
        return result


class Live(TorchDispatchMode):
    """Bytes of all storages made inside that are still alive, and the most at any operator's end.

    Args:
        given: tensors that are there before, and that views may show.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {one.untyped_storage()._cdata for one in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._hold(value.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def module(family: str, streams: int, hidden: int, *, steps: int = 20) -> nn.Module:
    """A family's own hyper-connection, frozen, with small random weights in bf16."""
    spelled = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hc_mult": streams, "hc_count": streams, "hc_sinkhorn_iters": steps, "hc_eps": 1e-6, "hc_lowrank": 64}
    config = SimpleNamespace(**sizes, rms_norm_eps=1e-6, hidden_size=hidden, hc_magnitude=2.0)
    made: nn.Module = getattr(spelled, CLASSES[family])(config).to(torch.bfloat16).requires_grad_(False)
    for value in made.parameters():
        value.data = 0.02 * torch.randn_like(value)
    return made


def connection(family: str, streams: int, hidden: int) -> Callable[[Tensor], Tensor]:
    """A frozen hyper-connection of a family with the sum behind it, as the family's layer spells it."""
    made = module(family, streams, hidden)

    def half(given: Tensor) -> Tensor:
        if family == "qwen4_exp":
            read, kept, weights = made(given.flatten(-2))
            return cast(Tensor, kept + ((read * 1).unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2))
        if family == "hy_v4":
            post, read = made(given)
            added = post.float().unsqueeze(-1) * (read * 1).float().unsqueeze(-2)
            return cast(Tensor, (added + given.float()).to(given.dtype))
        post, mixed, read = made(given)
        spread = post.to(given.dtype).unsqueeze(-1) * (read * 1).unsqueeze(-2)
        return cast(Tensor, spread + torch.matmul(mixed.to(given.dtype).transpose(-1, -2), given))

    return half
