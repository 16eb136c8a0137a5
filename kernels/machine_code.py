"""Machine code of a matrix product that reads another descriptor than the compiler wrote: a fault of ptxas 12.8.

A descriptor of shared memory is 64 bits: an address in its low word, layout in its high word. The compiler adds both
at once, ``address + constant``, where the address has a high word of zero. ptxas 12.8 splits the addition, and under
pressure for registers it takes some other register for that zero: one that nothing has set yet, or one that holds a
number of the kernel. The product then reads elsewhere: wrong values, or an illegal address, or, as the register
happens to be, neither. PTX is sound, so neither the interpreter nor checks of addresses inside the kernel see it, and
ptxas 13.0 makes sound code of the same PTX. Here it is read off the instructions in the order of the program, in which
what a loop reads was set before it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

from shardwright.schemas.errors import KernelError

PRODUCT = "wgmma.mma_async"
"""In the PTX of kernels that have such descriptors."""

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_REGISTER = re.compile(r"U?R(?:\d+|Z)")
_ADDED = re.compile(r"(?:add\.s64|or\.b64)\s+%rd\d+,\s*%rd\d+,\s*(-?\d{10,});")
_WRITES_NOTHING = re.compile(r"^(?:ST|RED|BAR|BRA|EXIT|HGMMA|UTMA|SYNCS|MEMBAR|FENCE|WARP|BSYNC|BSSY|DEPBAR)")
_PAIR = re.compile(r"\.64\b|\.WIDE\b|^CS2R$|^DMUL|^DADD|^DFMA")


@dataclass(frozen=True)
class Fault:
    """One addition of a high word to a register that is not zero."""

    address: str
    instruction: str
    register: str
    holds: str
    """The instruction that set the register last; empty where none has."""

    def __str__(self) -> str:
        return f"{self.instruction} at {self.address}: {self.register} is {self.holds or 'not set'}, not zero"


def faults(ptx: str, listing: str) -> tuple[Fault, ...]:
    """Descriptors whose high word is not the compiler's.

    Args:
        ptx: what the assembler was given.
        listing: what it made of it, as nvdisasm prints one kernel.
    """
    words = high_words(ptx)
    last: dict[str, tuple[str, str]] = {}
    found = []
    for address, opcode, operands in _instructions(listing):
        parts = [part.strip().removesuffix(".reuse") for part in operands.split(",")]
        if opcode in ("IADD3.X", "UIADD3.X") and any(_number(part) in words for part in parts[1:]):
            for register in (part for part in parts[1:] if _REGISTER.fullmatch(part)):
                holds = last.get(register)
                if register not in ("RZ", "URZ") and not (holds and _is_zero(*holds)):
                    text = " ".join(holds) if holds else ""
                    found.append(Fault(address, f"{opcode} {operands}", register, text))
        if parts and _REGISTER.fullmatch(parts[0]) and not _WRITES_NOTHING.match(opcode):
            for register in _written(parts[0], opcode):
                last[register] = (opcode, operands)
    return tuple(found)


def high_words(ptx: str) -> frozenset[int]:
    """High words, unsigned, of constants added to descriptors; those of plain offsets, 0 and all ones, are left out."""
    words = {int(text) >> 32 & 0xFFFFFFFF for text in _ADDED.findall(ptx)}
    return frozenset(words - {0, 0xFFFFFFFF})


def compiled_faults(compiled: triton.compiler.CompiledKernel) -> tuple[Fault, ...]:
    """Faults of a compiled kernel; none where it has no warp-group product, which is not disassembled.

    Raises:
        KernelError: ``nvdisasm-failed``.
    """
    ptx = compiled.asm["ptx"]
    return faults(ptx, disassemble(compiled.asm["cubin"])) if PRODUCT in ptx else ()


def disassemble(cubin: bytes) -> str:
    """The listing of a compiled kernel, by the nvdisasm that triton ships.

    Raises:
        KernelError: ``nvdisasm-failed``.
    """
    tool = triton.knobs.nvidia.nvdisasm.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError("nvdisasm-failed", done.stderr[-300:], where=tool, next_action="use the tools of triton 3.6")
    return done.stdout


def _instructions(listing: str) -> Iterator[tuple[str, str, str]]:
    for line in listing.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            yield match.group(1), match.group(2), match.group(3).strip()


def _number(text: str) -> int | None:
    try:
        return int(text, 16) & 0xFFFFFFFF if "0x" in text else None
    except ValueError:
        return None


def _is_zero(opcode: str, operands: str) -> bool:
    sources = [part.strip() for part in operands.split(",")[1:]]
    moves = opcode.startswith(("UMOV", "MOV", "IMAD.MOV", "CS2R"))
    return moves and all(source in ("RZ", "URZ", "SRZ") for source in sources)


def _written(register: str, opcode: str) -> Iterator[str]:
    yield register
    if _PAIR.search(opcode) or ".128" in opcode or ".M88.4" in opcode:
        kind, at = register.rstrip("0123456789Z"), register.lstrip("UR")
        if at.isdigit():
            count = 4 if ".128" in opcode or ".M88.4" in opcode else 2
            yield from (f"{kind}{int(at) + step}" for step in range(1, count))
