"""Expert stacks that stay packed in device memory: MXFP4 groups, fp8 blocks and 4-bit integers as the files have them.

A stack ``P`` is two frozen parameters, ``P_values`` and ``P_scales``, in the form that the packed operator reads
(``kernels/packed_experts/storage.py``; 4-bit integers, which it does not read: ``experts/int4.py``), out before in
whatever the family's own order. FSDP cuts and gathers them as the bytes that they are. Here each expert is decoded when
its rows are multiplied and forgotten afterwards; on CUDA the plan may put the operator in this place.
Legend: N rows grouped by expert, L local experts, i in features, o out features, r rank, s scaling.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwright.checkpoints.names import NameMap
from shardwright.kernels.packed_experts.reference import dequantise_reference
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.runtime.experts.grouped import rows_product
from shardwright.runtime.experts.int4 import FORMAT, SCALE_DIM, Int4, Int4Stack, empty_stack, int4_of
from shardwright.runtime.load.decode import GROUP
from shardwright.schemas.errors import LegalityError

Packing = Literal["mxfp4", "fp8"] | Int4
Stack = PackedStack | Int4Stack
STORED: dict[str, tuple[str, ...]] = {"mxfp4": ("mxfp4", "gpt-oss-mxfp4"), "fp8": ("fp8-block",), "int4": (FORMAT,)}
"""Format in memory → formats in files that it can be kept from."""
BLOCK = 128
VALUES, SCALES = "_values", "_scales"
"""Endings of a packed stack's two parameters."""
ROW_DIM: dict[str, int] = {"mxfp4": 2, "fp8": 1, "int4": SCALE_DIM}
"""The dim of the scales in which rows of the weight follow each other; that of the values is 1."""


def packed_experts_of(names: NameMap, stacks: dict[str, tuple[str, ...]], base_format: str) -> dict[str, Packing]:
    """Experts module → how its stacks stay packed, as the plan's ``base_format`` says.

    Args:
        names: which file tensors fill which parameters.
        stacks: experts module → its stacks' full names.
        base_format: ``compute`` keeps nothing packed.

    Raises:
        LegalityError: ``base-format`` where the files do not have that format.
    """
    if base_format not in STORED:
        return {}
    found: dict[str, Packing] = {}
    for module, parameters in stacks.items():
        formats = {names.logical(piece.tensor).format for name in parameters for piece in names.pieces(name)}
        if formats and formats <= set(STORED[base_format]):
            if base_format == "int4":
                found[module] = int4_of(names, parameters)
            else:
                found[module] = "mxfp4" if base_format == "mxfp4" else "fp8"
    if not found:
        raise _refused(f"no expert stack of this checkpoint is stored as {base_format}", "choose base_format compute")
    return found


