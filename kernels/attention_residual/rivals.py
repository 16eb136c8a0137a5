"""What attention residuals are timed beside: torch.compile, and flash-linear-attention's operator where it is there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from shardwright.kernels.cases import Function


def flash_linear_attention(eps: float) -> Function:
    """``fused_attnres``, which also takes the rows as they lie."""
    fused_attnres = importlib.import_module("fla.ops.attnres").fused_attnres

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        *rows, norm, projection = given
        return (fused_attnres(projection, rows, norm, rms_eps=eps),)

    return run


def rivals(reference: Function, eps: float) -> Mapping[str, Callable[[], Function]]:
    """All that compute the same function here."""
    found: dict[str, Callable[[], Function]] = {
        "eager": lambda: reference,
        "torch.compile": lambda: torch.compile(reference, dynamic=False),
    }
    return found | ({"fla": lambda: flash_linear_attention(eps)} if find_spec("fla") else {})
