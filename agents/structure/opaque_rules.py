"""The recurrence of linear attention as one leaf of a capture.

Families compute it in chunks of 64 tokens, unrolled: some seven hundred nodes a layer that say nothing but "gated delta
rule". As one node it is small, and looks the same whatever the chunk; what the family's own function computes is run in
fp64 by the differential test.
Legend: B batch, T tokens, H key heads, HV value heads, K key width, V value width.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.agents.structure.opaque import NAMESPACE

OPERANDS = ("query", "key", "value", "g", "beta")
UNIT = "use_qk_l2norm_in_kernel"
"""Argument by which a library's function is told to divide q and k by their length, and to scale q."""
PLAIN_RULE = "delta_rule"
"""The project's own K3 calls it with q and k divided and scaled; its result is in fp32."""
RULES = ("chunk_kimi_delta_attention", "torch_chunk_gated_delta_rule", PLAIN_RULE)
"""Functions of the families: (q, k, v, g, beta, …) → (result, final state)."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, str rule, bool unit) -> Tensor")
_LIBRARY.impl("delta_rule", lambda q, k, v, g, beta, rule, unit: _result_like(v, rule), "Meta")


def _result_like(v: Tensor, rule: str) -> Tensor:
    wide = rule.endswith(f":{PLAIN_RULE}")
    return torch.empty_like(v, dtype=torch.promote_types(v.dtype, torch.float32) if wide else v.dtype).contiguous()


def run_rule(rule: str, values: tuple[Tensor, ...], *, unit: bool) -> Tensor:
    """The family's own function on real tensors.

    Args:
        rule: ``module:function``.
        values: q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g ``[B, T, HV]`` or ``[B, T, HV, K]``, beta ``[B, T, HV]``.
        unit: whether the function divides q and k by their length.
    """
    module, _, name = rule.partition(":")
    q, k, v, g, beta = values
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    result: Tensor = function(q, k, v, g=g, beta=beta, **({UNIT: True} if unit else {}))[0]
    return result


@contextmanager
def opaque_rules(layer: nn.Module) -> Iterator[None]:
    """While open, the families of a layer's modules call one node in place of their recurrence."""
    homes = {type(module).__module__ for module in layer.modules()}
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for home in sorted(homes):
            module = sys.modules.get(home)
            for name in RULES:
                original = getattr(module, name, None)
                if callable(original):
                    replaced.append((module, name, original))
                    setattr(module, name, _node(f"{home}:{name}", original))
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _node(rule: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The leaf in place of a function; a call with a state or another chunk runs the function itself."""
    named = [*inspect.signature(original).parameters.values()][len(OPERANDS) :]
    options = {one.name for one in named if one.kind is not one.VAR_KEYWORD}

    def call(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or any(kwargs.get(name) not in (None, False) for name in options - {UNIT}):
            return original(query, key, value, g, beta, *args, **kwargs)
        unit = bool(kwargs.get(UNIT, False))
        return torch.ops.shardwright_capture.delta_rule(query, key, value, g, beta, rule, unit), None

    return call
