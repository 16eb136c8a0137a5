"""The fused operators on this machine: verified on a device or in Triton's interpreter, tuned on a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.kernels.verify import VerifyResult
    from shardwright.schemas.tuned import TunedFile


def verify_operators(ops: list[str] | None) -> list[VerifyResult]:
    """All comparisons of the named operators (all where ``None``).

    Raises:
        KernelError: ``unknown-operator``, or what keeps the interpreter from running here.
    """
    import torch

    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        from shardwright.kernels.interpreter import install

        install()
    from shardwright.kernels.verify import verify_all

    return verify_all(ops, "cuda" if cuda else "cpu")


def tune_operators(ops: list[str] | None, out: Path | None, report: Callable[[str], None]) -> TunedFile:
    """Choose launch configurations on this machine's CUDA device and write its file.

    Raises:
        KernelError: ``no-device``, ``unknown-operator`` or ``default-wrong``.
    """
    from shardwright.kernels.tune import tune

    return tune(ops, out, report)
