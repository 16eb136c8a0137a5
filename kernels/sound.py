"""Launches whose machine code is read before it runs for the first time: see ``machine_code`` for what may be wrong.

A kernel is compiled anew for every set of constants and for every kind of number among its arguments, more than the
gate can list. So each kind is looked at once a process, before its first start; later starts cost one look-up.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.kernels.machine_code import Fault, compiled_faults
from shardwright.schemas.errors import KernelError

_seen: set[tuple[object, ...]] = set()


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)``.

    Raises:
        KernelError: ``assembler-fault`` where a product would read another descriptor than the compiler's.
    """
    if all(argument.is_cuda for argument in arguments if isinstance(argument, Tensor)):
        kind = kind_of(kernel, arguments, constants)
        if kind not in _seen:
            found = compiled_faults(kernel.warmup(*arguments, grid=grid, **constants))
            if found:
                raise fault(kernel.__name__, found)
            _seen.add(kind)
    kernel[grid](*arguments, **constants)


def kind_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[object, ...]:
    """What decides the compilation: constants, numbers, and the tensors' dtypes and alignment."""
    kinds = (
        (argument.dtype, argument.data_ptr() % 16 == 0, argument.device.index)
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    )
    return (id(kernel), *kinds, *constants.items())


def fault(name: str, found: tuple[Fault, ...]) -> KernelError:
    """The refusal of a kernel."""
    return KernelError(
        "assembler-fault",
        f"{len(found)} descriptors of {name} are not the compiler's; {found[0]}",
        where=name,
        next_action="set TRITON_PTXAS_PATH to the ptxas of CUDA 13, or leave this fusion out of the plan",
    )
