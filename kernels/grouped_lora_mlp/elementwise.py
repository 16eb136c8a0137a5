# mypy: disable-error-code="no-untyped-def"
"""What stands between the products: the activation of saved rows, its gradient, and rows of no expert.

``activation_bwd_kernel`` also gives each row's share of its routing weight's gradient (dout · y = (dout W₂) · h, plus
dout · bias where the down stack has one), so y is not kept. Both stream rows at the memory's speed; fused into a
product's epilogue they spill there (one H200).

Legend: R rows, E experts, I expert width, F = 2I with a gate (else I).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.grouped_lora_mlp.activation import activate, activate_bwd


@triton.jit
def activation_kernel(
    gu_ptr, h_ptr, first_ptr, last_ptr, tiles_ptr, I, F, STEP: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, P2: tl.constexpr, GATED: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``h [R, I] = act(gu [R, F])``. Gate columns are n·STEP; up columns lie I later, or 1 where they interleave."""
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr):
        rows = tl.load(first_ptr + tile) + tl.program_id(1) * BR + tl.arange(0, BR)
        live, row = rows < tl.load(last_ptr + tile), rows.to(tl.int64)[:, None]
        up = 1 if STEP == 2 else I
        for start in tl.range(0, I, BN):
            n = start + tl.arange(0, BN)
            inside = live[:, None] & (n < I)[None, :]
            at = gu_ptr + row * F + (n * STEP)[None, :]
            g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            u = g
            if GATED:
                u = tl.load(at + up, mask=inside, other=0.0).to(tl.float32)
            h = activate(g, u, KIND, P0, P1, P2).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + row * I + n[None, :], h, mask=inside)


@triton.jit(do_not_specialize=["SLOTS"])
def activation_bwd_kernel(
    dh_ptr, gu_ptr, dgu_ptr, part_ptr, weights_ptr, dout_ptr, bias_ptr, entry_ptr, expert_ptr, first_ptr, last_ptr,
    tiles_ptr, I, F, H, SLOTS, STEP: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    P2: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``dgu [R, F]`` from ``dh [R, I]`` and, where asked, ``part [R]``."""
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr):
        rows = tl.load(first_ptr + tile) + tl.program_id(1) * BR + tl.arange(0, BR)
        live, row = rows < tl.load(last_ptr + tile), rows.to(tl.int64)[:, None]
        weight = tl.full([BR], 1.0, tl.float32)
        if WEIGHTED:
            entry = tl.load(entry_ptr + rows, mask=live, other=0)
            weight = tl.load(weights_ptr + entry, mask=live, other=0.0).to(tl.float32)
        part = tl.zeros([BR], tl.float32)
        up = 1 if STEP == 2 else I
        for start in tl.range(0, I, BN):
            n = start + tl.arange(0, BN)
            inside = live[:, None] & (n < I)[None, :]
            at = row * F + (n * STEP)[None, :]
            dh = tl.load(dh_ptr + row * I + n[None, :], mask=inside, other=0.0).to(tl.float32)
            g = tl.load(gu_ptr + at, mask=inside, other=0.0).to(tl.float32)
            u = g
            if GATED:
                u = tl.load(gu_ptr + at + up, mask=inside, other=0.0).to(tl.float32)
            if PARTS:
                part += tl.sum(dh * activate(g, u, KIND, P0, P1, P2), axis=1)
            dg, du = activate_bwd(dh * weight[:, None], g, u, KIND, P0, P1, P2)
            tl.store(dgu_ptr + at, dg.to(dgu_ptr.dtype.element_ty), mask=inside)
            if GATED:
                tl.store(dgu_ptr + at + up, du.to(dgu_ptr.dtype.element_ty), mask=inside)
        if PARTS:
            if BIAS:
                token = (tl.load(entry_ptr + rows, mask=live, other=0) // SLOTS).to(tl.int64)[:, None]
                bias_at = bias_ptr + tl.load(expert_ptr + tile).to(tl.int64) * H
                for start in tl.range(0, H, BN):
                    n = start + tl.arange(0, BN)
                    bias = tl.load(bias_at + n, mask=n < H, other=0.0).to(tl.float32)
                    inside = live[:, None] & (n < H)[None, :]
                    dout = tl.load(dout_ptr + token * H + n[None, :], mask=inside, other=0.0).to(tl.float32)
                    part += tl.sum(dout * bias[None, :], axis=1)
            tl.store(part_ptr + rows, part, mask=live)


@triton.jit(do_not_specialize=["R", "E"])
def zero_tail_kernel(words_ptr, offsets_ptr, R, E, WORDS, BLOCK: tl.constexpr):
    """Zero the rows after the last expert's of a tensor seen as 32-bit words [R, WORDS]; touches no other row."""
    for row in tl.range(tl.load(offsets_ptr + E) + tl.program_id(0), R, tl.num_programs(0)):
        for first in tl.range(0, WORDS, BLOCK):
            at = first + tl.arange(0, BLOCK)
            here = words_ptr + tl.cast(row, tl.int64) * WORDS + at
            tl.store(here, tl.zeros([BLOCK], tl.int32), mask=at < WORDS)
