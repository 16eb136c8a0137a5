"""The inputs of one call as the launches take them: parts with their head dims, sizes and strides.

Legend: T queries, S keys, H query heads, G key heads, DN, DR, DV widths of the plain part, the rotated part and the
value, K entries, B keys of an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwright.kernels.dsa.attention import contract


def strides_of(*tensors: Tensor | None) -> list[int]:
    """Strides of the first two dims of each; 0 for a part that is not there."""
    return [s for tensor in tensors for s in ((0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1)))]


@dataclass(frozen=True)
class Problem:
    """Query parts ``[T, H, width]``, key parts ``[S, G, width]``, selection ``[T, G, K]``.

    ``v`` is ``None`` in the latent form: there the plain key part is the value. Rotated parts may be missing, both.
    """

    qn: Tensor
    qr: Tensor | None
    kn: Tensor
    kr: Tensor | None
    v: Tensor | None
    indices: Tensor
    bounds: Tensor | None
    gate: Tensor | None
    sinks: Tensor | None
    scale: float
    block: int

    @property
    def T(self) -> int:
        return self.qn.shape[0]

    @property
    def H(self) -> int:
        return self.qn.shape[1]

    @property
    def S(self) -> int:
        return self.kn.shape[0]

    @property
    def G(self) -> int:
        return self.kn.shape[1]

    @property
    def K(self) -> int:
        return self.indices.shape[2]

    @property
    def positions(self) -> int:
        """Keys that a query may have."""
        return self.K * self.block

    @property
    def DN(self) -> int:
        return self.qn.shape[2]

    @property
    def DR(self) -> int:
        return 0 if self.qr is None else self.qr.shape[2]

    @property
    def value(self) -> Tensor:
        return self.kn if self.v is None else self.v

    @property
    def DV(self) -> int:
        return self.value.shape[2]

    @property
    def W(self) -> int:
        """Columns of a key's gradient: plain, rotated, and the value where it is a tensor of its own."""
        return self.DN + self.DR + (0 if self.v is None else self.DV)

    @property
    def gate_kind(self) -> str:
        if self.gate is None:
            return ""
        return "head" if self.gate.dim() == 2 else "value"

    def check_static(self) -> None:
        """Raises: KernelError: see ``contract.check_static``."""
        q = {"q_nope": self.qn} if self.v is None else {"q": self.qn}
        k = {"latent": self.kn} if self.v is None else {"k": self.kn}
        q |= {} if self.qr is None else {"q_rope": self.qr}
        k |= {} if self.kr is None else {"k_rope": self.kr}
        k |= {} if self.v is None else {"v": self.v}
        contract.check_static(
            q, k, self.indices, self.gate, self.sinks, self.bounds, scale=self.scale, block_size=self.block
        )

    def check_places(self, *, interpreted: bool) -> None:
        """Raises: KernelError: see ``contract.check_places``."""
        strided = {"q": self.qn, "q_rope": self.qr, "k": self.kn, "k_rope": self.kr, "v": self.v}
        compact = {"indices": self.indices, "bounds": self.bounds, "gate": self.gate, "sinks": self.sinks}
        contract.check_places(
            {role: tensor for role, tensor in strided.items() if tensor is not None},
            {role: tensor for role, tensor in compact.items() if tensor is not None},
            interpreted=interpreted,
        )
