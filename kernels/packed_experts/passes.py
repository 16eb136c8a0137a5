"""Which launches a pass without adapters is made of, and which tensor stands where: what is bound as one series.

Each launch is named by the key that it is bound under and by its tensors in the order in which it gives them to
``bound``: ``rows.Product.tensors`` and ``elementwise_launch`` where the stacks are copies, ``PackedProduct.tensors``
where they are decoded in the loop. A launch that is bound under another key, or with other roles, makes no series.

Legend: R rows, H hidden, I expert width, F = 2I with a gate (else I).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shardwright.kernels.bound import key_of
from shardwright.kernels.packed_experts import series
from shardwright.kernels.packed_experts.lists import LISTS, PARTS

Names = tuple[str | None, ...]
Launches = list[tuple[Hashable, Names]]
BEGIN: Names = ("counts", *PARTS, "y")
TAIL: Names = ("dx", "offsets")


def _product(x: str, w: str, y: str, h: str | None = None, bias: str | None = None) -> Names:
    """As ``rows.Product.tensors``: no adapter, rows in expert order."""
    return (x, w, y, h, None, None, bias, None, *PARTS)


def _packed(x: str, scales: str, *more: str | None, bias: str | None = None) -> Names:
    """As ``PackedProduct.tensors``, without an adapter."""
    return (x, scales, *more, None, None, *LISTS, "count", bias)


def keep_forward_of_copies(of: Hashable, biases: Sequence[str | None]) -> None:
    """Rows x through copies ``wide`` and ``narrow``; ``biases``: names of those of up and down that there are."""
    up, down = biases
    launches: Launches = [
        (key_of(of, "begin"), BEGIN),
        (key_of(of, "gate_up", True), _product("x", "wide", "gu", "h", up)),
        (key_of(of, "down"), _product("h", "narrow", "y", bias=down)),
    ]
    order = ("x", "counts", "wide", "narrow", *PARTS, "gu", "h", "y", *given(biases))
    series.keep((of, "forward"), order, launches)


def keep_backward_of_copies(of: Hashable) -> None:
    """dy → dgu, and dgu → dx: two series, since dx is made where dh is gone."""
    activation: Names = ("dh", "gu", "dgu", None, None, None, None, "offsets", None, *LISTS, "count")
    launches: Launches = [
        (key_of(of, "dh"), _product("dy", "narrow", "dh")),
        (key_of(of, "activation-bwd", True, True), activation),
    ]
    series.keep((of, "dgu"), ("dy", "narrow", "dh", "gu", "dgu", *PARTS), launches)
    launches = [(key_of(of, "dx"), _product("dgu", "wide", "dx")), (key_of(of, "dx-tail"), TAIL)]
    series.keep((of, "dx"), ("dgu", "wide", "dx", *PARTS), launches)


def keep_forward_in_loop(of: Hashable, keep: bool, gated: bool, biases: Sequence[str | None]) -> None:
    """Rows x through packed stacks; ``gu`` where it is kept."""
    (up, down), gu, second = biases, "gu" if keep else None, "up" if gated else None
    launches: Launches = [
        (key_of(of, "begin"), BEGIN),
        (key_of(of, "gate_up", not keep), _packed("x", "up_scales", "gate", second, gu, "h", bias=up)),
        (key_of(of, "down"), _packed("h", "down_scales", "down_values", "y", bias=down)),
    ]
    stacks = ("up_scales", "down_values", "down_scales", *given(("gate", second)))
    series.keep((of, "forward", keep), ("x", "counts", *stacks, *PARTS, *given((gu, "h", "y", *biases))), launches)


def keep_backward_in_loop(of: Hashable) -> None:
    """dy → dgu, and dgu → dx: two series, since dx is made where gu is gone."""
    names = _packed("dy", "down_scales", "down_values", "gu", "dgu")
    order: tuple[str, ...] = ("dy", "down_values", "down_scales", "gu", "dgu", *LISTS, "count")
    series.keep((of, "dgu"), order, [(key_of(of, "activation-bwd"), names)])
    launches: Launches = [
        (key_of(of, "dx"), _packed("dgu", "up_scales", "up_values", "dx")),
        (key_of(of, "dx-tail"), TAIL),
    ]
    series.keep((of, "dx"), ("dgu", "up_values", "up_scales", "dx", *PARTS), launches)


def given(names: Sequence[str | None]) -> tuple[str, ...]:
    """Those that there are."""
    return tuple(name for name in names if name is not None)
