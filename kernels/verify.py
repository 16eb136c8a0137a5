"""Is a fused operator right? Its error against fp64 is held to eager torch's own error.

For every dtype and shape: outputs and gradients of the fused operator and of plain torch in the same
dtype are both compared with plain torch in fp64. The fused error may be ``FACTOR`` times eager's, plus a
few fp32 roundings. Fresh memory is filled with NaN meanwhile, so a value that nobody wrote is seen.
Runs on a device, and on the CPU under Triton's interpreter (``kernels.interpreter``).

Legend: T rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.cases import Function, OpSuite, Shape
from shardwright.kernels.registry import OPERATORS, operator
from shardwright.schemas.base import Model

FACTOR = 1.25
"""Largest ratio of the fused operator's error to eager torch's, both against fp64."""

SLACK = 4 * torch.finfo(torch.float32).eps
"""Relative error that reordering fp32 sums may add, where eager happens to be (nearly) exact."""

SEED = 20


class VerifyResult(Model):
    """One output or gradient at one dtype and shape."""

    op: str
    case: str
    value: str
    """Output name, or ``d`` and the input's name for a gradient."""
    ok: bool
    error: float | None
    """Fused against fp64, relative to the norm; ``None`` where it is not finite."""
    eager_error: float
    allowed: float
    detail: str = ""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` returns with NaN, and restore all switches afterwards."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(mode, warn_only=warn)


def values(function: Function, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of all inputs for the given output gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    found = torch.autograd.grad(outputs, leaves, list(gradients))
    return [output.detach() for output in outputs] + list(found)


def relative_error(produced: Tensor, exact: Tensor) -> float:
    """``‖produced - exact‖ / ‖exact‖`` in fp64; 0 for empty tensors, NaN where anything is NaN."""
    if exact.numel() == 0:
        return 0.0
    scale = exact.double().norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float((produced.double() - exact.double()).norm() / scale)


def verify_case(suite: OpSuite, shape: Shape, dtype: torch.dtype, device: str) -> list[VerifyResult]:
    """Compare all outputs and gradients at one shape and dtype."""
    inputs = suite.inputs(shape, dtype, device, SEED)
    plain = suite.reference(*(tensor.double() for tensor in inputs))
    gradients = [
        suite.inputs(shape, dtype, device, SEED + 100 + 10 * at)[0].reshape(output.shape)
        for at, output in enumerate(plain)
    ]
    exact = values(suite.reference, [t.double() for t in inputs], [g.double() for g in gradients])
    eager = values(suite.reference, inputs, gradients)
    with poisoned_memory():
        fused = values(suite.fused, inputs, gradients)
    names = [*suite.output_names, *(f"d{name}" for name in suite.input_names)]
    sizes = ",".join(f"{key}{size}" for key, size in shape.items())
    label = f"{str(dtype).rpartition('.')[2]}/{sizes}"
    return [
        judge(suite.op, label, name, produced, plain_value, truth)
        for name, produced, plain_value, truth in zip(names, fused, eager, exact, strict=True)
    ]


def judge(op: str, case: str, value: str, fused: Tensor, eager: Tensor, exact: Tensor) -> VerifyResult:
    """Hold one fused value to eager's error, in dtype, shape and size."""
    error, plain = relative_error(fused, exact), relative_error(eager, exact)
    allowed = FACTOR * plain + SLACK
    finite = error == error and error != float("inf")
    alike = fused.dtype == eager.dtype and fused.shape == eager.shape
    detail = "" if alike else f"{fused.dtype} {list(fused.shape)}, eager {eager.dtype} {list(eager.shape)}"
    if not finite:
        detail = detail or "not finite: an unwritten or overflowed value"
    return VerifyResult(
        op=op,
        case=case,
        value=value,
        ok=alike and finite and error <= allowed,
        error=error if finite else None,
        eager_error=plain,
        allowed=allowed,
        detail=detail,
    )


def verify_repeats(suite: OpSuite, shape: Shape, dtype: torch.dtype, device: str) -> VerifyResult:
    """Two runs on the same inputs give the same bits, gradients included."""
    inputs = suite.inputs(shape, dtype, device, SEED)
    with torch.no_grad():
        outputs = suite.fused(*inputs)
    gradients = [torch.ones_like(output) for output in outputs]
    first, second = (values(suite.fused, inputs, gradients) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    sizes = ",".join(f"{key}{size}" for key, size in shape.items())
    return VerifyResult(
        op=suite.op, case=f"repeat/{sizes}", value="bits", ok=same, error=0.0, eager_error=0.0, allowed=0.0
    )


FAR_ROWS = 4
FAR_MEMORY_BYTES = 60_000_000_000


def verify_far_rows(suite: OpSuite, dtype: torch.dtype, device: str) -> VerifyResult:
    """Rows beyond 2³¹ elements give the bits that they give alone: addresses are 64-bit.

    Needs ``FAR_MEMORY_BYTES`` of free device memory; says so in ``detail`` where it did not run.
    """
    shape = {"T": (1 << 31) // 7168 + 2 * FAR_ROWS, "H": 7168}
    label = f"far-rows/T{shape['T']},H{shape['H']}"
    if torch.cuda.mem_get_info()[0] < FAR_MEMORY_BYTES:
        needs = f"not run: needs {FAR_MEMORY_BYTES} bytes of free device memory"
        return VerifyResult(
            op=suite.op, case=label, value="bits", ok=True, error=None, eager_error=0.0, allowed=0.0, detail=needs
        )
    inputs = [tensor.requires_grad_(tensor.dim() > 1) for tensor in suite.inputs(shape, dtype, device, SEED)]
    near = [t.detach()[-FAR_ROWS:].clone().requires_grad_() if t.dim() > 1 else t for t in inputs]
    outputs, alone = suite.fused(*inputs), suite.fused(*near)
    gradients = [output.detach() for output in outputs]
    rows = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(outputs, rows, gradients)
    expected = torch.autograd.grad(alone, [t for t in near if t.requires_grad], [g[-FAR_ROWS:] for g in gradients])
    pairs = zip((*outputs, *found), (*alone, *expected), strict=True)
    same = all(torch.equal(whole.detach()[-FAR_ROWS:], part.detach()) for whole, part in pairs)
    return VerifyResult(op=suite.op, case=label, value="bits", ok=same, error=0.0, eager_error=0.0, allowed=0.0)


def verify_all(ops: Sequence[str] | None = None, device: str = "cuda") -> list[VerifyResult]:
    """Verify operators on a device (all shapes), or under the interpreter on the CPU (small shapes).

    Args:
        ops: operator names; all where ``None``.
        device: ``cuda`` or ``cpu``.

    Returns:
        One result for each value of each case; a caller fails on any that is not ``ok``.

    Raises:
        KernelError: ``unknown-operator``, or what an operator's guards refuse.
    """
    found: list[VerifyResult] = []
    for name in ops or tuple(OPERATORS):
        suite = operator(name).load_suite()
        shapes = suite.small_shapes if device == "cpu" else (*suite.small_shapes, *suite.large_shapes)
        for shape in shapes:
            for dtype in suite.dtypes:
                found += verify_case(suite, shape, dtype, device)
        found.append(verify_repeats(suite, shapes[-1], suite.dtypes[0], device))
        if device == "cuda":
            torch.cuda.empty_cache()
            found.append(verify_far_rows(suite, suite.dtypes[0], device))
            torch.cuda.empty_cache()
    return found
