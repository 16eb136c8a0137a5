"""Descriptors of matrix products in machine code, and launches that look at them first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the disassembler is triton's")

import triton
import triton.language as tl

from shardwright.kernels import sound
from shardwright.kernels.compile_gate import TARGET, CompileCase, compile_case
from shardwright.kernels.machine_code import PRODUCT, compiled_faults, disassemble, faults, high_words
from shardwright.schemas.errors import KernelError

PTX = """
	or.b64  	%rd235, %rd14, -9223371899415822336;
	add.s64 	%rd236, %rd14, -9223371899415822272;
	add.s64 	%rd65, %rd155, 4611686293305294850;
	add.s64 	%rd9, %rd8, 12288;
"""
"""Constants with the high words 0x80000020 and 0x40000040, and an offset that has none."""


def listing(*instructions: str) -> str:
    return "\n".join(f"        /*{16 * at:04x}*/                   {text} ;" for at, text in enumerate(instructions))


def found(*instructions: str) -> list[tuple[str, str]]:
    return [(fault.register, fault.holds) for fault in faults(PTX, listing(*instructions))]


def test_high_words_of_descriptors() -> None:
    assert high_words(PTX) == {0x80000020, 0x40000040}


def test_a_register_that_nothing_has_set() -> None:
    """What stopped the delta rule's gradients on an H200."""
    low, high = "UIADD3 UR30, UP0, UR18, 0x40, URZ", "UIADD3.X UR31, UR18, -0x7fffffe0, URZ, UP0, !UPT"
    assert found("UMOV UR17, 0x400", low, high) == [("UR18", "")]


def test_a_register_that_holds_a_number_of_the_kernel() -> None:
    """What stopped the scan over 256 channels: R0 was the count of heads."""
    heads, high = "LDC R0, c[0x0][0x270]", "IADD3.X R10, R0, -0x7fffffe0, RZ, P1, !PT"
    assert found(heads, "IMAD.WIDE.U32 R4, R9, R0.reuse, R2", high) == [("R0", "LDC R0, c[0x0][0x270]")]


def test_zero_is_zero_however_it_is_written() -> None:
    for zero in ("IMAD.MOV.U32 R9, RZ, RZ, RZ", "MOV R9, RZ", "CS2R R8, SRZ", "CS2R R9, SRZ"):
        assert found(zero, "IADD3.X R3, R9, 0x40000040, RZ, P1, !PT") == []
    assert found("UMOV UR6, URZ", "UIADD3.X UR43, UR6, 0x40000040, URZ, UP0, !UPT") == []
    assert found("IADD3.X R3, RZ, 0x40000040, RZ, P1, !PT") == []


def test_a_zero_that_is_overwritten_is_none() -> None:
    high = "IADD3.X R3, R9, 0x40000040, RZ, P1, !PT"
    assert found("MOV R9, RZ", "LDG.E.128 R8, desc[UR60][R32.64]", high) == [("R9", "LDG.E.128 R8, desc[UR60][R32.64]")]
    assert found("MOV R9, RZ", "STS.128 [R9], R4", high) == []


def test_other_additions_are_not_looked_at() -> None:
    assert found("IADD3.X R3, R9, 0x10, RZ, P1, !PT", "IADD3 R3, R9, 0x40000040, RZ") == []


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def test_a_real_product_passes_and_has_descriptors() -> None:
    pointers = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32"}
    case = CompileCase("product", product_kernel, pointers, {"N": 64}, tuple(pointers), warps=4)
    assert compile_case(case).complaint == ""
    compiled = triton.compile(case.source(), target=TARGET, options=case.compile_options())
    assert PRODUCT in compiled.asm["ptx"] and high_words(compiled.asm["ptx"])
    assert "HGMMA" in disassemble(compiled.asm["cubin"]) and compiled_faults(compiled) == ()


def test_no_machine_code_no_listing() -> None:
    with pytest.raises(KernelError, match="nvdisasm-failed"):
        disassemble(b"no machine code")


class Kernel:
    """A kernel that notes what is asked of it."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.looked: list[Any] = []
        self.started: list[Any] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        self.looked.append((arguments, constants))
        return SimpleNamespace()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.started.append((grid, arguments, constants))


class OnDevice(torch.Tensor):
    """Says that it lies on a device."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the look at the machine code gives, one answer a call; the last again and again."""
    answers: list[Any] = [()]
    monkeypatch.setattr(sound, "compiled_faults", lambda compiled: answers[0] if len(answers) == 1 else answers.pop(0))
    monkeypatch.setattr(sound, "_seen", set())
    return answers


def test_each_kind_of_launch_is_looked_at_once(machine: list[Any]) -> None:
    kernel, x = Kernel(), torch.zeros(64).as_subclass(OnDevice)
    for heads in (2, 2, 4):
        sound.start(kernel, (3,), x, heads, BK=64)
    assert len(kernel.looked) == 2 and len(kernel.started) == 3
    sound.start(kernel, (3,), x[1:], 2, BK=64)
    sound.start(kernel, (3,), x.to(torch.bfloat16), 2, BK=64)
    sound.start(kernel, (3,), x, 2, BK=32)
    assert len(kernel.looked) == 5


def test_a_fault_is_refused_before_it_runs_and_every_time(machine: list[Any]) -> None:
    machine[0] = faults(PTX, listing("UIADD3.X UR31, UR18, -0x7fffffe0, URZ, UP0, !UPT"))
    kernel, x = Kernel(), torch.zeros(64).as_subclass(OnDevice)
    for _ in range(2):
        with pytest.raises(KernelError, match="assembler-fault") as caught:
            sound.start(kernel, (3,), x)
        assert "UR18 is not set, not zero" in str(caught.value) and "TRITON_PTXAS_PATH" in caught.value.text()
    assert kernel.started == []


def test_nothing_is_looked_at_off_a_device(machine: list[Any]) -> None:
    kernel = Kernel()
    sound.start(kernel, (3,), torch.zeros(2), 5)
    assert kernel.looked == [] and [grid for grid, _, _ in kernel.started] == [(3,)]
