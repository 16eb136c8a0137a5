"""What each operator declares so that verify, bench, tune, the compile gate and bad-input tests need no list.

Legend: T rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.launch import Launch
from shardwright.schemas.ops import OpCost

Shape = Mapping[str, int]
Function = Callable[..., tuple[Tensor, ...]]
Run = Callable[[], object]

FAR: Shape = {"T": (1 << 31) // 7168 + 8, "H": 7168}
"""Just over 2³¹ values: what a row-wise operator over [T, H] declares as ``far_rows``."""


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
class TuneCase:
    """One kernel at one shape bucket whose launch choice lies in a data file (``kernels.tuned``)."""

    kernel: str
    bucket: str
    """Key of the choice, as the operator's configurations ask for it."""
    default: Any
    """The choice in code: a frozen dataclass of integers and booleans."""
    candidates: tuple[Any, ...]
    """Choices worth timing, of the default's type."""
    prepare: Callable[[], tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]]
    """Makes device inputs once → (one run of the operator, under whatever choice is in force; what that run
    produced beside the fp64 values)."""


@dataclass(frozen=True)
class BadInput:
    """One input outside an operator's contract: ``call`` must raise ``KernelError`` with ``code``."""

    name: str
    code: str
    call: Callable[[], object]


@dataclass(frozen=True)
class OpSuite:
    """Everything that is needed to judge one operator."""

    op: str
    inputs: Callable[[Shape, torch.dtype, str, int], tuple[Tensor, ...]]
    """``(shape, dtype, device, seed)`` → inputs in the order that functions take them; floating ones are
    differentiated unless ``constant`` names them."""
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
    compile_cases: tuple[AnyCase, ...] | Callable[[], tuple[AnyCase, ...]] = ()
    """Shipped configurations; a function where they depend on tuned choices (``gate_cases`` reads both)."""
    dtypes: tuple[torch.dtype, ...] = field(default=(torch.bfloat16, torch.float16, torch.float32))
    constant: tuple[str, ...] = ()
    """Inputs that the operator never differentiates: a base that it demands frozen, indices, labels."""
    far_rows: Shape | None = None
    """Declares the operator row-wise: inputs whose first dim is T, and all outputs, hold one row each, and no
    row depends on another. The shape has a tensor of more than 2³¹ values, for the 64-bit address check."""
    forward_cost: Callable[..., OpCost] | None = None
    """Cost of a forward that wants no gradient, where ``cost`` counts gradients that the forward makes."""
    index_slack: int = 0
    """Most entries of an integer output that may differ from fp64's beyond eager's (scores within one fp32 step)."""
    extras: Callable[[BenchCase, str], Mapping[str, Run]] | None = None
    """``(case, pass)`` → further timings that are no rivals, such as the products alone or ours without LoRA:
    each becomes the metrics ``NAME_ms`` and ``ours_over_NAME``."""
    facts: Callable[[BenchCase], Mapping[str, float]] | None = None
    """What a line must state beside times, such as the distribution of rows (``row_facts``)."""
    tune: Callable[[], tuple[TuneCase, ...]] | None = None
    in_order: Function | None = None
    """The operator in the mode that promises the same bits every run, where ``fused`` promises none."""
    bad_inputs: Callable[[str], tuple[BadInput, ...]] | None = None
    """``device`` → inputs that the operator must refuse."""

    def gate_cases(self) -> tuple[AnyCase, ...]:
        """The compile cases, under the tuned choices in force now."""
        return self.compile_cases() if callable(self.compile_cases) else self.compile_cases


def row_facts(counts: Tensor) -> dict[str, float]:
    """The distribution of rows over experts, from ``counts [E]``."""
    rows = counts.double()
    return {
        "rows_mean": round(rows.mean().item(), 1),
        "rows_max": rows.max().item(),
        "rows_min": rows.min().item(),
        "experts_empty": float((counts == 0).sum().item()),
    }


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Standard normal values, drawn on the CPU in fp32 so that every device sees the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def normal_on_device(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Standard normal values drawn on the device: for large timing inputs."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)
