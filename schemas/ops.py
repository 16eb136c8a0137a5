"""What an operator costs for a shape: counted work, no device and no milliseconds.

Legend: flops = multiply and add counted as two; bytes = device memory traffic;
floor = the fewest bytes and flops any implementation must spend.
"""

from __future__ import annotations

from typing import Literal

from shardwright.schemas.base import CountInt, Identifier, Model, NonNegative, Positive, Sha256

PassName = Literal["fwd", "bwd", "fwd+bwd", "fwd+dx"]
EvidenceOrigin = Literal["measured", "modelled", "assumed"]


class PassCost(Model):
    """The counted work of one pass of one operator at one shape."""

    flops: CountInt
    """Floating-point operations really done, recomputation included."""
    bytes_read: CountInt
    bytes_written: CountInt
    launches: CountInt
    workspace_bytes: CountInt = 0
    """Temporary device memory alive only inside the pass."""
    floor_flops: CountInt
    floor_bytes: CountInt


class OpCost(Model):
    """Forward and backward cost of one operator at one shape and dtype."""

    op: Identifier
    provider: Identifier
    dtype: Identifier
    shape: dict[str, CountInt]
    """Named sizes, for example ``{"T": 16384, "H": 7168}``."""
    forward: PassCost
    backward: PassCost | None = None
    saved_bytes: CountInt = 0
    """Memory kept from forward to backward, beyond inputs that live anyway."""

    def total_bytes(self) -> int:
        """Traffic of forward and backward together, bytes."""
        passes = [self.forward] + ([self.backward] if self.backward else [])
        return sum(p.bytes_read + p.bytes_written for p in passes)


class OperatorCall(Model):
    """One operator at the sizes that a time of it was looked up or counted for."""

    op: Identifier
    dtype: Identifier
    sizes: dict[Identifier, CountInt]
    """Named as its cost function names them; their bucket is the key of a measured time."""
    pass_name: PassName
    """What the time is of."""


class MeasuredTime(Model):
    """One measured time in the evidence store, and everything it depends on."""

    op: Identifier
    provider: Identifier
    pass_name: PassName
    device: str
    driver: str
    versions: dict[str, str]
    source_sha256: Sha256
    shape_bucket: str
    dtype: Identifier
    median_ms: Positive
    floor_ms: NonNegative
    peak_bytes: CountInt
    repeats: CountInt
    date: str
