"""Forward and backward of one call: which kernels, on which tiles, run by run.

Legend: as in ``problem``; C queries of a run, E positions of a stored row of P, W columns of a key's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.dsa.attention import configs, hopper_launch
from shardwright.kernels.dsa.attention.backward_triton import prepare_kernel, queries_kernel, shares_kernel
from shardwright.kernels.dsa.attention.configs import power_of_two
from shardwright.kernels.dsa.attention.key_gradients import by_block, by_key
from shardwright.kernels.dsa.attention.problem import Problem, strides_of
from shardwright.kernels.dsa.attention.reference import LARGEST_SINK
from shardwright.kernels.dsa.attention.triton import forward_kernel


@dataclass(frozen=True)
class Forward:
    """What a forward leaves: the output, lse, and for a backward the ungated output in two parts."""

    y: Tensor
    lse: Tensor
    o: Tensor
    """The ungated output; ``y`` itself where nothing gates it."""
    low: Tensor
    """What rounding cut off ``o``; empty where no backward follows."""


@dataclass(frozen=True)
class Gradients:
    qn: Tensor
    qr: Tensor | None
    kn: Tensor
    kr: Tensor | None
    v: Tensor | None
    gate: Tensor | None
    sinks: Tensor | None


def forward(p: Problem, save: bool) -> Forward:
    """Run the forward; ``save`` keeps what a backward needs."""
    y = p.qn.new_empty((p.T, p.H, p.DV))
    lse = p.qn.new_empty((p.T, p.H), dtype=torch.float32)
    o = torch.empty_like(y) if save and p.gate is not None else y
    low = torch.empty_like(y) if save else y.new_empty(0)
    found = Forward(y, lse, o, low)
    if p.T:
        with device.current(y):
            if hopper_launch.serves(p):
                hopper_launch.forward(p, y, lse, o, low, save)
            else:
                _portable_forward(p, found, save)
    return found


def _sizes(p: Problem, tile: configs.Tile) -> dict[str, Any]:
    """Compile-time constants that forward and backward share."""
    return {
        "HEADS": p.H // p.G,
        "DN": p.DN,
        "DR": p.DR,
        "DV": p.DV,
        "PN": power_of_two(p.DN),
        "PR": power_of_two(p.DR),
        "PV": power_of_two(p.DV),
        "BH": tile.heads,
        "BN": tile.keys,
        "POSITIONS": power_of_two(p.positions),
        "BLOCK": p.block,
        "BOUNDED": p.bounds is not None,
        "SHARED": p.v is None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _portable_forward(p: Problem, found: Forward, save: bool) -> None:
    heads = p.H // p.G
    tile = configs.forward(heads, p.DN + p.DR, p.qn.element_size())
    forward_kernel[(p.T * p.G * -(-heads // tile.heads),)](
        p.qn,
        p.qn if p.qr is None else p.qr,
        p.kn,
        p.kn if p.kr is None else p.kr,
        p.value,
        p.indices,
        p.indices if p.bounds is None else p.bounds,
        p.qn if p.gate is None else p.gate,
        found.lse if p.sinks is None else p.sinks,
        found.y,
        found.o,
        found.low if save else found.y,
        found.lse,
        p.scale,
        p.positions,
        p.K,
        p.S,
        p.H,
        p.G,
        *strides_of(p.qn, p.qr, p.kn, p.kr, p.value),
        GATE=p.gate_kind,
        SINKS=p.sinks is not None,
        SAVE=save,
        **_sizes(p, tile),
    )


def backward(p: Problem, dy: Tensor, lse: Tensor, o: Tensor, low: Tensor, deterministic: bool) -> Gradients:
    """All gradients for the gradient ``dy [T, H, V]`` of the output."""
    dy = dy.contiguous()
    dgate = None if p.gate is None else torch.empty_like(p.gate)
    delta = torch.empty_like(lse)
    dqn = p.qn.new_empty((p.T, p.H, p.DN))
    dqr = None if p.qr is None else p.qr.new_empty((p.T, p.H, p.DR))
    dkv = p.qn.new_zeros((p.S, p.G, p.W), dtype=torch.float32)
    way = configs.way(p.block, deterministic)
    if p.T:
        with device.current(dy):
            hopper = way == "atomic" and hopper_launch.serves(p)
            do = dy if p.gate is None and not hopper else torch.empty_like(dy)
            prepare(p, dy, o, low, do, delta, dgate, permute=hopper)
            if hopper:
                hopper_launch.backward(p, do, lse, delta, dqn, dqr, dkv)
            else:
                _portable_backward(p, do, lse, delta, dqn, dqr, dkv, way)
    widths = [p.DN, p.DR, p.W - p.DN - p.DR]
    parts = [part.to(p.qn.dtype).contiguous() for part in dkv.split(widths, dim=2)]
    return Gradients(
        qn=dqn,
        qr=dqr,
        kn=parts[0],
        kr=None if p.kr is None else parts[1],
        v=None if p.v is None else parts[2],
        gate=dgate,
        sinks=None if p.sinks is None else _sinks_gradient(p.sinks, lse, delta),
    )


def prepare(
    p: Problem, dy: Tensor, o: Tensor, low: Tensor, do: Tensor, delta: Tensor, dgate: Tensor | None, *, permute: bool
) -> None:
    """Fill ``do``, ``delta`` and ``dgate``; ``do`` is left alone where it is ``dy``."""
    rows = p.T * p.H
    prepare_kernel[(-(-rows // configs.PREPARE_ROWS),)](
        dy,
        o,
        low,
        dy if p.gate is None else p.gate,
        do,
        delta,
        dy if dgate is None else dgate,
        rows,
        DV=p.DV,
        PV=power_of_two(p.DV),
        ROWS=configs.PREPARE_ROWS,
        GATE=p.gate_kind,
        STORE=do is not dy,
        PERMUTE=permute,
        num_warps=configs.PREPARE_WARPS,
    )


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-Σ over queries of the sink's share times delta: a sink has no value, so its dP is 0."""
    share = torch.exp(sinks.float().clamp(max=LARGEST_SINK) - lse).clamp(max=1.0)
    share = torch.where(lse == float("-inf"), 0.0, share)
    return -(share * delta).sum(0).to(sinks.dtype)


