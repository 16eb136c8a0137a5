"""The fused operators on this machine: verified on a device or in Triton's interpreter, compiled without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.kernels.compile_gate import CompileReport
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


def prebuild_operators(ops: list[str] | None, device: str | None = None) -> list[CompileReport]:
    """Compile the named operators' kernels at every shipped and tuned configuration, into Triton's cache.

    Args:
        ops: operator names; all where ``None``.
        device: whose tuned choices to take (``nvidia-h200``); this machine's where there is a CUDA device, and
            the defaults in code where there is none.

    Raises:
        KernelError: ``unknown-operator``, ``unknown-device`` or ``does-not-compile``.
    """
    from shardwright.kernels import tuned
    from shardwright.kernels.compile_gate import compile_case, local_target
    from shardwright.kernels.registry import OPERATORS, operator
    from shardwright.schemas.errors import KernelError

    if device is not None and not tuned.path(device).is_file():
        known = ", ".join(sorted(path.stem for path in tuned.FOLDER.glob("*.json"))) or "none"
        raise KernelError(
            "unknown-device",
            f"there is no file of choices for {device}; there are: {known}",
            where="kernels prebuild",
            next_action="run `shardwright kernels tune` on that device, or leave --device out",
        )
    target = local_target()
    with tuned.on(device or tuned.device()):
        suites = [suite for name in ops or OPERATORS for suite in operator(name).load_suites()]
        return [compile_case(case, target) for suite in suites for case in suite.gate_cases()]


def tune_operators(ops: list[str] | None, out: Path | None, report: Callable[[str], None]) -> TunedFile:
    """Choose launch configurations on this machine's CUDA device and write its file.

    Raises:
        KernelError: ``no-device``, ``unknown-operator`` or ``default-wrong``.
    """
    from shardwright.kernels.tune import tune

    return tune(ops, out, report)
