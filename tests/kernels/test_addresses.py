"""Addresses are 64-bit: the reported sizes wrap a 32-bit product, and no kernel makes an address from one.

Reads the intermediate code of every shipped launch; needs no device and no memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("triton", reason="the intermediate code is triton's")

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.compiler import make_backend

from shardwright.kernels.compile_gate import TARGET, AnyCase, CompileCase
from shardwright.kernels.registry import OPERATORS, operator

REPORTED = {
    "C6: row 1,079,839 of stride 2,048": (1_079_839, 2048, 2_211_510_272),
    "C7: expert 511 of 4096 x 2048": (511, 4096 * 2048, 4_286_578_688),
    "C7: expert 63 of 4096 x 14336": (63, 4096 * 14336, 3_699_376_128),
    "C7: expert 895 of 6144 x 3584": (895, 6144 * 3584, 19_707_985_920),
}


@pytest.mark.parametrize("case", REPORTED)
def test_reported_offsets_wrap_in_32_bits(case: str) -> None:
    index, stride, offset = REPORTED[case]
    assert index * stride == offset > 2**31
    with np.errstate(over="ignore"):
        assert int(np.int32(index) * np.int32(stride)) != offset
    assert int(np.int64(index) * stride) == offset


def intermediate(case: AnyCase) -> str:
    """Triton's code of one launch before any lowering."""
    source, backend, context = case.source(), make_backend(TARGET), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(case.compile_options())
    functions = backend.get_codegen_implementation(options)
    return str(source.make_ir(TARGET, options, functions, backend.get_module_map(), context))


LINE = re.compile(r"^\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?\(?\s*(.*)$")
PASSING = ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.addi", "arith.select", "arith.extsi", "tt.reshape")


HEAD = re.compile(r"@(\"[^\"]+\"|[\w.$]+)\((.*)")
Values = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Function:
    """One function of a module: its parameters in order, and what makes each of its values."""

    name: str
    parameters: tuple[str, ...]
    made: Values

    @staticmethod
    def of(text: str) -> Function:
        first, *lines = text.splitlines()
        head = HEAD.search(first)
        assert head is not None, first
        parameters = tuple(re.findall(r"(%\w+): ", head[2].split(") attributes")[0]))
        return Function(head[1], parameters, {m[1]: (m[2], m[3]) for line in lines if (m := LINE.match(line))})


def used(rest: str) -> list[str]:
    """Names of the values that an operation reads."""
    return re.findall(r"%\w+", rest.split(" : ")[0])


class Module:
    """Triton's code of one launch, read for the offsets of its addresses."""

    def __init__(self, code: str) -> None:
        self.functions = [Function.of(text) for text in code.split("tt.func")[1:]]

    def fixed(self, function: Function, name: str) -> bool:
        """Whether a value is bounded at compile time: constants, a tile's own range, and a parameter that every call
        gives such a value."""
        kind, rest = function.made.get(name, ("", ""))
        if kind in ("arith.constant", "tt.make_range"):
            return True
        if name in function.parameters:
            calls = self.calls(function, function.parameters.index(name))
            return bool(calls) and all(self.fixed(caller, given) for caller, given in calls)
        inner = used(rest)
        return kind in PASSING and bool(inner) and all(self.fixed(function, one) for one in inner)

    def calls(self, function: Function, place: int) -> list[tuple[Function, str]]:
        """(caller, what it gives) for one parameter of a function."""
        return [
            (caller, used(rest)[place])
            for caller in self.functions
            for kind, rest in caller.made.values()
            if kind == "tt.call" and (head := HEAD.search(rest)) is not None and head[1] == function.name
        ]

    def narrow(self, function: Function, name: str) -> bool:
        kind, rest = function.made.get(name, ("", ""))
        if kind == "arith.muli":
            wraps = re.search(r"\bi32\b|xi32>", rest) is not None
            return wraps and not any(self.fixed(function, one) for one in used(rest))
        return kind in PASSING and any(self.narrow(function, one) for one in used(rest))


def narrow_products(code: str) -> list[str]:
    """Address computations whose offset contains a 32-bit product of two values known only at run time."""
    module = Module(code)
    return [
        f"{name} = {kind} {rest}"
        for function in module.functions
        for name, (kind, rest) in function.made.items()
        if kind == "tt.addptr" and module.narrow(function, used(rest)[1])
    ]


@triton.jit
def wrapping_kernel(x_ptr, y_ptr, H, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + row * H + at, tl.load(x_ptr + tl.cast(row, tl.int64) * H + at))


@triton.jit
def row_of(x_ptr, row, H, at):
    return tl.load(x_ptr + row * H + at)


@triton.jit
def calling_kernel(x_ptr, y_ptr, H, BLOCK: tl.constexpr, WRAPS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    found = row_of(x_ptr, 16 + at, H, at)
    if WRAPS:
        found += row_of(x_ptr, tl.program_id(0) + at, H, at)
    tl.store(y_ptr + at, found)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_function_is_judged_by_what_its_calls_give(wraps: bool) -> None:
    """A tile's own rows bound a product; one call with a number of the grid does not."""
    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "H": "i32"}
    case = CompileCase("calling", calling_kernel, types, {"BLOCK": 64, "WRAPS": wraps}, (), 4)
    assert bool(narrow_products(intermediate(case))) == wraps


def test_the_reader_finds_a_product_that_wraps() -> None:
    """One load with a 64-bit row, one store with a 32-bit one: exactly the store is found."""
    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "H": "i32"}
    case = CompileCase("wrapping", wrapping_kernel, types, {"BLOCK": 64}, (), 4)
    (found,) = narrow_products(intermediate(case))
    assert "addptr" in found


@pytest.mark.parametrize("name", OPERATORS)
def test_no_address_is_a_32_bit_product(name: str) -> None:
    seen = set()
    for suite in operator(name).load_suites():
        for case in suite.gate_cases():
            found = narrow_products(intermediate(case))
            assert found == [], case.name
            seen.add(case.kernel.fn.__name__)
    assert seen
