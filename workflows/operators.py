"""The fused operators on this machine: verified on a device or in Triton's interpreter, compiled without one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.kernels.compile_gate import CompileReport
    from shardwright.kernels.verify import VerifyResult


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


def prebuild_operators(ops: list[str] | None) -> list[CompileReport]:
    """Compile the named operators' kernels at every shipped configuration.

    Raises:
        KernelError: ``unknown-operator`` or ``does-not-compile``.
    """
    from shardwright.kernels.compile_gate import compile_case
    from shardwright.kernels.registry import OPERATORS, operator

    return [compile_case(case) for name in ops or OPERATORS for case in operator(name).load_suite().compile_cases]
