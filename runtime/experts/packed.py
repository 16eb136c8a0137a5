"""Expert stacks that stay packed in device memory: MXFP4 groups and fp8 blocks as the files have them.

A stack ``P`` is two buffers, ``P_values`` and ``P_scales``, in the form that the packed operator reads
(``kernels/packed_experts/storage.py``), out before in whatever the family's own order. Here each expert is decoded when
its rows are multiplied and forgotten afterwards; on CUDA the plan may put the operator in this place.
Legend: N rows grouped by expert, L local experts, i in features, o out features, r rank, s scaling.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwright.checkpoints.conversion import Box, Piece, intersect
from shardwright.checkpoints.layouts import ExpertLayout
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.reader import ShardReader
from shardwright.kernels.packed_experts.reference import dequantise_reference
from shardwright.kernels.packed_experts.storage import PackedStack, fp8_stack, mxfp4_stack
from shardwright.runtime.experts.grouped import rows_product
from shardwright.runtime.experts.placement import runs_of
from shardwright.runtime.load.decode import GROUP, fp8_codes, mxfp4_codes
from shardwright.schemas.errors import CheckFailed, CheckpointError, LegalityError

Packing = Literal["mxfp4", "fp8"]
STORED: dict[str, tuple[str, ...]] = {"mxfp4": ("mxfp4", "gpt-oss-mxfp4"), "fp8": ("fp8-block",)}
"""Format in memory → formats in files that it can be kept from."""
BLOCK = 128


def packed_experts_of(
    names: NameMap, stacks: dict[str, tuple[str, ...]], base_format: str, shard: int
) -> dict[str, Packing]:
    """Experts module → how its stacks stay packed, as the plan's ``base_format`` says.

    Args:
        names: which file tensors fill which parameters.
        stacks: experts module → its stacks' full names.
        base_format: ``compute`` keeps nothing packed.
        shard: FSDP degree of expert stacks.

    Raises:
        LegalityError: ``base-format`` where the files do not have that format, or FSDP would cut the stacks.
    """
    if base_format not in STORED:
        return {}
    if shard > 1:
        raise _refused(f"expert stacks sharded {shard} ways would be gathered as numbers", "choose shard 1 and more ep")
    found: dict[str, Packing] = {}
    for module, parameters in stacks.items():
        formats = {names.logical(piece.tensor).format for name in parameters for piece in names.pieces(name)}
        if formats and formats <= set(STORED[base_format]):
            found[module] = "mxfp4" if base_format == "mxfp4" else "fp8"
    if not found:
        raise _refused(f"no expert stack of this checkpoint is stored as {base_format}", "choose base_format compute")
    return found


def register_stack(module: nn.Module, stack: str, shape: tuple[int, int, int], packing: Packing) -> None:
    """Uninitialised buffers for a stack [L, o, i], on meta.

    Raises:
        LegalityError: ``base-format`` for sizes that are not whole blocks.
    """
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
    module.register_buffer(f"{stack}_values", values)
    module.register_buffer(f"{stack}_scales", scales)


def stack_of(module: Any, stack: str, expert: int | None = None) -> PackedStack:
    """A module's packed stack, or one expert of it."""
    values, scales = getattr(module, f"{stack}_values"), getattr(module, f"{stack}_scales")
    if expert is not None:
        values, scales = values[expert : expert + 1], scales[expert : expert + 1]
    return PackedStack(values, scales, module.packing)


