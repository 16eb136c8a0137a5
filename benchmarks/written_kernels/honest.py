"""Attention scores with a mask and a sink column: y0 = cat(x0 / 4 + x1, x2), bf16; correct in both passes."""

import torch
import triton
import triton.language as tl


@triton.jit
def scores_kernel(x0, x1, x2, y0, heads, columns, rows, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    batch = row // (heads * rows)
    masked = (batch * rows + row % rows) * columns
    inside = column < columns
    score = tl.load(x0 + row * columns + column, inside, 0.0).to(tl.float32)
    scaled = (score * 0.25).to(tl.bfloat16).to(tl.float32)
    mask = tl.load(x1 + masked + column, inside, 0.0).to(tl.float32)
    out = y0 + row * (columns + 1)
    tl.store(out + column, (scaled + mask).to(tl.bfloat16), inside)
    tl.store(out + columns, tl.load(x2 + row))


@triton.jit
def gradients_kernel(dy0, dx0, dx1, dx2, heads, columns, rows, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < columns
    batch = row // rows
    total = tl.zeros([block], tl.float32)
    for head in range(heads):
        at = (batch * heads + head) * rows + row % rows
        given = tl.load(dy0 + at * (columns + 1) + column, inside, 0.0).to(tl.float32)
        total += given
        tl.store(dx0 + at * columns + column, (given * 0.25).to(tl.bfloat16), inside)
        tl.store(dx2 + at, tl.load(dy0 + at * (columns + 1) + columns))
    tl.store(dx1 + row * columns + column, total.to(tl.bfloat16), inside)


def forward(x0, x1, x2):
    batch, heads, rows, columns = x0.shape
    y0 = torch.empty((batch, heads, rows, columns + 1), dtype=x0.dtype, device=x0.device)
    block = triton.next_power_of_2(columns)
    scores_kernel[(batch * heads * rows,)](x0, x1, x2, y0, heads, columns, rows, block)
    return (y0,)


def backward(x0, x1, x2, dy0):
    batch, heads, rows, columns = x0.shape
    dx0, dx1, dx2 = torch.empty_like(x0), torch.empty_like(x1), torch.empty_like(x2)
    block = triton.next_power_of_2(columns)
    gradients_kernel[(batch * rows,)](dy0, dx0, dx1, dx2, heads, columns, rows, block)
    return (dx0, dx1, dx2)
