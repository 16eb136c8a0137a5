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

from shardwright.kernels.bad_input import complaints
from shardwright.kernels.cases import Function, OpSuite, Shape
from shardwright.kernels.guards import refuse
from shardwright.kernels.passes import differentiable, label, leaves_of, output_gradients, sizes, widened
from shardwright.kernels.registry import OPERATORS, operator
from shardwright.schemas.base import Model

FACTOR = 1.25
"""Largest ratio of the fused operator's error to eager torch's, both against fp64."""

SLACK = 4 * torch.finfo(torch.float32).eps
"""Relative error that reordering fp32 sums may add, where eager happens to be (nearly) exact."""

SCALAR_SLACK = 1 / 64
"""Share of the case's own rounding step that a scalar's relative error may have beside eager's. A mean over rows
is one draw whose errors cancel by chance: two such draws do not compare by their ratio."""

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


def values(
    function: Function,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    constant: Sequence[int] = (),
) -> list[Tensor]:
    """Outputs, then the gradients of all floating inputs, for the given output gradients.

    Args:
        gradients: one for each output; ``None`` where an output has none (indices, counts).
        constant: positions of floating inputs that are not differentiated.

    Raises:
        KernelError: ``input-written`` where the function changed an input.
        RuntimeError: an output that has a gradient is not attached to the graph.
    """
    leaves = [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point() and at not in constant)
        for at, tensor in enumerate(inputs)
    ]
    outputs = function(*leaves)
    ends, given = differentiable(outputs, gradients)
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(ends, learning, given) if ends and learning else ()
    for at, (leaf, tensor) in enumerate(zip(leaves, inputs, strict=True)):
        if not torch.equal(leaf.detach(), tensor.detach()) and not bool(tensor.isnan().any()):
            raise refuse("verify", "input-written", f"input {at} changed", "never write to an input")
    return [output.detach() for output in outputs] + list(found)


def relative_error(produced: Tensor, exact: Tensor) -> float:
    """``‖produced - exact‖ / ‖exact‖`` in fp64; 0 for empty tensors, NaN where anything is NaN."""
    if exact.numel() == 0:
        return 0.0
    scale = exact.double().norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float((produced.double() - exact.double()).norm() / scale)


def differences(produced: Tensor, exact: Tensor) -> float:
    """How many integer entries differ; all of them where the shapes do."""
    if produced.shape != exact.shape:
        return float(max(produced.numel(), exact.numel(), 1))
    return float((produced != exact).sum())


def verify_case(suite: OpSuite, shape: Shape, dtype: torch.dtype, device: str) -> list[VerifyResult]:
    """Compare all outputs and gradients at one shape and dtype."""
    inputs = suite.inputs(shape, dtype, device, SEED)
    wide = [widened(tensor) for tensor in inputs]
    constant = [at for at, name in enumerate(suite.input_names) if name in suite.constant]
    gradients = output_gradients(suite, inputs, dtype, SEED + 100)
    exact = values(suite.reference, wide, gradients, constant)
    eager = values(suite.reference, inputs, gradients, constant)
    with poisoned_memory():
        fused = values(suite.fused, inputs, gradients, constant)
    learning = [
        name
        for name, tensor in zip(suite.input_names, inputs, strict=True)
        if tensor.is_floating_point() and name not in suite.constant
    ]
    names = [*suite.output_names, *(f"d{name}" for name in learning)]
    return [
        judge(suite.op, label(dtype, shape), name, produced, plain_value, truth, slack=suite.index_slack, dtype=dtype)
        for name, produced, plain_value, truth in zip(names, fused, eager, exact, strict=True)
    ]


