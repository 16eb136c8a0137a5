"""What an expert layer is made of: the choices in it, its tensors, what a backward keeps and gives.

Every operator on expert stacks (received rows, the whole layer, packed stacks) passes these objects, so each list
of tensors is written once. ``Registered`` is how a layer travels through ``torch.library``, whose operators take
plain values only.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout

Optional = Tensor | None


@dataclass(frozen=True)
class Adapter:
    """LoRA on one stack: the product gains ``scaling · (x aᵀ) bᵀ``."""

    a: Tensor
    """``[E, r, in]``."""
    b: Tensor
    """``[E, out, r]``."""
    scaling: float


@dataclass(frozen=True)
class Choice:
    """What is fixed when the model is built."""

    activation: Activation
    layout: Layout
    up_scaling: float = 0.0
    down_scaling: float = 0.0
    trains_base: bool = False
    """Whether the stacks get gradients; else one that wants a gradient is refused."""


@dataclass(frozen=True)
class Weights:
    """The stacks, the adapters' factors and the biases; ``None`` where a stack has none."""

    gate_up: Tensor
    down: Tensor
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None
    up_bias: Tensor | None = None
    """``[E, F]`` in the stack's own column order; frozen."""
    down_bias: Tensor | None = None
    """``[E, H]``; frozen."""

    def tensors(self) -> tuple[Optional, ...]:
        """All, in the order of the fields."""
        return (
            self.gate_up,
            self.down,
            self.up_a,
            self.up_b,
            self.down_a,
            self.down_b,
            self.up_bias,
            self.down_bias,
        )

    def given(self) -> list[Tensor]:
        """Those that there are."""
        return [tensor for tensor in self.tensors() if tensor is not None]

    def widths(self, choice: Choice) -> tuple[int, int]:
        """I and F."""
        I = self.down.shape[1 if choice.layout.order == "in_out" else 2]
        return I, (2 if choice.activation.gated else 1) * I


PARTS = 8
"""Tensors of ``Weights``."""


class Kept(NamedTuple):
    """What the backward needs: pre-activations [R, F]; h [R, I] and the low-rank products where they are used."""

    gu: Tensor | None
    h: Tensor | None
    z_up: Tensor | None
    z_down: Tensor | None

    def outputs(self, like: Tensor) -> list[Tensor]:
        """As a registered operator's outputs: empty tensors where nothing is kept."""
        return [like.new_empty(0) if tensor is None else tensor for tensor in self]

    @staticmethod
    def of(outputs: Sequence[Tensor]) -> Kept:
        """The inverse of ``outputs``."""
        gu, h, z_up, z_down = (t if t.numel() or t.dim() > 1 else None for t in outputs)
        return Kept(gu, h, z_up, z_down)

    @staticmethod
    def shapes(like: Tensor, R: int, w: Weights, choice: Choice) -> Kept:
        """Tensors of the shapes that a forward over R rows keeps."""
        I, F = w.widths(choice)
        h = like.new_empty((R, I)) if w.down_a is not None or choice.trains_base else None
        z_up, z_down = (None if a is None else like.new_empty((R, a.shape[1])) for a in (w.up_a, w.down_a))
        return Kept(like.new_empty((R, F)), h, z_up, z_down)


class Held:
    """What one backward works on, each tensor let go when nothing after it reads it.

    Whoever starts a backward fills this and keeps no name of its own on what is in it: rows that a recomputation made
    are then freed in the middle of the backward. ``spent``: no later backward reads what was kept, so gradients may be
    written over it. Inputs, such as x, are never written over.
    """

    def __init__(self, x: Tensor, kept: Kept, spent: bool = False) -> None:
        self.x: Tensor | None = x
        self.gu, self.h, self.z_up, self.z_down = kept
        self.spent = spent

    @staticmethod
    def in_backward(x: Tensor, kept: Kept) -> Held:
        """Inside the backward of an autograd function: what it kept is spent, unless the graph is retained."""
        return Held(x, kept, spent=not torch._C._autograd._get_current_graph_task_keep_graph())

    def rows_of_dh(self, like: Tensor, R: int, I: int) -> Tensor:
        """Memory for dh ``[R, I]``: that of h where it is spent. h is let go."""
        h, self.h = self.h, None
        return h if h is not None and self.spent else like.new_empty((R, I))

    def rows_of_dgu(self) -> Tensor:
        """Memory for dgu ``[R, F]``: that of gu where it is spent, as a tensor of its own, as a launch's roles are."""
        assert self.gu is not None
        return self.gu.detach() if self.spent else torch.empty_like(self.gu)


