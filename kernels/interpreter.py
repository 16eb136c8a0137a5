"""Real bf16 in Triton's CPU interpreter.

Triton 3.6's interpreter keeps bf16 values as raw 16-bit integers: sums, products, comparisons and dots
compute on the bit patterns and give wrong numbers without an error, and a cast from fp32 truncates.
``install`` replaces that representation: a bf16 value is held as an fp32 number that lies on the bf16
grid, and every result of bf16 type is rounded to the nearest grid value, ties to even. Because fp32
carries more than twice the digits of bf16, one operation in fp32 followed by that rounding gives the
bits that a device's own bf16 operation gives.

Values become raw bits only where they meet memory (load, store, atomics) and in a bitcast.
``TRITON_INTERPRET=1`` must be set before triton is imported, and ``install`` called before a kernel runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.schemas.errors import KernelError

SUPPORTED = "3.6"
"""The interpreter's internals differ between minor versions; another one is refused."""

Array = npt.NDArray[Any]


def round_to_bf16(value: Array) -> Array:
    """The nearest bf16 value of each fp32 value, ties to even, still as fp32. NaN stays NaN."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(value), np.float32(np.nan), rounded).reshape(np.shape(value))


def to_bits(value: Array) -> Array:
    """Raw bf16 bits (uint16) of fp32 values that lie on the bf16 grid, or are rounded to it."""
    upper = np.ascontiguousarray(round_to_bf16(value)).view(np.uint32) >> np.uint32(16)
    return upper.astype(np.uint16).reshape(np.shape(value))


def from_bits(bits: Array) -> Array:
    """fp32 values of raw bf16 bits (uint16)."""
    wide = np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).reshape(np.shape(bits))


def install() -> None:
    """Give the interpreter real bf16. Calling it again changes nothing.

    Raises:
        KernelError: ``interpreter-off`` without ``TRITON_INTERPRET=1``; ``interpreter-version`` for a
            triton whose interpreter this was not written for.
    """
    import triton
    import triton.runtime.interpreter as machine

    if not triton.knobs.runtime.interpret:
        raise KernelError(
            "interpreter-off",
            "kernels were defined for a device",
            where="kernels.interpreter",
            next_action="set TRITON_INTERPRET=1 before triton is imported",
        )
    if not triton.__version__.startswith(SUPPORTED + "."):
        raise KernelError(
            "interpreter-version",
            f"triton is {triton.__version__}",
            where="kernels.interpreter",
            next_action=f"install triton {SUPPORTED}",
        )
    if getattr(machine, "_true_bf16", False):
        return
    _teach_representation(machine)
    _teach_memory(machine)
    _teach_arithmetic(machine)
    machine._true_bf16 = True


def _is_bf16(kind: Any) -> bool:
    import triton.language as tl

    return not isinstance(kind, tl.pointer_type) and bool(getattr(kind, "scalar", kind) == tl.bfloat16)


def _teach_representation(machine: Any) -> None:
    """A bf16 handle holds fp32 data on the bf16 grid, whoever makes it."""
    numpy_type, fits, finish = machine._get_np_dtype, machine._validate_np_data_size, machine.TensorHandle.__post_init__

    def numpy_type_of(kind: Any) -> Any:
        return np.dtype(np.float32) if _is_bf16(kind) else numpy_type(kind)

    def data_fits(data: Array, kind: Any) -> bool:
        return data.itemsize <= 4 if _is_bf16(kind) else bool(fits(data, kind))

    def finish_handle(handle: Any) -> None:
        finish(handle)
        # A comparison of two bf16 values carries their type and boolean data: not a bf16 value.
        if _is_bf16(handle.dtype) and np.issubdtype(handle.data.dtype, np.floating):
            handle.data = round_to_bf16(handle.data)

    machine._get_np_dtype = numpy_type_of
    machine._validate_np_data_size = data_fits
    machine.TensorHandle.__post_init__ = finish_handle


def _teach_memory(machine: Any) -> None:
    """Loads, stores and atomics translate between memory's 16 bits and the handle's fp32."""
    import triton.language as tl

    builder, handle, memory = machine.InterpreterBuilder, machine.TensorHandle, machine._interpreter
    load, store, exchange = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        if not _is_bf16(pointers.get_element_ty()):
            return load(self, pointers, mask, other, *rest, **named)
        shape = pointers.data.shape
        instead = np.zeros(shape, np.uint16) if other is None else to_bits(np.broadcast_to(other.data, shape))
        bits = memory.load(pointers.data, _mask(mask), np.ascontiguousarray(instead), np.dtype(np.uint16))
        return handle(from_bits(bits), tl.bfloat16)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if not _is_bf16(pointers.get_element_ty()):
            return store(self, pointers, value, mask, *rest)
        return memory.store(pointers.data, to_bits(value.data), _mask(mask))

    def atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        """bf16 atomics one lane after another, in lane order: add, max and min."""
        if not _is_bf16(pointer.get_element_ty()):
            return exchange(self, operation, pointer, value, mask, *rest)
        kinds = machine._ir.ATOMIC_OP
        combine: dict[Any, Any] = {
            kinds.FADD: np.add,
            kinds.MAX: np.maximum,
            kinds.MIN: np.minimum,
            kinds.XCHG: lambda _, new: new,
        }
        if operation not in combine:
            raise ValueError(f"atomic {operation} has no bf16 form")
        before = np.zeros(value.data.shape, np.float32)
        live = np.broadcast_to(_mask(mask), value.data.shape)
        for lane in np.argwhere(live):
            at = tuple(lane)
            where, on = np.array([pointer.data[at]], dtype=np.uint64), np.ones(1, dtype=bool)
            old = from_bits(memory.load(where, on, np.zeros(1, np.uint16), np.dtype(np.uint16)))
            before[at] = old[0]
            memory.store(where, to_bits(combine[operation](old, value.data[at])), on)
        return handle(before, tl.bfloat16)

    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    builder.create_atomic_rmw = atomic_rmw


def _mask(mask: Any) -> Array:
    return np.asarray(mask.data if hasattr(mask, "dtype") and hasattr(mask, "attr") else mask)


def _teach_arithmetic(machine: Any) -> None:
    """Casts, constants, bit tricks and dots. Elementwise operations need nothing: the handle rounds."""
    import triton.language as tl

    builder, handle = machine.InterpreterBuilder, machine.TensorHandle
    fp_to_fp, bitcast, absolute, dot = (
        builder.create_fp_to_fp,
        builder.create_bitcast,
        builder.create_fabs,
        builder.create_dot,
    )
    cast = builder.cast_impl

    def any_cast(self: Any, source: Any, kind: Any) -> Any:
        if _is_bf16(source.dtype) or _is_bf16(kind):
            if _is_bf16(kind) and source.data.dtype == np.float64:
                return handle(_narrow_double(source.data), kind.scalar)
            return handle(source.data.astype(machine._get_np_dtype(kind)), kind.scalar)
        return cast(self, source, kind)

    def float_cast(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if not (_is_bf16(source.dtype) or _is_bf16(kind)):
            return fp_to_fp(self, source, kind, rounding)
        if _is_bf16(kind) and rounding == machine._ir.ROUNDING_MODE.RTZ:
            bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
            return handle(bits.view(np.float32).reshape(source.data.shape), kind.scalar)
        eight_bit = [t for t in (source.dtype.scalar, kind.scalar) if t.primitive_bitwidth == 8]
        if eight_bit:  # through fp16, which holds every fp8 value and what an fp8 result needs
            middle = handle(source.data.astype(np.float16), tl.float16) if _is_bf16(source.dtype) else None
            if middle is not None:
                return fp_to_fp(self, middle, kind, rounding)
            middle = fp_to_fp(self, source, tl.float16, rounding)
            return handle(middle.data.astype(np.float32), kind.scalar)
        return any_cast(self, source, kind)

    def any_bitcast(self: Any, source: Any, kind: Any) -> Any:
        if _is_bf16(source.dtype) and not _is_bf16(kind):
            return handle(to_bits(source.data).view(machine._get_np_dtype(kind)), kind.scalar)
        if _is_bf16(kind) and not _is_bf16(source.dtype):
            return handle(from_bits(np.ascontiguousarray(source.data).view(np.uint16)), kind.scalar)
        return bitcast(self, source, kind)

    def any_absolute(self: Any, value: Any) -> Any:
        return handle(np.abs(value.data), value.dtype.scalar) if _is_bf16(value.dtype) else absolute(self, value)

    def any_dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        """16-bit operands multiply exactly in fp32 and add in fp32, as the matrix units do."""
        if not (_is_bf16(a.dtype) or _is_bf16(b.dtype)):
            return dot(self, a, b, accumulator, *rest)
        product = np.matmul(a.data.astype(np.float32), b.data.astype(np.float32))
        return handle(product.astype(accumulator.data.dtype) + accumulator.data, accumulator.dtype.scalar)

    builder.cast_impl = any_cast
    builder.create_fp_to_fp = float_cast
    builder.create_bitcast = any_bitcast
    builder.create_int_to_ptr = any_bitcast
    builder.create_ptr_to_int = any_bitcast
    builder.create_fabs = any_absolute
    builder.create_dot = any_dot
    builder.get_bf16 = lambda self, value: handle(np.array([value], dtype=np.float32), tl.bfloat16)


def _narrow_double(value: Array) -> Array:
    """fp64 → fp32 with ties kept apart, so that the later rounding to bf16 is the only rounding.

    A plain cast could land exactly on a bf16 tie and lose which side it came from; rounding to odd
    keeps that in the last bit.
    """
    with np.errstate(over="ignore"):
        near = value.astype(np.float32)
    inexact = np.isfinite(near) & (near.astype(np.float64) != value)
    even = (near.view(np.uint32) & np.uint32(1)) == 0
    toward = np.where(near.astype(np.float64) < value, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)
    return np.where(inexact & even, np.nextafter(near, toward), near).astype(np.float32)
