"""Installs the plan's fused operators on a live model.

A fused module keeps its parameters and their names; only its ``forward`` is exchanged, behind a switch. The plan names
modules, roles and source hash; nothing is matched again here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.kernels.gated_rms_norm.contract import ACTIVATIONS as GATES
from shardwright.kernels.registry import OPERATORS, source_sha256
from shardwright.runtime.experts.fused import packed_rows, received_rows, whole_layer
from shardwright.runtime.fused_attention import fused_attention
from shardwright.runtime.fused_delta_layer import fused_gated_delta
from shardwright.runtime.fused_dsa import fused_dsa
from shardwright.runtime.fused_kda import fused_kda
from shardwright.runtime.fused_loss import loss_head
from shardwright.runtime.fused_residual import fused_residual
from shardwright.runtime.fused_router import fused_router
from shardwright.runtime.losses import FUSED_LOSS
from shardwright.schemas.errors import LegalityError, StalePlanError
from shardwright.schemas.fusion import FusionDecision


class Switch:
    """A module's ``forward`` with two ways to run: fused or original."""

    def __init__(self, module: nn.Module, name: str, fused_forward: Callable[..., Any], tolerance: float) -> None:
        self.name, self.tolerance = name, tolerance
        self.original: Callable[..., Any] = module.forward
        self.fused_forward = fused_forward
        self.fused = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.fused_forward if self.fused else self.original)(*args, **kwargs)


@contextmanager
def fusions_off(switches: tuple[Switch, ...]) -> Iterator[None]:
    """Run the original forwards inside the block."""
    before = [switch.fused for switch in switches]
    for switch in switches:
        switch.fused = False
    try:
        yield
    finally:
        for switch, was in zip(switches, before, strict=True):
            switch.fused = was


def install_fusions(model: nn.Module, decisions: tuple[FusionDecision, ...]) -> tuple[Switch, ...]:
    """Exchange the forwards that the plan names.

    Raises:
        StalePlanError: ``kernel-source`` when an operator is not the one that was approved.
        LegalityError: ``fusion-module``, ``fusion-provider``, ``fusion-layer``, ``fusion-norm``, ``fusion-experts``,
            ``fusion-router``, ``fusion-attention``, ``fusion-dsa``, ``fusion-kda``, ``fusion-delta-rule``,
            ``fusion-residual``, ``fusion-loss``.
    """
    switches = []
    for decision in decisions:
        if decision.rejected or decision.provider == "eager":
            continue
        make = _maker(decision)
        for name in decision.modules:
            module = _module(model, name, decision)
            switch = Switch(module, name, make(module, name, decision), float(decision.tolerance))
            module.forward = switch
            switches.append(switch)
            if decision.op == "linear_cross_entropy":
                _take_loss(model, switch, decision)
    return tuple(switches)


def _take_loss(model: nn.Module, switch: Switch, decision: FusionDecision) -> None:
    if hasattr(model, FUSED_LOSS):
        raise LegalityError(
            "fusion-loss",
            "the plan binds a second head",
            where=f"decision.fusions: {decision.proposal_id}",
            next_action="reject all but one linear_cross_entropy proposal",
        )
    setattr(model, FUSED_LOSS, switch)


Maker = Callable[[nn.Module, str, FusionDecision], Callable[..., Any]]


def _maker(decision: FusionDecision) -> Maker:
    if decision.provider == "compile":
        return _compiled
    if decision.provider == "shardwright" and decision.op in OPERATOR_FORWARDS:
        found = source_sha256(decision.op)
        if decision.source_sha256 != found:
            raise StalePlanError(
                "kernel-source",
                f"the plan approves source {str(decision.source_sha256)[:16]}…, installed is {found[:16]}…",
                where=f"decision.fusions: {decision.proposal_id} ({decision.op})",
                next_action="make the plan again: its proofs and timings belong to other code",
            )
        return OPERATOR_FORWARDS[decision.op]
    raise LegalityError(
        "fusion-provider",
        f"this runtime cannot install op {decision.op!r} of provider {decision.provider!r}",
        where=f"decision.fusions: {decision.proposal_id}",
        next_action="reject this proposal or choose its eager variant",
    )


def _module(model: nn.Module, name: str, decision: FusionDecision) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise LegalityError(
            "fusion-module",
            f"the model has no module {name}",
            where=f"decision.fusions: {decision.proposal_id}",
            next_action="make the plan again for this checkpoint",
        ) from error


def _compiled(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(module.forward, dynamic=False)
    return compiled


def _rms_norm(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Any]:
    op = OPERATORS["rms_norm"].load_op()
    weight, eps = decision.roles.get("weight", "weight"), float(decision.constants["eps"])

    def forward(hidden_states: Tensor) -> Tensor:
        return op(hidden_states, getattr(module, weight), eps)

    return forward


def _gated_rms_norm(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Any]:
    """``norm(x) * weight * act(gate)`` for a norm that is called with (hidden_states, gate).

    Raises:
        LegalityError: ``fusion-norm`` for a gate that the operator does not compute.
    """
    op = OPERATORS["gated_rms_norm"].load_op()
    weight, eps = decision.roles.get("weight", "weight"), float(decision.constants["eps"])
    act = decision.constants.get("act")
    if act not in GATES:
        raise LegalityError(
            "fusion-norm", f"the plan's gate is {act!r}", where=name, next_action="reject this gated_rms_norm proposal"
        )

    def forward(hidden_states: Tensor, gate: Tensor) -> Tensor:
        return op(hidden_states, gate, getattr(module, weight), eps, activation=act)

    return forward


PRE_NORM_ROLES = ("first_norm", "branch", "norm", "mlp")
"""Children of a pre-norm layer: ``h = x + branch(first_norm x)``, ``y = h + mlp(norm h)``."""


def _add_rms_norm(layer: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Any]:
    """A pre-norm layer whose h and ``norm h`` are made by one operator; the plan names all four children.

    Raises:
        LegalityError: ``fusion-layer`` where the plan does not bind every role or the layer has other children.
    """
    op = OPERATORS["add_rms_norm"].load_op()
    children = dict(layer.named_children())
    bound = [decision.roles.get(role) for role in PRE_NORM_ROLES]
    if set(bound) != set(children):
        raise LegalityError(
            "fusion-layer",
            f"the plan binds {', '.join(str(child) for child in bound)}; the layer has {', '.join(children)}",
            where=name,
            next_action="reject the add_rms_norm proposal for this family",
        )
    first, branch, norm, mlp = (children[str(child)] for child in bound)
    eps = float(decision.constants["eps"])

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = branch(hidden_states=first(hidden_states), **_named(layer, args), **kwargs)
        normed, residual = op(out[0] if isinstance(out, tuple) else out, hidden_states, norm.weight, eps)
        out = mlp(normed)
        return residual + (out[0] if isinstance(out, tuple) else out)

    return forward


def _named(layer: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    if args:
        raise LegalityError(
            "fusion-layer",
            f"{len(args)} arguments came without names",
            where=type(layer).__name__,
            next_action="reject the add_rms_norm proposal for this family",
        )
    return {}


OPERATOR_FORWARDS: dict[str, Maker] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "gated_rms_norm": _gated_rms_norm,
    "attention_residual": fused_residual,
    "moe_layer": whole_layer,
    "grouped_lora_mlp": received_rows,
    "packed_experts": packed_rows,
    "router": fused_router,
    "qk_norm_rope": fused_attention,
    "kda": fused_kda,
    "gated_delta": fused_gated_delta,
    "dsa": fused_dsa,
    "linear_cross_entropy": loss_head,
}
"""Operator → how its forward is made for one module."""