class Wants(NamedTuple):
    """Which gradients are needed."""

    x: bool = True
    weights: bool = False
    """Of the routing weights."""
    up: bool = True
    """Of the adapters' factors."""
    low: bool = True
    gate_up: bool = False
    """Of the stacks."""
    down: bool = False

    @staticmethod
    def of(needs: Sequence[bool], x: bool, weights: bool = False) -> Wants:
        """From what autograd says of each tensor of ``Weights``, in order."""
        return Wants(x, weights, any(needs[2:4]), any(needs[4:6]), needs[0], needs[1])

    @staticmethod
    def all(choice: Choice, weights: bool = False) -> Wants:
        """Everything that a layer can give."""
        return Wants(True, weights, True, True, choice.trains_base, choice.trains_base)


@dataclass(frozen=True)
class Gradients:
    """What a backward gives; ``None`` where it was not wanted or there is no such tensor."""

    dx: Tensor | None
    """Rows [R, H], not yet summed to tokens."""
    part: Tensor | None
    """fp32 [R]: the gradient of each row's routing weight."""
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None

    def of_weights(self) -> tuple[Optional, ...]:
        """In the order of ``Weights``; biases have none."""
        return self.gate_up, self.down, self.up_a, self.up_b, self.down_a, self.down_b, None, None


def choice_of(
    activation: Activation, layout: Layout, up: Adapter | None, low: Adapter | None, trains_base: bool = False
) -> tuple[Choice, tuple[Optional, Optional, Optional, Optional]]:
    """The static choice, and the adapters' factors in the order of ``Weights``."""
    scalings = [0.0 if adapter is None else float(adapter.scaling) for adapter in (up, low)]
    pairs = [(None, None) if adapter is None else (adapter.a, adapter.b) for adapter in (up, low)]
    return Choice(activation, layout, scalings[0], scalings[1], trains_base), (*pairs[0], *pairs[1])


def encode(choice: Choice) -> tuple[list[float], str]:
    """A choice as an operator's plain arguments."""
    halves = "interleaved" if choice.layout.interleaved else "halves"
    base = "trained" if choice.trains_base else "frozen"
    flags = f"{choice.activation.kind}/{choice.layout.order}/{halves}/{base}"
    return [*choice.activation.parameters, choice.up_scaling, choice.down_scaling], flags


def decode(numbers: Sequence[float], flags: str) -> Choice:
    """The inverse of ``encode``."""
    kind, order, halves, base = flags.split("/")
    activation = Activation(cast(Any, kind), (numbers[0], numbers[1], numbers[2]))
    layout = Layout(cast(Any, order), halves == "interleaved")
    return Choice(activation, layout, numbers[3], numbers[4], base == "trained")


class Registered(NamedTuple):
    """A layer as a registered operator takes it: the tensors that there are, which those are, and the choice."""

    tensors: list[Tensor]
    present: list[bool]
    numbers: list[float]
    flags: str

    @staticmethod
    def of(w: Weights, choice: Choice) -> Registered:
        return Registered(w.given(), [tensor is not None for tensor in w.tensors()], *encode(choice))

    def weights(self) -> Weights:
        return Weights(*cast(Any, placed(self.tensors, self.present)))

    def choice(self) -> Choice:
        return decode(self.numbers, self.flags)

    def gradients(self, found: Gradients, like: Tensor) -> list[Tensor]:
        """One gradient for each tensor that there is; an empty one where it has none."""
        every = zip(found.of_weights(), self.present, strict=True)
        return [like.new_empty(0) if gradient is None else gradient for gradient, given in every if given]

    def shapes(self) -> list[Tensor]:
        """Tensors of the shapes of ``gradients``: those of factors, and of stacks where the base trains."""
        learns = [self.choice().trains_base] * 2 + [True] * 4 + [False] * 2
        every = [learned for learned, given in zip(learns, self.present, strict=True) if given]
        return [t.new_empty(t.shape if learned else 0) for t, learned in zip(self.tensors, every, strict=True)]


def placed(tensors: Sequence[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    """One entry for each of ``present``: the next tensor, or ``None``."""
    rest = iter(tensors)
    return [next(rest) if given else None for given in present]
