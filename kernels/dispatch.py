"""Two ways into an operator: a short one for plain tensors, the torch.library one for everything traced.

A call through ``torch.library`` costs the host 70 µs or more on top of the launch (one H200 machine,
torch 2.11), longer than a small norm runs on the device. So plain tensors take an autograd function that
launches directly; torch.compile, fake and meta tensors, tensor subclasses and dispatch modes (selective
checkpointing, counters) take the registered operator, which they see as one opaque node. Both run the
same launches and give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN = (torch.Tensor, torch.nn.Parameter)


def direct(*tensors: Tensor) -> bool:
    """Whether the short way is right: nothing traces, and no tensor is a subclass of its own kind."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(type(tensor) in PLAIN and not tensor.is_meta for tensor in tensors)


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