def load_stack(module: Any, stack: str, name: str, reader: ShardReader, names: NameMap, layout: ExpertLayout) -> None:
    """Fill a packed stack with this rank's experts, bit for bit.

    Raises:
        CheckpointError: ``packed-layout`` where a file tensor does not hold whole blocks in rows of out × in.
        CheckFailed: ``nan-weights``.
    """
    L, N, _ = (int(size) for size in getattr(module, f"{stack}_values").shape)
    numbers = range(module.first, module.first + L)
    held = tuple(numbers if module.slots is None else (module.slots[place] for place in numbers))
    K = getattr(module, f"{stack}_scales").shape[1 if module.packing == "mxfp4" else 2]
    K *= 2 * GROUP if module.packing == "mxfp4" else BLOCK
    in_out = layout.order == "in_out"
    matrix = ((0, K), (0, N)) if in_out else ((0, N), (0, K))
    mxfp4 = module.packing == "mxfp4"
    values = torch.empty((L, N, K // 2) if mxfp4 else (L, N, K), dtype=torch.uint8)
    scales = torch.empty(
        (L, N, K // GROUP) if mxfp4 else (L, N // BLOCK, K // BLOCK), dtype=torch.uint8 if mxfp4 else torch.float32
    )
    row, column = (2, 1) if in_out else (1, 2)
    boxes: list[tuple[int, Box]] = [(place, ((first, stop), *matrix)) for place, first, stop in runs_of(held)]
    for (place, box), whole in itertools.product(boxes, names.pieces(name)):
        piece = intersect(whole, box)
        if piece is None:
            continue
        logical = names.logical(piece.tensor)
        last = len(logical.shape) - 1
        step = GROUP if mxfp4 else BLOCK
        edges = [*piece.source[last], *(() if mxfp4 else (*piece.source[last - 1], *piece.target[row]))]
        odd = [edge for edge in edges if edge % step]
        if piece.axes[row] != last - 1 or piece.axes[column] != last or odd or piece.target[column] != (0, K):
            raise _layout(name, piece)
        if not mxfp4 and logical.block[-2:] != (BLOCK, BLOCK):
            raise _layout(name, piece)
        part = (mxfp4_codes if mxfp4 else fp8_codes)(reader, logical, piece.source)
        (first, stop), rows = piece.target[0], piece.target[row]
        experts, extent = slice(place + first, place + stop), stop - first
        bytes_, scale = (one.reshape(extent, *one.shape[-2:]) for one in part)
        values[experts, slice(*rows)] = bytes_.view(torch.uint8)
        scales[experts, slice(*(rows if mxfp4 else (rows[0] // BLOCK, rows[1] // BLOCK)))] = scale
    if bool((scales == 255).any() if mxfp4 else (~torch.isfinite(scales)).any()):
        raise CheckFailed(
            "nan-weights",
            f"a scale of {name} is not a finite number",
            where=", ".join(names.hub_names(name)[:4]),
            next_action="fetch this shard again; if its hash is right, the checkpoint itself is damaged",
        )
    packed = mxfp4_stack(values, scales) if mxfp4 else fp8_stack(values.view(torch.float8_e4m3fn), scales)
    getattr(module, f"{stack}_values").copy_(packed.values)
    getattr(module, f"{stack}_scales").copy_(packed.scales)


class PackedLoraLinear(torch.autograd.Function):
    """``y = x Wᵀ + b + s (x Aᵀ) Bᵀ`` by expert, with W decoded one expert at a time in both passes.

    Saved for backward: x, the [N, r] inner product, and the packed stack, which is shared.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stack: PackedStack,
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
            y += bias.repeat_interleave(torch.tensor(sizes, device=x.device), dim=0)
        ctx.save_for_backward(x if lora_a is not None else None, lora_a, lora_b, inner)
        ctx.stack, ctx.sizes, ctx.scaling, ctx.run = stack, sizes, scaling, run
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_a, lora_b, inner = ctx.saved_tensors
        dy, sizes, run = gradients[0].contiguous(), ctx.sizes, ctx.run
        dx = _by_expert(dy, ctx.stack, sizes, transposed=False) if ctx.needs_input_grad[0] else None
        da = db = None
        if lora_a is not None:
            dinner = run.rows(dy, lora_b, sizes).mul_(ctx.scaling)
            da, db = run.outer(dinner, x, sizes), run.outer(dy, inner, sizes).mul_(ctx.scaling)
            if dx is not None:
                run.add_rows(dx, dinner, lora_a, sizes, 1.0)
        return dx, None, None, da, db, None, None


def _by_expert(x: Tensor, stack: PackedStack, sizes: list[int], *, transposed: bool) -> Tensor:
    """[N, i] × W[e]ᵀ → [N, o], or [N, o] × W[e] → [N, i]; one decoded expert is alive at a time."""
    _, out, into = stack.shape
    y = x.new_empty((x.shape[0], out if transposed else into))
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            one = PackedStack(stack.values[expert : expert + 1], stack.scales[expert : expert + 1], stack.kind)
            weight = dequantise_reference(one)[0].to(x.dtype)
            torch.mm(x[start : start + size], weight.mT if transposed else weight, out=y[start : start + size])
            start += size
    return y


def _refused(what: str, action: str) -> LegalityError:
    return LegalityError("base-format", what, where="decision.strategy.base_format", next_action=action)


def _layout(name: str, piece: Piece) -> CheckpointError:
    return CheckpointError(
        "packed-layout",
        f"{piece.tensor} gives {piece.source} for {piece.target}: not whole blocks in rows of out × in",
        where=name,
        next_action="plan with base_format compute: the weights are then decoded at load",
    )
