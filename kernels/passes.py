"""One pass of an operator as a closure: what verify differentiates, and what bench and extras time.

``fwd`` runs with gradients possible; ``bwd`` is the backward of a kept graph with all gradients, ``fwd+bwd``
both with all gradients, ``fwd+dx`` both with the weights frozen. Gradients are returned, not accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.kernels.cases import BenchCase, Function, OpSuite, Run, Shape, normal, normal_on_device

SEED = 7
POWERS = (0.25, 0.5, 1.0, 2.0)
"""Gradients that a scalar loss gets: a scaled loss's are powers of two, and they add no rounding."""

LARGE_VALUES = 1 << 24
"""Gradients of more values are drawn on the device."""


def widened(tensor: Tensor) -> Tensor:
    """In fp64, where it is floating; indices stay."""
    return tensor.double() if tensor.is_floating_point() else tensor


def leaves_of(suite: OpSuite, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Inputs as fresh leaves; floating ones learn, but for ``suite.constant``."""
    return [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point() and name not in suite.constant)
        for name, tensor in zip(suite.input_names, inputs, strict=True)
    ]


def gradient_like(output: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """A seeded gradient of an output's shape, on the grid of the narrower of ``dtype`` and its own; a power of
    two for a scalar."""
    if output.dim() == 0:
        return torch.full_like(output, POWERS[seed % len(POWERS)], requires_grad=False)
    draw = normal_on_device if output.numel() > LARGE_VALUES else normal
    return draw(tuple(output.shape), dtype, str(output.device), seed).to(output.dtype)


def output_gradients(suite: OpSuite, inputs: Sequence[Tensor], dtype: torch.dtype, seed: int) -> list[Tensor | None]:
    """One gradient for each output that the reference differentiates; ``None`` for indices and counts."""
    outputs = suite.reference(*leaves_of(suite, [widened(tensor) for tensor in inputs]))
    return [
        gradient_like(output.detach(), dtype, seed + at) if output.requires_grad else None
        for at, output in enumerate(outputs)
    ]


def differentiable(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that have a gradient, and those gradients in the outputs' dtype and on their device."""
    pairs = [(output, g.to(output)) for output, g in zip(outputs, gradients, strict=True) if g is not None]
    return [output for output, _ in pairs], [g for _, g in pairs]


def timed_pass(suite: OpSuite, case: BenchCase, function: Function, name: str, device: str = "cuda") -> Run:
    """A closure that runs one pass of ``function`` once, on inputs of the case."""
    inputs = suite.inputs(case.shape, case.dtype, device, SEED)
    if name == "fwd":
        leaves = [tensor.detach() for tensor in inputs]
        return lambda: function(*leaves)
    fixed = {*suite.constant, *(suite.frozen if name == "fwd+dx" else ())}
    leaves = [
        tensor.detach().requires_grad_(tensor.is_floating_point() and role not in fixed)
        for role, tensor in zip(suite.input_names, inputs, strict=True)
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    kept = function(*leaves)
    gradients: list[Tensor | None] = [
        gradient_like(output.detach(), output.dtype, SEED + 1 + at) if output.requires_grad else None
        for at, output in enumerate(kept)
    ]
    if name == "bwd":
        ends, given = differentiable(kept, gradients)
        return lambda: torch.autograd.grad(ends, wanted, given, retain_graph=True)
    del kept
    return lambda: torch.autograd.grad(*_with_inputs(differentiable(function(*leaves), gradients), wanted))


def _with_inputs(
    pair: tuple[list[Tensor], list[Tensor]], wanted: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return pair[0], wanted, pair[1]


def label(dtype: torch.dtype, shape: Shape) -> str:
    """``bfloat16/T5,H96``."""
    return f"{str(dtype).rpartition('.')[2]}/{sizes(shape)}"


def sizes(shape: Shape) -> str:
    """``T5,H96``."""
    return ",".join(f"{key}{size}" for key, size in shape.items())