def register_stack(module: nn.Module, stack: str, shape: tuple[int, int, int], packing: Packing) -> None:
    """Uninitialised parameters for a stack [L, o, i], on meta.

    Raises:
        LegalityError: ``base-format`` for sizes that are not whole blocks.
    """
    if isinstance(packing, Int4):
        _register(module, stack, *_halves(empty_stack(stack, shape, packing)))
        return
    L, N, K = shape
    whole = 2 * GROUP if packing == "mxfp4" else BLOCK
    if K % whole or (packing == "fp8" and N % whole):
        raise _refused(f"{stack} is {N} × {K}, which is not whole blocks of {whole}", "choose base_format compute")
    if packing == "mxfp4":
        values = torch.empty((L, N, K // 2), dtype=torch.uint8, device="meta")
        scales = torch.empty((L, K // whole, N), dtype=torch.int16, device="meta")
    else:
        values = torch.empty((L, N, K), dtype=torch.float8_e4m3fn, device="meta")
        scales = torch.empty((L, N // BLOCK, K // BLOCK), dtype=torch.float32, device="meta")
    _register(module, stack, values, scales)


def _halves(held: Stack) -> tuple[Tensor, Tensor]:
    return held.values, held.scales


def _register(module: nn.Module, stack: str, values: Tensor, scales: Tensor) -> None:
    for part, value in ((VALUES, values), (SCALES, scales)):
        module.register_parameter(f"{stack}{part}", nn.Parameter(value, requires_grad=False))


def stack_of(module: Any, stack: str) -> Stack:
    """A module's packed stack."""
    return held_as(getattr(module, f"{stack}{VALUES}"), getattr(module, f"{stack}{SCALES}"), module.packing)


def held_as(values: Tensor, scales: Tensor, packing: Packing) -> Stack:
    """Two parameters, or parts of them, as the stack that they are."""
    return Int4Stack(values, scales) if isinstance(packing, Int4) else PackedStack(values, scales, packing)


def packed_names(module: Any) -> tuple[str, ...]:
    """Stacks of a module that stay packed; none of a module whose stacks are numbers."""
    return () if module.packing is None else (module.layout.up, module.layout.down)


def cut_dims(module: Any, shards: int) -> dict[nn.Parameter, int]:
    """Packed parameter → the dim on which FSDP cuts it, values and scales of a stack at the same places.

    Experts while each rank gets one, else rows of whole blocks where they divide, else experts again, of which some
    ranks then hold none.
    """
    found: dict[nn.Parameter, int] = {}
    for stack in packed_names(module):
        held = stack_of(module, stack)
        L, N, _ = held.shape
        rows = N // BLOCK if held.kind == "fp8" else N
        within = shards > L and rows % shards == 0
        found[held.values] = 1 if within else 0  # type: ignore[index]
        found[held.scales] = ROW_DIM[held.kind] if within else 0  # type: ignore[index]
    return found


class PackedLoraLinear(torch.autograd.Function):
    """``y = x Wᵀ + b + s (x Aᵀ) Bᵀ`` by expert, with W decoded one expert at a time in both passes.

    Saved for backward: x, the [N, r] inner product, and the packed stack, which is shared.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stack: Stack,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        sizes: list[int],
        scaling: float,
    ) -> Tensor:
        y = _by_expert(x, stack, sizes, transposed=True)
        run = rows_product(x, lora_a)
        inner = None
        if lora_a is not None and lora_b is not None:
            inner = run.rows(x, lora_a.mT, sizes)
            run.add_rows(y, inner, lora_b.mT, sizes, scaling)
        if bias is not None:
            y += bias.repeat_interleave(torch.tensor(sizes, device=x.device), dim=0, output_size=x.shape[0])
        ctx.save_for_backward(x if lora_a is not None else None, lora_a, lora_b, inner)
        ctx.stack, ctx.sizes, ctx.scaling, ctx.run = stack, sizes, scaling, run
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_a, lora_b, inner = ctx.saved_tensors
        dy, sizes, run = gradients[0].contiguous(), ctx.sizes, ctx.run
        da = db = dinner = None
        if lora_a is not None:
            dinner = run.rows(dy, lora_b, sizes).mul_(ctx.scaling)
            da, db = run.outer(dinner, x, sizes), run.outer(dy, inner, sizes).mul_(ctx.scaling)
        # Rows that a recomputation made are freed before dx is there.
        del x, inner
        dx = _by_expert(dy, ctx.stack, sizes, transposed=False) if ctx.needs_input_grad[0] else None
        if dx is not None and dinner is not None:
            run.add_rows(dx, dinner, lora_a, sizes, 1.0)
        return dx, None, None, da, db, None, None


def _decoded(stack: Stack, expert: int) -> Tensor:
    """One expert's weight [o, i]."""
    if isinstance(stack, Int4Stack):
        return stack.expert(expert)
    one = slice(expert, expert + 1)
    return dequantise_reference(PackedStack(stack.values[one], stack.scales[one], stack.kind))[0]


def _by_expert(x: Tensor, stack: Stack, sizes: list[int], *, transposed: bool) -> Tensor:
    """[N, i] × W[e]ᵀ → [N, o], or [N, o] × W[e] → [N, i]; one decoded expert is alive at a time."""
    _, out, into = stack.shape
    y = x.new_empty((x.shape[0], out if transposed else into))
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            weight = _decoded(stack, expert).to(x.dtype)
            torch.mm(x[start : start + size], weight.mT if transposed else weight, out=y[start : start + size])
            start += size
    return y


def _refused(what: str, action: str) -> LegalityError:
    return LegalityError("base-format", what, where="decision.strategy.base_format", next_action=action)
