"""Addresses are 64-bit: the reported sizes wrap a 32-bit product, and no kernel makes an address from one.

Reads the intermediate code of every shipped launch; needs no device and no memory.
"""

from __future__ import annotations

import re

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


def narrow_products(code: str) -> list[str]:
    """Address computations whose offset contains a 32-bit product of two values known only at run time.

    A tile's own range counts as known: it ends at a compile-time bound.
    """
    found = []
    for function in code.split("tt.func")[1:]:
        made = {m[1]: (m[2], m[3]) for line in function.splitlines() if (m := LINE.match(line))}
        constant = {name for name, (kind, _) in made.items() if kind in ("arith.constant", "tt.make_range")}

        def fixed(name: str, made: dict[str, tuple[str, str]] = made, constant: set[str] = constant) -> bool:
            kind, rest = made.get(name, ("", ""))
            inner = re.findall(r"%\w+", rest.split(" : ")[0])
            return name in constant or (kind in PASSING and bool(inner) and all(fixed(n) for n in inner))

        def narrow(name: str, made: dict[str, tuple[str, str]] = made) -> bool:
            kind, rest = made.get(name, ("", ""))
            inner = re.findall(r"%\w+", rest.split(" : ")[0])
            if kind == "arith.muli":
                return bool(re.search(r"\bi32\b|xi32>", rest)) and not any(fixed(n) for n in inner)
            return kind in PASSING and any(narrow(n) for n in inner)

        for name, (kind, rest) in made.items():
            if kind == "tt.addptr":
                offset = re.findall(r"%\w+", rest.split(" : ")[0])[1]
                if narrow(offset):
                    found.append(f"{name} = {kind} {rest}")
    return found


@triton.jit
def wrapping_kernel(x_ptr, y_ptr, H, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + row * H + at, tl.load(x_ptr + tl.cast(row, tl.int64) * H + at))


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
