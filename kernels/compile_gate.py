"""Compile kernels for sm_90 without a GPU, and refuse what would run badly there.

The compiler is the one of the pinned triton with its own ptxas, so the machine code is the one that a
GPU machine with that triton makes. A configuration passes when it fits shared memory, spills nothing (or no
more than its case states with a reason), loads whole 16-byte vectors or tensor tiles, and when its products read the
descriptors that the compiler wrote (``machine_code``).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from shardwright.kernels.machine_code import Fault, compiled_faults
from shardwright.schemas.errors import KernelError

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT_BYTES = 232_448
"""Shared memory of one block on sm_90."""
SPILL_LIMIT_BYTES = 0
"""Spilled bytes a thread where a case states no allowance: none; a kernel that spills moves more than it counts."""

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
ALIGNMENT = 16
"""Pointers and widths are compiled as multiples of this where the case says so, as at run time."""


@dataclass(frozen=True)
class CompileCase:
    """One kernel at one launch configuration.

    ``arguments`` maps each run-time argument to its Triton type (``*bf16``, ``i32``, ``fp32``);
    ``aligned`` names those that are multiples of 16.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    warps: int
    stages: int = 3
    spill_allowance: int = 0
    """Spilled bytes a thread that this case may have; ``spill_reason`` must say why that is the faster choice."""
    spill_reason: str = ""
    narrow: str = ""
    """Why no load of this kernel is 16 bytes wide or a tensor copy; empty where some must be."""

    def __post_init__(self) -> None:
        _reasoned(self.name, self.spill_allowance, self.spill_reason)

    def source(self) -> ASTSource:
        """The kernel with types, constants and alignment."""
        names = list(self.kernel.arg_names)
        signature = {name: self.arguments.get(name, "constexpr") for name in names}
        attributes = {(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in self.aligned}
        return ASTSource(fn=self.kernel, signature=signature, constexprs=dict(self.constants), attrs=attributes)

    def compile_options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class LaunchCase:
    """One kernel exactly as an operator launched it (``kernels.launched``)."""

    name: str
    kernel: Any
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    options: Mapping[str, Any]
    spill_allowance: int = 0
    spill_reason: str = ""
    narrow: str = ""

    def __post_init__(self) -> None:
        _reasoned(self.name, self.spill_allowance, self.spill_reason)

    def same_as(self, other: LaunchCase) -> bool:
        """Whether both are one compilation."""
        mine, theirs = ((c.kernel, c.signature, c.constants, c.attributes, c.options) for c in (self, other))
        return mine == theirs

    def named(self, name: str) -> LaunchCase:
        return replace(self, name=name)

    def source(self) -> ASTSource:
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, dict(self.signature), dict(self.constants), dict(self.attributes))

    def compile_options(self) -> dict[str, Any]:
        return dict(self.options)


AnyCase = CompileCase | LaunchCase


def _reasoned(name: str, allowance: int, reason: str) -> None:
    if allowance and not reason:
        raise ValueError(f"{name}: an allowance for spills needs its reason")


@dataclass(frozen=True)
class CompileReport:
    """What the compiler says about one case."""

    name: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    async_copies: int
    """``cp.async`` instructions: loads that fly while the program computes."""
    vector_loads: int
    """16-byte loads and copies from device memory."""
    tensor_copies: int = 0
    """Bulk tensor copies (TMA) from device memory."""
    spill_allowance: int = SPILL_LIMIT_BYTES
    narrow: str = ""
    faults: tuple[Fault, ...] = ()
    """Products that the assembler lets read elsewhere."""

    @property
    def complaint(self) -> str:
        """Why this case must not ship; empty where it may."""
        if self.shared_bytes > SHARED_LIMIT_BYTES:
            return f"{self.name}: {self.shared_bytes} bytes of shared memory, limit {SHARED_LIMIT_BYTES}"
        if self.spill_bytes > self.spill_allowance:
            return f"{self.name}: {self.spill_bytes} bytes spilled a thread, limit {self.spill_allowance}"
        if self.faults:
            return f"{self.name}: {len(self.faults)} descriptors are not the compiler's; {self.faults[0]}"
        if not self.vector_loads and not self.tensor_copies and not self.narrow:
            return f"{self.name}: no load from device memory is 16 bytes wide"
        return ""


def local_target() -> GPUTarget:
    """The target of this machine's CUDA device; sm_90 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return TARGET
    major, minor = torch.cuda.get_device_capability()
    return GPUTarget("cuda", 10 * major + minor, 32)


def compile_case(case: AnyCase, target: GPUTarget = TARGET) -> CompileReport:
    """Compile one case, for sm_90 where no other target is given; the result stays in Triton's cache.

    Raises:
        KernelError: ``does-not-compile``, with the compiler's own words.
    """
    source, options = case.source(), case.compile_options()
    try:
        compiled = triton.compile(source, target=target, options=options)
    except (triton.CompilationError, triton.OutOfResources, RuntimeError, AssertionError) as error:
        raise KernelError(
            "does-not-compile",
            f"{type(error).__name__}: {error}",
            where=case.name,
            next_action="change this launch configuration or the kernel",
        ) from error
    ptx = compiled.asm["ptx"]
    registers, spill = assemble(ptx, target.arch)
    return CompileReport(
        name=case.name,
        registers=registers,
        shared_bytes=int(compiled.metadata.shared),
        spill_bytes=spill,
        async_copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
        vector_loads=len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|cp\.async\.cg", ptx)),
        tensor_copies=len(re.findall(r"cp\.async\.bulk\.tensor[\w.]*\.shared::cluster\.global", ptx)),
        spill_allowance=case.spill_allowance,
        narrow=case.narrow,
        faults=compiled_faults(compiled),
    )


def assemble(ptx: str, arch: int = TARGET.arch) -> tuple[int, int]:
    """Registers and spilled bytes a thread, from ptxas's own statistics.

    Raises:
        KernelError: ``ptxas-silent`` where ptxas prints no statistics.
    """
    tool = triton.knobs.nvidia.ptxas.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            tool,
            "-v",
            f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}",
            str(path),
            "-o",
            str(Path(folder) / "kernel.cubin"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stderr + done.stdout
    used = re.search(r"Used (\d+) registers", text)
    if used is None:
        raise KernelError("ptxas-silent", text[-300:], where=tool, next_action="use the ptxas of triton 3.6")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text)]
    return int(used.group(1)), sum(spills)
