"""Write down the kernel launches of real operator code, so that the gate compiles exactly what runs.

Inside ``recorded()`` a launch is noted instead of run, with the signature, constants and specialisation that
triton itself would give it on the target. Operators are called on meta tensors of any size: no memory, no GPU.
Because source, signature and options are those of the real launch, what the gate compiles is what a worker
finds in Triton's cache (same triton, same device capability).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from shardwright.kernels import device, dispatch, guards
from shardwright.kernels.compile_gate import TARGET, LaunchCase

MULTIPROCESSORS = 132
"""Of the device that recorded launches are meant for; it enters grids only."""


@contextmanager
def recorded(target: GPUTarget = TARGET, log: list[str] | None = None) -> Iterator[list[LaunchCase]]:
    """Launches inside the block are appended to the list, each distinct one once; nothing runs.

    ``log`` gets the kernel's name of every launch, in order.

    Operators see meta tensors as plain tensors on a device: their guards on places are off, all others hold.
    """
    found: list[LaunchCase] = []
    backend, short_way = make_backend(target), dispatch.direct

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if log is not None:
            log.append(kernel.fn.__name__)
        given = {"debug": False, "instrumentation_mode": "", **named}
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*args, **given)
        _, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
        case = LaunchCase(
            name=kernel.fn.__name__,
            kernel=kernel,
            signature=signature,
            constants=constants,
            attributes=attributes,
            options={name: value for name, value in named.items() if name not in kernel.arg_names},
            narrow="" if moves_values(signature) else "moves indices only",
        )
        if not any(case.same_as(other) for other in found):
            found.append(case)

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", note))
        stack.enter_context(patch.object(guards, "one_device", lambda *args, **named: None))
        stack.enter_context(patch.object(device, "multiprocessors", lambda tensor: MULTIPROCESSORS))
        for module in list(sys.modules.values()):
            if module.__name__.startswith(f"{__package__}.") and getattr(module, "direct", None) is short_way:
                stack.enter_context(patch.object(module, "direct", lambda *tensors: True))
        yield found


def moves_values(signature: Mapping[str, Any]) -> bool:
    """Whether any pointer or descriptor of a kernel's signature holds floating-point values."""
    places = [str(kind) for kind in signature.values() if str(kind).startswith(("*", "tensordesc"))]
    return any(not kind.startswith(("*i", "*u")) for kind in places)


def meta(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, *, learns: bool = False) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(learns)


def noted(
    cases: Iterable[LaunchCase],
    *,
    narrow: Mapping[str, str] | None = None,
    spills: Mapping[str, tuple[int, str]] | None = None,
) -> tuple[LaunchCase, ...]:
    """Cases with what the gate shall let pass, each with its reason.

    Args:
        narrow: kernel name → why none of its loads is 16 bytes wide.
        spills: kernel name → (spilled bytes a thread that it may have, why).
    """
    found = []
    for case in cases:
        kernel = case.kernel.fn.__name__
        allowance, reason = (spills or {}).get(kernel, (case.spill_allowance, case.spill_reason))
        why = (narrow or {}).get(kernel, case.narrow)
        found.append(replace(case, narrow=why, spill_allowance=allowance, spill_reason=reason))
    return tuple(found)


def cases_of(label: str, call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]) -> tuple[LaunchCase, ...]:
    """Every distinct launch of ``call`` on meta tensors and of the backward of what it returns."""
    assert not triton.knobs.runtime.interpret, "the interpreter has no launches to record"
    with recorded() as found:
        outputs = call()
        ends = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
    return tuple(case.named(f"{label}/{case.name}") for case in found)
