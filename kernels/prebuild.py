"""Compile operators ahead of a run, into Triton's cache: no worker waits, and what does not compile shows here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.schemas.errors import KernelError

if TYPE_CHECKING:
    from shardwright.kernels.compile_gate import CompileReport


def prebuild(ops: Sequence[str] | None, device: str | None = None) -> list[CompileReport]:
    """Compile the named operators' kernels at every shipped and tuned configuration.

    Sizes that a kernel takes as constants and no configuration names compile in the first step still.

    Args:
        ops: operator names; all where there is none.
        device: whose tuned choices to take (``nvidia-h200``); this machine's where there is a CUDA device, and
            the defaults in code where there is none.

    Raises:
        KernelError: ``unknown-operator``, ``unknown-device`` or ``does-not-compile``.
    """
    from shardwright.kernels import tuned
    from shardwright.kernels.compile_gate import compile_case, local_target
    from shardwright.kernels.registry import OPERATORS, operator

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
