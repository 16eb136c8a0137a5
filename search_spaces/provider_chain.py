"""A provider's work as the kernels it launches, one after the other. No device and no milliseconds."""

from __future__ import annotations

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
