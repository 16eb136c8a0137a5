"""Bad input that every operator meets alike: refused with a typed error before launch, or computed rightly.

The kit needs no knowledge of an operator: it takes a suite's own inputs and changes one of them, to strides
with gaps, to a start off the 16-byte boundary, to another dtype; and puts NaN into one row of a row-wise
operator. What an operator alone knows (indices out of range, sizes that do not divide) it lists itself in
``OpSuite.bad_inputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, OpSuite, Shape
from shardwright.kernels.passes import widened
from shardwright.schemas.errors import KernelError

SEED = 31
NEAR = 2e-2
"""Relative error within which a changed input counts as computed rightly: bf16 rounding of both sides."""


def gaps(tensor: Tensor) -> Tensor:
    """The same values with another value between each two."""
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def shifted(tensor: Tensor) -> Tensor:
    """The same values, contiguous, one value past a 16-byte boundary."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor)


def other_dtype(tensor: Tensor) -> Tensor:
    """fp32 for 16-bit values, bf16 for fp32; int32 for int64 and back."""
    other = {torch.float32: torch.bfloat16, torch.int64: torch.int32, torch.int32: torch.int64}
    return tensor.to(other.get(tensor.dtype, torch.float32))


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "gaps": (gaps, ("not-contiguous",)),
    "shifted": (shifted, ("misaligned",)),
    "other-dtype": (other_dtype, ("dtype-mixed", "dtype-unsupported")),
}
"""Change → how it is made, and the codes that may refuse it."""


def usable_shape(suite: OpSuite) -> Shape:
    """The first small shape whose inputs all have values."""
    return next(
        shape
        for shape in suite.small_shapes
        if all(t.numel() > 1 for t in suite.inputs(shape, suite.dtypes[0], "cpu", SEED))
    )


def changed_inputs(suite: OpSuite, device: str) -> list[tuple[str, str, tuple[str, ...], list[Tensor]]]:
    """``(input, change, allowed codes, inputs with that change)`` for every input and change."""
    inputs = suite.inputs(usable_shape(suite), suite.dtypes[0], device, SEED)
    found = []
    for at, name in enumerate(suite.input_names):
        for change, (make, codes) in CHANGES.items():
            given = [tensor.detach() for tensor in inputs]
            given[at] = make(given[at])
            found.append((name, change, codes, given))
    return found


def complaint(suite: OpSuite, codes: Sequence[str], given: Sequence[Tensor]) -> str:
    """Why an operator's answer to a changed input is not acceptable; empty where it is."""
    try:
        with torch.no_grad():
            outputs = suite.fused(*given)
    except KernelError as error:
        return "" if error.code.removeprefix("kernel/") in codes else f"refused as {error.code}"
    truth = suite.reference(*(widened(tensor) for tensor in given))
    for name, output, exact in zip(suite.output_names, outputs, truth, strict=True):
        wide, right = output.detach().double(), exact.detach().double()
        if wide.shape != right.shape or not bool((wide - right).norm() <= NEAR * right.norm() + 1e-6):
            return f"{name} is wrong, and nothing was refused"
    return ""


def nan_complaint(suite: OpSuite, device: str) -> str:
    """NaN in one row of a row-wise operator: that row is NaN in some output, and no other row changes a bit."""
    inputs = suite.inputs(usable_shape(suite), suite.dtypes[0], device, SEED)
    T, row = inputs[0].shape[0], inputs[0].shape[0] // 2
    spoilt = [tensor.detach().clone() for tensor in inputs]
    spoilt[0][row, 0] = float("nan")
    with torch.no_grad():
        clean, found = suite.fused(*inputs), suite.fused(*spoilt)
    others = [at for at in range(T) if at != row]
    rows = [output for output in found if output.dim() > 0 and output.shape[0] == T]
    if not any(bool(output[row].isnan().any()) for output in rows if output.is_floating_point()):
        return "a NaN row gave numbers"
    same = all(torch.equal(a[others], b[others]) for a, b in zip(clean, found, strict=True) if a.shape[:1] == (T,))
    return "" if same else "a NaN reached another row"


def refusal_complaint(bad: BadInput) -> str:
    """Why an input that must be refused was not; empty where it was, with its code."""
    try:
        bad.call()
    except KernelError as error:
        return "" if error.code == f"kernel/{bad.code}" else f"refused as {error.code}"
    return "was not refused"


def complaints(suite: OpSuite, device: str) -> dict[str, str]:
    """Case → why it is not acceptable, empty where it is: every change, NaN where row-wise, and the suite's own."""
    found = {
        f"{name}/{change}": complaint(suite, codes, given)
        for name, change, codes, given in changed_inputs(suite, device)
    }
    if suite.far_rows is not None:
        found["nan-row"] = nan_complaint(suite, device)
    if suite.bad_inputs is not None:
        found |= {f"refuses/{bad.name}": refusal_complaint(bad) for bad in suite.bad_inputs(device)}
    return found
