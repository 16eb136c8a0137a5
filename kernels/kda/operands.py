"""What KDA's launches take and pass on, and the constants that its kernels share.

Legend: B batch, T tokens, C tokens of a chunk, NT chunks, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shardwright.kernels.kda.configs import CHUNK, SMALL
from shardwright.kernels.kda.contract import GATES

GATE_CODES = {"given": 0, "bounded": 1, "softplus": 2}
assert set(GATE_CODES) == set(GATES)


@dataclass(frozen=True)
class Settings:
    """What is not a tensor."""

    gate: str
    lower_bound: float
    beta_sigmoid: bool


@dataclass(frozen=True)
class Inputs:
    """Checked inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None

    @property
    def H(self) -> int:
        return int(self.q.shape[2])

    @property
    def K(self) -> int:
        return int(self.q.shape[3])

    @property
    def HV(self) -> int:
        return int(self.v.shape[2])

    @property
    def V(self) -> int:
        return int(self.v.shape[3])

    @property
    def value_bytes(self) -> int:
        return self.q.element_size()

    @property
    def channels(self) -> bool:
        """Whether every key channel has a gate of its own; otherwise a head has one."""
        return self.g.dim() == 4


@dataclass
class Solved:
    """What costs most to make again and least to keep, one width in all: the reads P, the inverse, the norms."""

    p: Tensor
    """``[NT, HV, C, C]`` in q's dtype; where every channel has a gate, without the factors 1/norm of k, as ``ke`` of
    ``Prepared``: w and u have them in its stead."""
    inverse: Tensor
    """As ``p``."""
    norms: Tensor
    """``[NT, HV, 2, C]`` in fp32: the factors 1/norm of q and k, that of q with the scale in it."""


@dataclass
class Prepared:
    """All that is made inside chunks before the state is known."""

    w: Tensor
    u: Tensor
    qe: Tensor
    ke: Tensor
    p: Tensor
    total: Tensor
    inverse: Tensor
    norms: Tensor

    def solved(self) -> Solved:
        """The part that a forward keeps for its backward."""
        return Solved(self.p, self.inverse, self.norms)

    def inside(self) -> Prepared:
        """Without what only the chain of chunks reads, whose memory may go."""
        none = self.w.new_empty(0)
        return replace(self, w=none, qe=none, ke=none, p=none)


def precision(inputs: Inputs) -> dict[str, str]:
    """How products of fp32 factors are computed; 16-bit factors need no choice."""
    return {"PREC": "tf32x3" if inputs.value_bytes == 4 else "tf32"}


def blocks(settings: Settings) -> dict[str, Any]:
    """Constants of the kernels that walk over pairs. Only a bounded gate allows blocks on the diagonal."""
    return {"BLOCKED": settings.gate == "bounded", "SIGMOID": settings.beta_sigmoid, "C": CHUNK}


def levels(settings: Settings) -> int:
    """Halvings of a chunk: down to single tokens, or to ``SMALL`` and one more for the blocks of the diagonal."""
    halvings = CHUNK.bit_length() - 1
    return halvings - SMALL.bit_length() + 2 if settings.gate == "bounded" else halvings
