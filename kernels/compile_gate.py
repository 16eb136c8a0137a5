"""Compile kernels for sm_90 without a GPU, and refuse what would run badly there.

The compiler is the one of the pinned triton with its own ptxas, so the machine code is the one that a
GPU machine with that triton makes. A configuration passes when it fits shared memory and spills nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwright.schemas.errors import KernelError

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT_BYTES = 232_448
"""Shared memory of one block on sm_90."""
SPILL_LIMIT_BYTES = 0
"""Spilled bytes a thread: none; a row kernel that spills moves more bytes than it counts."""

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

    @property
    def complaint(self) -> str:
        """Why this case must not ship; empty where it may."""
        if self.shared_bytes > SHARED_LIMIT_BYTES:
            return f"{self.name}: {self.shared_bytes} bytes of shared memory, limit {SHARED_LIMIT_BYTES}"
        if self.spill_bytes > SPILL_LIMIT_BYTES:
            return f"{self.name}: {self.spill_bytes} bytes spilled a thread, limit {SPILL_LIMIT_BYTES}"
        return ""


def compile_case(case: CompileCase) -> CompileReport:
    """Compile one case for sm_90.

    Raises:
        KernelError: ``does-not-compile``, with the compiler's own words.
    """
    names = list(case.kernel.arg_names)
    signature = {name: case.arguments.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    try:
        compiled = triton.compile(source, target=TARGET, options=options)
    except (triton.CompilationError, triton.OutOfResources, RuntimeError, AssertionError) as error:
        raise KernelError(
            "does-not-compile",
            f"{type(error).__name__}: {error}",
            where=case.name,
            next_action="change this launch configuration or the kernel",
        ) from error
    ptx = compiled.asm["ptx"]
    registers, spill = assemble(ptx)
    return CompileReport(
        name=case.name,
        registers=registers,
        shared_bytes=int(compiled.metadata.shared),
        spill_bytes=spill,
        async_copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
        vector_loads=len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|cp\.async\.cg", ptx)),
    )


def assemble(ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes a thread, from ptxas's own statistics.

    Raises:
        KernelError: ``ptxas-silent`` where ptxas prints no statistics.
    """
    tool = triton.knobs.nvidia.ptxas.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [tool, "-v", "--gpu-name=sm_90a", str(path), "-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stderr + done.stdout
    used = re.search(r"Used (\d+) registers", text)
    if used is None:
        raise KernelError("ptxas-silent", text[-300:], where=tool, next_action="use the ptxas of triton 3.6")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text)]
    return int(used.group(1)), sum(spills)
