"""Delta-rule layers of the library made to run on cut rows; whole rows run as before.

The families' own functions compute; only what they are called with changes (``context_delta``).
Legend: B rows, T tokens of a rank, N parts of documents, H heads, K, V widths, C channels, J taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.context import Cut, active
from shardwright.runtime.context_delta import Recurrence, convolution, delta_rule
from shardwright.schemas.errors import LegalityError

RULES = ("chunk_kimi_delta_attention", "torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")
"""Functions of the library that run the recurrence over whole rows."""
CONVOLUTION = "causal_conv1d_fn"


def cut_layer(module: nn.Module, name: str) -> None:
    """Make a layer whose forward calls the library's functions run on cut rows.

    Raises:
        LegalityError: ``context-layer`` where the forward does not call one recurrence and one convolution of ours.
    """
    own = inspect.unwrap(type(module).forward)
    called = own.__code__.co_names if isinstance(own, FunctionType) else ()
    rules = [rule for rule in RULES if rule in called]
    if not isinstance(own, FunctionType) or len(rules) != 1 or CONVOLUTION not in called:
        raise LegalityError(
            "context-layer",
            f"{type(module).__name__} carries a state along whole rows",
            where=name,
            next_action="choose cp 1 for this family",
        )
    on_cut_rows(module, {rules[0]: _rule(own.__globals__[rules[0]]), CONVOLUTION: _convolution})


def on_cut_rows(module: nn.Module, exchanged: dict[str, Any]) -> None:
    """Run the module's own forward with other functions under these names where rows are cut."""
    own: Any = inspect.unwrap(type(module).forward)
    changed = FunctionType(
        own.__code__, {**own.__globals__, **exchanged}, own.__name__, own.__defaults__, own.__closure__
    )
    changed.__kwdefaults__ = own.__kwdefaults__
    original: Callable[..., Any] = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if active() is None:
            return original(hidden_states, *args, **kwargs)
        return changed(module, hidden_states, *args, **kwargs)

    module.forward = forward


def part_by_part(rule: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]) -> Recurrence:
    """A recurrence over rows [N, t, …] as one over parts of different lengths; equal parts run together."""

    def run(streams: list[Tensor], bounds: tuple[int, ...], states: Tensor) -> tuple[Tensor, Tensor]:
        sizes = [stop - start for start, stop in pairwise(bounds)]
        if len(set(sizes)) == 1:
            out, after = rule([one.reshape(len(sizes), sizes[0], *one.shape[2:]) for one in streams], states)
            return out.reshape(1, -1, *out.shape[2:]), after
        parts = zip(*(one.split(sizes, dim=1) for one in streams), states.split(1), strict=True)
        found = [rule(list(part), state) for *part, state in parts]
        return torch.cat([out for out, _ in found], dim=1), torch.cat([after for _, after in found])

    return run


def _rule(original: Callable[..., Any]) -> Callable[..., Any]:
    """The library's recurrence in its own spelling, over cut rows."""

    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        def call(streams: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v, decay, step = streams
            asked = {**kwargs, "initial_state": state, "output_final_state": True}
            found: tuple[Tensor, Tensor] = original(q, k, v, g=decay, beta=step, **asked)
            return found

        return delta_rule(part_by_part(call), (query, key, value, g, beta), current()), None

    return rule


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """The library's convolution in its own spelling, [B, C, T] → the same, over cut rows."""
    from transformers.activations import ACT2FN

    out = convolution(x.mT, weight, bias, current()).mT
    mixed: Tensor = out if activation is None else ACT2FN[activation](out)
    return mixed


def current() -> Cut:
    """How the rows that run now are cut."""
    cut = active()
    assert cut is not None, "a layer changed for cut rows runs whole ones by its own forward"
    return cut
