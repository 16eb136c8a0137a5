"""Fused regions on cut rows: which of them run as they are, and delta-rule layers with the same operators.

Operators that work on tokens, and those before an attention that is exchanged, run as they are; sparse attention knows
its rows by itself (``context_dsa``). A delta-rule layer's convolution gets the inputs before each piece, its recurrence
the states that arrive (``context_delta``): two calls of the recurrence, of which one makes ``[N | M]`` and is as wide
as values and keys together.
Legend: B rows, T tokens of a rank, N parts of documents, C channels, J taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.kernels.kda.contract import WIDTHS
from shardwright.runtime.context import CONTEXT, active
from shardwright.runtime.context_delta import delta_rule, inputs_before
from shardwright.runtime.context_layers import current
from shardwright.runtime.fuse import Switch
from shardwright.runtime.fused_delta_layer import DeltaLayer
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision
from shardwright.search_spaces.executable import CONTEXT_OPERATORS

DELTA_LAYERS = frozenset({"kda", "gated_delta"})


def require_cuttable(decision: FusionDecision) -> None:
    """Whether an installed region is right where a rank holds pieces of rows.

    Raises:
        LegalityError: ``context-fusion``.
    """
    if decision.rejected or decision.provider == "eager":
        return
    if decision.op in DELTA_LAYERS and decision.provider == "shardwright":
        width = int(decision.constants.get("key_width", 0)) + int(decision.constants.get("value_width", 0))
        if "operators" in decision.constants and width in WIDTHS:
            return
    elif decision.provider == "shardwright" and decision.op in CONTEXT_OPERATORS and not _of_whole_rows(decision):
        return
    raise LegalityError(
        "context-fusion",
        f"{decision.pattern} ({decision.provider} {decision.op}) runs whole rows; the plan cuts them over ranks",
        where=f"decision.fusions: {decision.proposal_id}",
        next_action="reject this proposal, or choose cp 1",
    )


def _of_whole_rows(decision: FusionDecision) -> bool:
    """Whether a sparse attention scores pools, which are counted in whole documents, or has sinks."""
    return decision.op == "dsa" and ("pool" in decision.constants or "sinks" in decision.roles)


def cut_fusions(model: nn.Module, switches: tuple[Switch, ...], decisions: tuple[FusionDecision, ...]) -> None:
    """Make installed delta-rule layers run on cut rows too; nothing where sequences are whole.

    Raises:
        LegalityError, StalePlanError: as ``fused_delta_layer``.
    """
    if getattr(model, CONTEXT, None) is None:
        return
    used = [one for one in decisions if one.op in DELTA_LAYERS and one.provider != "eager" and not one.rejected]
    by_module = {name: one for one in used for name in one.modules}
    for switch in switches:
        decision = by_module.get(switch.name)
        if decision is not None:
            layer = DeltaLayer.of(model.get_submodule(switch.name), switch.name, decision)
            switch.fused_forward = _on_cut_rows(replace(layer, conv=_conv(layer.conv), rule=_rule(layer.rule)), switch)


def _on_cut_rows(layer: DeltaLayer, switch: Switch) -> Callable[..., Any]:
    whole: Callable[..., Any] = switch.fused_forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return whole(hidden_states, *args, **kwargs) if active() is None else layer(hidden_states, None)

    return forward


def _conv(op: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, None]]:
    """The short convolution over cut rows: x [B, T, C], taps [C, J]."""

    def conv(x: Tensor, taps: Tensor, cu_seqlens: None = None) -> tuple[Tensor, None]:
        cut = current()
        before = inputs_before(x, taps.shape[-1] - 1, cut).mT
        first = torch.tensor(cut.packed.first, device=x.device)
        initial = before.new_zeros((len(cut.packed.sizes), *before.shape[1:])).index_copy(0, first, before)
        y = op(x.reshape(1, -1, x.shape[-1]), taps, initial, cu_seqlens=cut.packed.bounds)[0]
        return y.view(x.shape), None

    return conv


def _rule(op: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, None]]:
    """The recurrence over cut rows, with its raw gate and step size."""

    def rule(*given: Tensor, cu_seqlens: None = None, **settings: Any) -> tuple[Tensor, None]:
        *streams, a_log, bias = given

        def run(parts: list[Tensor], bounds: tuple[int, ...], states: Tensor) -> tuple[Tensor, Tensor]:
            dense = [part.contiguous() for part in parts]
            asked = {**settings, "cu_seqlens": bounds, "output_final_state": True}
            found: Any = op(*dense, a_log, bias, states.contiguous(), **asked)
            return found

        return delta_rule(run, tuple(streams), current()), None

    return rule
