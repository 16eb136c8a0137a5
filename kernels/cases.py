"""What each operator declares so that verify, bench, sweep and the compile gate need no list of their own.

Legend: T rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.kernels.compile_gate import CompileCase
from shardwright.kernels.launch import Launch
from shardwright.schemas.ops import OpCost

Shape = Mapping[str, int]
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class BenchCase:
    """One line family of the result files: ``case`` at ``shape``, each of ``passes``."""

    case: str
    shape: Shape
    dtype: torch.dtype
    passes: tuple[str, ...]


@dataclass(frozen=True)
class SweepCase:
    """One pass of an operator with free launch choices, for choosing its configuration table.

    ``prepare(H, dtype, device, seed)`` returns the launcher, which runs the kernel once with a
    configuration, and the outputs it fills beside their fp64 values.
    """

    name: str
    floor_bytes: int
    candidates: Callable[[int], tuple[Launch, ...]]
    """Width H → launches worth timing."""
    prepare: Callable[[int, torch.dtype, str, int], tuple[Callable[[Launch], None], list[tuple[Tensor, Tensor]]]]


@dataclass(frozen=True)
class OpSuite:
    """Everything that is needed to judge one operator."""

    op: str
    inputs: Callable[[Shape, torch.dtype, str, int], tuple[Tensor, ...]]
    """``(shape, dtype, device, seed)`` → differentiable inputs, in the order that functions take them."""
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    frozen: tuple[str, ...]
    """Inputs whose gradient ``fwd+dx`` leaves out: the weights of a frozen base."""
    fused: Function
    reference: Function
    """Plain torch; run in fp64 for the truth and in the case's dtype for eager's own error."""
    cost: Callable[..., OpCost]
    rivals: Mapping[str, Callable[[], Function]]
    """Name → maker of the rival's function (a maker, so that torch.compile starts only when timed)."""
    small_shapes: tuple[Shape, ...]
    """Odd sizes, zero rows, widths that are no power of two: cheap enough for the interpreter."""
    large_shapes: tuple[Shape, ...] = ()
    """Shapes only for a device."""
    bench: tuple[BenchCase, ...] = ()
    sweep: tuple[SweepCase, ...] = ()
    compile_cases: tuple[CompileCase, ...] = ()
    dtypes: tuple[torch.dtype, ...] = field(default=(torch.bfloat16, torch.float16, torch.float32))


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Standard normal values, drawn on the CPU in fp32 so that every device sees the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def normal_on_device(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Standard normal values drawn on the device: for large timing inputs."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)
