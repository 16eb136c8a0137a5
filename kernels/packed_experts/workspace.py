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


def _key(tensors: tuple[Tensor, ...], stream: int) -> tuple[object, ...]:
    places = ((t.untyped_storage()._cdata, t.data_ptr(), tuple(t.shape), t._version) for t in tensors)
    return (stream, *places)


def dequantised(stacks: Stacks) -> Copies:
    """The bf16 weights of a layer's two stacks: those of the slot, or fresh ones, which the slot then holds."""
    tensors = tuple(t for stack in stacks for t in (stack.values, stack.scales))
    place = tensors[0].device
    cuda = place.type == "cuda"
    if any(t.is_inference() for t in tensors) or (cuda and torch.cuda.is_current_stream_capturing()):
        return _fresh(stacks)
    key = _key(tensors, torch.cuda.current_stream(place).cuda_stream if cuda else 0)
    with _LOCK:
        slot = _SLOTS.pop(place, None)
        if slot is None or slot.key != key:
            del slot  # first free the old layer: two must never live at once
            slot = _Slot(key, tensors, _fresh(stacks))
        _SLOTS[place] = slot
        return slot.copies


def _fresh(stacks: Stacks) -> Copies:
    return copies_launch.dequantise(stacks[0]), copies_launch.dequantise(stacks[1])


def held_bytes(device: torch.device) -> int:
    """Bytes of the copies that a device's slot holds."""
    slot = _SLOTS.get(device)
    return 0 if slot is None else sum(t.numel() * t.element_size() for t in slot.copies)


def release() -> None:
    """Forget all copies."""
    with _LOCK:
        _SLOTS.clear()
