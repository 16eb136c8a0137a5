"""Launch choices of the delta rule's kernels that are worth trying on a device: are they safe, right, and how fast?

One call on a GPU machine, before anything else is believed::

    compute-sanitizer --tool memcheck --error-exitcode 3 python -m shardwright.kernels.kda.tuning check
    python -m shardwright.kernels.kda.tuning time

``check`` runs every choice, both gates, one gate a head, pieces, steps and the convolution at small sizes and compares
bits of results with the shipped choice's to rounding; ``time`` times each choice of each kernel, forward and backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwright.kernels.gated_delta import cases as scalar_cases
from shardwright.kernels.gated_delta.op import gated_delta
from shardwright.kernels.kda import cases, configs
from shardwright.kernels.kda.configs import Tile
from shardwright.kernels.kda.op import kda
from shardwright.kernels.kda.step import kda_step
from shardwright.kernels.short_conv import cases as conv_cases
from shardwright.kernels.timing import median_ms

VARIANTS: Mapping[str, tuple[Tile, ...]] = {
    "pairs": (Tile(16, 0, 1, 2), Tile(32, 0, 1, 2), Tile(16, 0, 1, 4)),
    "widths": (Tile(32, 32, 4, 1), Tile(32, 32, 4, 2), Tile(64, 64, 8, 1)),
    "values": (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1, 128)),
    "keys": (Tile(32, 64, 4, 1), Tile(16, 64, 4, 1), Tile(16, 32, 4, 1, 168), Tile(64, 64, 8, 1)),
    "scan": (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2)),
    "reverse": (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2)),
}
"""Function of ``configs`` → choices; the width of the state in scan and reverse comes from the call."""

FAR = 2e-2
"""Relative difference of bf16 results above which a choice is wrong."""
SIZES = {"T": 200, "H": 4, "K": 128, "V": 128, "docs": 3}
BOUNDS = (0, 63, 64, 200)


@contextmanager
def chosen(kernel: str, tile: Tile) -> Iterator[None]:
    """Launches inside the block take this choice for one kernel."""
    with patch.object(configs, kernel, lambda *sizes: tile):
        yield


def passes(function: Callable[..., Any], given: Sequence[Tensor], **settings: Any) -> list[Tensor]:
    """Results and the gradient of every input, for seeded gradients of the results."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    outputs = [out for out in function(*leaves, **settings) if out is not None]
    draw = torch.Generator().manual_seed(5)
    ends = [torch.randn(o.shape, generator=draw).to(o) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, ends)]


def apart(ours: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest relative difference; infinite for what is not finite."""
    pairs = zip(ours, others, strict=True)
    found = [float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs]
    return max(one if one == one else float("inf") for one in found)


def check(device: str) -> list[str]:
    """What is wrong, a line each; a device error ends the process."""
    wrong: list[str] = []

    def compare(name: str, ours: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        distance = apart(ours, others)
        say(f"{name}: {distance:.1e}")
        if distance > FAR:
            wrong.append(f"{name} differs by {distance:.1e}")

    settings: dict[str, Any] = {"cu_seqlens": BOUNDS, "output_final_state": True}
    for gate in ("bounded", "softplus"):
        given = cases.inputs(SIZES, torch.bfloat16, device, 3)
        shipped = passes(kda, given, gate=gate, **settings)
        for kernel, tiles in VARIANTS.items():
            for tile in tiles:
                with chosen(kernel, tile):
                    compare(f"{gate} {kernel} {tile}", passes(kda, given, gate=gate, **settings), shipped)
        compare(f"{gate} kept", passes(kda, given, gate=gate, keep=True, **settings), shipped)
        with patch.object(configs, "pieces", lambda *sizes: 3):
            compare(f"{gate} pieces", passes(kda, given, gate=gate, **settings), shipped)
    given = scalar_cases.inputs(SIZES, torch.bfloat16, device, 3)
    shipped = passes(gated_delta, given, **settings)
    with patch.object(configs, "pieces", lambda *sizes: 3):
        compare("one gate, pieces", passes(gated_delta, given, **settings), shipped)
    with torch.no_grad():
        one = cases.inputs({**SIZES, "T": 2, "docs": 1}, torch.bfloat16, device, 3)
        compare("step", kda_step(*one), [t for t in kda(*one, output_final_state=True) if t is not None])
    conv = conv_cases.inputs({"T": 200, "C": 72, "J": 4, "docs": 5}, torch.bfloat16, device, 3)
    compare("convolution", passes(conv_cases.fused, conv), passes(conv_cases.reference, conv))
    torch.cuda.synchronize()
    return wrong


def times(device: str) -> None:
    """Forward and backward of each choice at T 8192, H 32."""
    given = [t.requires_grad_() for t in cases.inputs({"T": 8192, "H": 32, **cases.WIDE}, torch.bfloat16, device, 3)]

    def run(keep: bool) -> Callable[[], object]:
        o, final = kda(*given, output_final_state=True)
        assert final is not None
        ends = [torch.ones_like(o), torch.ones_like(final)]

        def once() -> object:
            outputs = [out for out in kda(*given, output_final_state=True, keep=keep) if out is not None]
            return torch.autograd.grad(outputs, given, ends)

        return once

    say(f"shipped: {median_ms(run(False)):.3f} ms, kept {median_ms(run(True)):.3f} ms")
    for kernel, tiles in VARIANTS.items():
        for tile in tiles:
            with chosen(kernel, tile):
                say(f"{kernel} {tile}: {median_ms(run(False)):.3f} ms")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """0 where nothing is wrong, 1 where a choice is."""
    if sys.argv[1:] == ["time"]:
        times("cuda")
        return 0
    wrong = check("cuda")
    for line in wrong:
        say(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
