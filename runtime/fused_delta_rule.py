"""Linear-attention layers whose recurrence is one operator; everything around it stays the family's own.

The plan proves the recurrence with decays and betas that are given, so that is all that is exchanged: the layer's own
forward runs, and where it calls its family's chunked function the operator stands in. A call with a cache runs the
module as it is; documents of one row run one by one.
Legend: B batch, S tokens, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.segments import by_document
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

CACHES = ("cache", "cache_params", "past_key_values")
"""Arguments with which a family hands over its cache: decoding runs the module's own forward."""
Rule = Callable[..., tuple[Tensor, Tensor | None]]


def fused_delta_rule(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Tensor]:
    """The forward of a layer whose forward calls the function that the constant ``rule`` names, ``module:function``.

    Raises:
        LegalityError: ``fusion-delta-rule`` where the module's forward does not call it.
    """
    home, _, function = str(decision.constants.get("rule", "")).partition(":")
    own = inspect.unwrap(type(module).forward)
    found = getattr(own, "__globals__", {}).get(function)
    calls = isinstance(own, FunctionType) and own.__module__ == home and function in own.__code__.co_names
    if not isinstance(own, FunctionType) or found is None or not calls:
        raise LegalityError(
            "fusion-delta-rule",
            f"the forward of {type(module).__name__} does not call {function or 'any rule'} of {home or 'any module'}",
            where=name,
            next_action="make the plan again for this library version, or reject the delta_rule proposal",
        )
    changed = FunctionType(
        own.__code__,
        {**own.__globals__, function: _rule(OPERATORS[decision.op].load_op(), found)},
        own.__name__,
        own.__defaults__,
        own.__closure__,
    )
    changed.__kwdefaults__ = own.__kwdefaults__
    original: Callable[..., Tensor] = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or any(kwargs.get(key) is not None for key in CACHES):
            return original(hidden_states, *args, **kwargs)
        result: Tensor = changed(module, hidden_states, **kwargs)
        return result

    return by_document(forward)


def _rule(op: Rule, original: Rule) -> Rule:
    """The operator in the family's own spelling; a call with a state runs the function itself."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *args: Any,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        plain = not args and initial_state is None and not output_final_state and use_qk_l2norm_in_kernel
        if not plain or kwargs.get("cu_seqlens") is not None:
            kwargs |= {"initial_state": initial_state, "output_final_state": output_final_state}
            kwargs |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            return original(query, key, value, g, beta, *args, **kwargs)
        given = [tensor.contiguous() for tensor in (query, key, value, g, beta)]
        return op(*given, gate="given", beta_sigmoid=False, decays=True)

    return rule
