"""One layer's dequantised stacks, kept between a layer's forward and its backward.

With checkpointing the backward of a layer follows its recomputed forward at once: the copy made there serves both.
There is one slot a device. A layer that needs a copy replaces what the slot holds, so at most one layer is ever
dequantised. A copy is used again only for the very same memory on the same stream: same storage objects, held here so
that no other tensor can take their addresses, at the same place, size and version. Memory that is changed behind
torch's version counter must be announced by ``release``.

Copies are not kept while a CUDA graph is captured, nor for inference tensors, which have no version.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import bound
from shardwright.kernels.packed_experts import copies_launch
from shardwright.kernels.packed_experts.storage import PackedStack

Stacks = tuple[PackedStack, PackedStack]
Copies = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Slot:
    key: tuple[object, ...]
    sources: tuple[Tensor, ...]
    """Held so that their storages live as long as the key names them."""
    copies: Copies


_SLOTS: dict[torch.device, _Slot] = {}
_LOCK = threading.Lock()  # autograd runs backwards in threads of its own


def _place(t: Tensor) -> tuple[object, ...]:
    return t.untyped_storage()._cdata, t.data_ptr(), t.shape, t._version


def dequantised(stacks: Stacks, token: object | None = None) -> Copies:
    """The bf16 weights of a layer's two stacks: those of the slot, or fresh ones, which the slot then holds.

    ``token``: the layout's, if it has one.
    """
    a, b, c, d = stacks[0].values, stacks[0].scales, stacks[1].values, stacks[1].scales
    place = a.device
    cuda = place.type == "cuda"
    inference = a.is_inference() or b.is_inference() or c.is_inference() or d.is_inference()
    if inference or (cuda and torch.cuda.is_current_stream_capturing()):
        return copies_launch.dequantise_both(stacks, token)
    key = (bound.current_stream(place.index) if cuda else 0, _place(a), _place(b), _place(c), _place(d))
    with _LOCK:
        slot = _SLOTS.pop(place, None)
        if slot is None or slot.key != key:
            del slot  # first free the old layer: two must never live at once
            slot = _Slot(key, (a, b, c, d), copies_launch.dequantise_both(stacks, token))
        _SLOTS[place] = slot
        return slot.copies


def held_bytes(device: torch.device) -> int:
    """Bytes of the copies that a device's slot holds."""
    slot = _SLOTS.get(device)
    return 0 if slot is None else sum(t.numel() * t.element_size() for t in slot.copies)


def release() -> None:
    """Forget all copies."""
    with _LOCK:
        _SLOTS.clear()