def _portable_backward(
    p: Problem, do: Tensor, lse: Tensor, delta: Tensor, dqn: Tensor, dqr: Tensor | None, dkv: Tensor, way: configs.Way
) -> None:
    heads, size = p.H // p.G, p.qn.element_size()
    tile = configs.shares(heads, p.DN + p.DR, size)
    E = -(-max(1, p.positions) // tile.keys) * tile.keys
    C = configs.run_tokens(p.T, p.H, p.G, E, p.W, size, way == "sorted")
    shares, ds = (p.qn.new_empty((C, p.H, E)) for _ in range(2))
    for start in range(0, p.T, C):
        count = min(C, p.T - start)
        shares_kernel[(count * p.G * -(-heads // tile.heads),)](
            p.qn,
            p.qn if p.qr is None else p.qr,
            p.kn,
            p.kn if p.kr is None else p.kr,
            p.value,
            p.indices,
            p.indices if p.bounds is None else p.bounds,
            do,
            lse,
            delta,
            shares,
            ds,
            p.scale,
            start,
            p.positions,
            p.K,
            p.S,
            p.H,
            p.G,
            E,
            *strides_of(p.qn, p.qr, p.kn, p.kr, p.value),
            **_sizes(p, tile),
        )
        _queries(p, ds, dqn, dqr, start, count, E)
        if way == "blocks":
            by_block(p, do, shares, ds, dkv, start, count, E)
        else:
            by_key(p, do, shares, ds, dkv, start, count, E, way == "sorted")


def _queries(p: Problem, ds: Tensor, dqn: Tensor, dqr: Tensor | None, start: int, count: int, E: int) -> None:
    """dQ of a run."""
    heads = p.H // p.G
    tile = configs.queries(heads, p.DN + p.DR, p.qn.element_size())
    sizes = {name: size for name, size in _sizes(p, tile).items() if name not in ("DV", "PV", "SHARED")}
    queries_kernel[(count * p.G * -(-heads // tile.heads),)](
        p.kn,
        p.kn if p.kr is None else p.kr,
        p.indices,
        p.indices if p.bounds is None else p.bounds,
        ds,
        dqn,
        dqn if dqr is None else dqr,
        start,
        p.positions,
        p.K,
        p.S,
        p.H,
        p.G,
        E,
        *strides_of(p.kn, p.kr),
        **sizes,
    )
