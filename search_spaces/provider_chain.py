"""A provider's work as the kernels it launches, one after the other. No device and no milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.schemas.ops import OpCost, PassCost

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

Moves = list[tuple[int, int]]
"""Bytes read and bytes written of each kernel."""


@dataclass(frozen=True)
class Chain:
    """Kernels in a row: ``(bytes read, bytes written)`` each."""

    kernels: tuple[tuple[int, int], ...]
    flops: int = 0

    def as_pass(self, floor_bytes: int, floor_flops: int = 0, workspace_bytes: int = 0) -> PassCost:
        return PassCost(
            flops=self.flops,
            bytes_read=sum(read for read, _ in self.kernels),
            bytes_written=sum(written for _, written in self.kernels),
            launches=len(self.kernels),
            workspace_bytes=workspace_bytes,
            floor_flops=floor_flops,
            floor_bytes=floor_bytes,
        )


def described(ours: OpCost, provider: str, forward: Moves, backward: Moves, saved: int) -> OpCost:
    """Flops and floors of our operator, which are those of the computation, with another provider's kernels."""
    assert ours.backward is not None

    def one(moves: Moves, own: PassCost) -> PassCost:
        return Chain(tuple(moves), own.flops).as_pass(own.floor_bytes, own.floor_flops)

    update = {
        "provider": provider,
        "forward": one(forward, ours.forward),
        "backward": one(backward, ours.backward),
        "saved_bytes": saved,
    }
    return ours.model_copy(update=update)


@dataclass(frozen=True)
class Step:
    """One kernel: what it moves and computes."""

    read: int
    written: int
    flops: int = 0


def product(rows: int, inner: int, out: int, b: int, *, stacks: int = 1) -> Step:
    """``[rows, inner] × [inner, out]``: both operands in, the result out; ``stacks`` matrices where rows choose one."""
    return Step((rows * inner + stacks * inner * out) * b, rows * out * b, 2 * rows * inner * out)


def moved(moves: Iterable[tuple[int, int]], flops: int = 0) -> list[Step]:
    """Kernels that mostly move, with the arithmetic of all of them together."""
    steps = [Step(read, written) for read, written in moves]
    return [Step(steps[0].read, steps[0].written, flops), *steps[1:]] if flops else steps


def steps_of(one: PassCost) -> list[Step]:
    """A part that is described already, as kernels whose sums are its own."""
    if not one.launches:
        return []
    return [Step(one.bytes_read, one.bytes_written, one.flops), *[Step(0, 0)] * (one.launches - 1)]


def by_kernels(
    op: str,
    provider: str,
    dtype: str,
    shape: dict[str, int],
    passes: tuple[Sequence[Step], Sequence[Step]],
    *,
    floor_bytes: tuple[int, int],
    floor_flops: tuple[int, int],
    saved: int = 0,
) -> OpCost:
    """A computation by its kernels, forward and backward, with floors of its own."""

    def one(at: int) -> PassCost:
        steps = passes[at]
        return PassCost(
            flops=sum(step.flops for step in steps),
            bytes_read=sum(step.read for step in steps),
            bytes_written=sum(step.written for step in steps),
            launches=len(steps),
            floor_flops=floor_flops[at],
            floor_bytes=floor_bytes[at],
        )

    return OpCost(
        op=op, provider=provider, dtype=dtype, shape=shape, forward=one(0), backward=one(1), saved_bytes=saved
    )