def judge(
    op: str,
    case: str,
    value: str,
    fused: Tensor,
    eager: Tensor,
    exact: Tensor,
    *,
    slack: int = 0,
    dtype: torch.dtype | None = None,
) -> VerifyResult:
    """Hold one fused value to eager's error, in dtype, shape and size.

    An integer value is compared by how many entries differ: ``slack`` at most beyond eager's.
    """
    if fused.is_floating_point():
        error, plain = relative_error(fused, exact), relative_error(eager, exact)
        allowed = FACTOR * plain + SLACK
        if exact.dim() == 0 and dtype is not None:
            allowed += SCALAR_SLACK * torch.finfo(dtype).eps
    else:
        error, plain = differences(fused, exact), differences(eager, exact)
        allowed = plain + slack
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
    constant = [at for at, name in enumerate(suite.input_names) if name in suite.constant]
    run = suite.in_order or suite.fused
    outputs = run(*leaves_of(suite, inputs))
    gradients = [torch.ones_like(output) if output.requires_grad else None for output in outputs]
    first, second = (values(run, inputs, gradients, constant) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return VerifyResult(
        op=suite.op, case=f"repeat/{sizes(shape)}", value="bits", ok=same, error=0.0, eager_error=0.0, allowed=0.0
    )


FAR_ROWS = 4
FAR_MEMORY_BYTES = 60_000_000_000


def verify_far_rows(suite: OpSuite, shape: Shape, dtype: torch.dtype, device: str) -> VerifyResult:
    """Rows beyond 2³¹ elements give the bits that they give alone: addresses are 64-bit.

    Only for an operator that declares itself row-wise (``OpSuite.far_rows``): inputs whose first dim is T are
    rows, and so are all outputs. Needs ``FAR_MEMORY_BYTES`` of free device memory; says so in ``detail``
    where it did not run.
    """
    case = f"far-rows/{sizes(shape)}"
    if torch.cuda.mem_get_info()[0] < FAR_MEMORY_BYTES:
        needs = f"not run: needs {FAR_MEMORY_BYTES} bytes of free device memory"
        return VerifyResult(
            op=suite.op, case=case, value="bits", ok=True, error=None, eager_error=0.0, allowed=0.0, detail=needs
        )
    inputs = suite.inputs(shape, dtype, device, SEED)
    is_row = [tensor.dim() > 1 and tensor.shape[0] == shape["T"] for tensor in inputs]
    learns = [
        row and tensor.is_floating_point() and name not in suite.constant
        for row, tensor, name in zip(is_row, inputs, suite.input_names, strict=True)
    ]
    far = [tensor.requires_grad_(yes) for tensor, yes in zip(inputs, learns, strict=True)]
    near = [
        (tensor.detach()[-FAR_ROWS:].clone() if row else tensor.detach()).requires_grad_(yes)
        for tensor, row, yes in zip(inputs, is_row, learns, strict=True)
    ]
    outputs, alone = suite.fused(*far), suite.fused(*near)
    ends = [output for output in outputs if output.requires_grad]
    gradients = [output.detach() for output in ends]
    found = torch.autograd.grad(ends, [t for t in far if t.requires_grad], gradients)
    near_ends = [output for output in alone if output.requires_grad]
    tails = [gradient[-FAR_ROWS:] for gradient in gradients]
    expected = torch.autograd.grad(near_ends, [t for t in near if t.requires_grad], tails)
    pairs = zip((*outputs, *found), (*alone, *expected), strict=True)
    same = all(torch.equal(whole.detach()[-FAR_ROWS:], part.detach()) for whole, part in pairs)
    return VerifyResult(op=suite.op, case=case, value="bits", ok=same, error=0.0, eager_error=0.0, allowed=0.0)


def suites_of(ops: Sequence[str] | None) -> tuple[OpSuite, ...]:
    """All suites of the named operators; of all registered ones where ``None``."""
    return tuple(suite for name in ops or tuple(OPERATORS) for suite in operator(name).load_suites())


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
    return [result for suite in suites_of(ops) for result in verify_suite(suite, device)]


def verify_suite(suite: OpSuite, device: str) -> list[VerifyResult]:
    """All shapes, dtypes and bad inputs of one suite, the repeat check, and far rows where it is row-wise."""
    found: list[VerifyResult] = []
    shapes = suite.small_shapes if device == "cpu" else (*suite.small_shapes, *suite.large_shapes)
    for shape in shapes:
        for dtype in suite.dtypes:
            found += verify_case(suite, shape, dtype, device)
        if device == "cuda":
            torch.cuda.empty_cache()
    found.append(verify_repeats(suite, shapes[-1], suite.dtypes[0], device))
    found += verify_bad_input(suite, device)
    if device == "cuda" and suite.far_rows is not None:
        torch.cuda.empty_cache()
        found.append(verify_far_rows(suite, suite.far_rows, suite.dtypes[0], device))
        torch.cuda.empty_cache()
    return found


def verify_bad_input(suite: OpSuite, device: str) -> list[VerifyResult]:
    """Every bad input is refused with its code, or computed rightly (``kernels.bad_input``)."""
    return [
        VerifyResult(
            op=suite.op,
            case=f"bad-input/{case}",
            value="answer",
            ok=not why,
            error=0.0,
            eager_error=0.0,
            allowed=0.0,
            detail=why,
        )
        for case, why in complaints(suite, device).items()
    ]
