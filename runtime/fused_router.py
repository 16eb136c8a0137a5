"""A family's router module with the fused choice: logits in the model's own product, the rest in one operator.

Under activation checkpointing only the choice comes from the operator, and the recomputation repeats it; the weights
are then made from the chosen logits by plain differentiable operations, in both passes alike.
Legend: T tokens, E experts, K chosen experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.routing import active
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

SCORINGS = ("softmax", "sigmoid")


def fused_router(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., tuple[Tensor, ...]]:
    """The forward of a router that returns (logits [T, E], weights [T, K], experts [T, K]).

    Constants of the decision: ``k``, ``scoring``, ``renormalise``, ``scale``, and with groups ``groups``,
    ``groups_kept``, ``group_score``. ``logits_dtype`` is ``float32`` where the family multiplies in fp32,
    ``logits_cast`` where it casts the product to fp32, ``weights_dtype`` where it keeps fp32 weights.
    Roles, each the dotted name of a tensor in the module: ``weight`` [E, H]; ``offset`` [E], added to the product;
    ``bias`` [E], added to the scores that pick. With the constant ``bias_argument`` the bias is what the forward gets
    beside the hidden states.

    Raises:
        LegalityError: ``fusion-router`` where the plan does not say what the operator needs.
    """
    constants = decision.constants
    if "k" not in constants or constants.get("scoring") not in SCORINGS:
        raise _refused(f"the plan names k = {constants.get('k')} and scoring {constants.get('scoring')!r}", name)
    op: Callable[..., Any] = OPERATORS["router"].load_op()
    roles = decision.roles
    weight, bias, offset = roles.get("weight", "weight"), roles.get("bias"), roles.get("offset")
    given = bool(constants.get("bias_argument", False))
    for role in (weight, offset, None if given else bias):
        if role is not None and not isinstance(_tensor(module, role), Tensor):
            raise _refused(f"the module has no tensor {role}", name)
    wide = constants.get("logits_dtype") == "float32"
    cast = wide or constants.get("logits_cast") == "float32"
    wide_weights = cast or constants.get("weights_dtype") == "float32"
    settings: dict[str, Any] = {
        "k": int(constants["k"]),
        "scoring": str(constants["scoring"]),
        "groups": int(constants.get("groups", 1)),
        "groups_kept": int(constants.get("groups_kept", 1)),
        "group_score": str(constants.get("group_score", "top2")),
        "renormalise": bool(constants.get("renormalise", True)),
        "scale": float(constants.get("scale", "1")),
    }

    def forward(hidden_states: Tensor, *biases: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        if len(biases) + len(named) != int(given):
            raise _refused(
                f"{len(biases) + len(named)} biases came with the hidden states, the plan says {given}", name
            )
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        parts = [_tensor(module, role) for role in (weight, offset) if role is not None]
        logits = F.linear(flat.float(), *(part.float() for part in parts)) if wide else F.linear(flat, *parts)
        logits = logits.float() if cast else logits
        picks = (*biases, *named.values())[0] if given else None if bias is None else _tensor(module, bias)
        choices = active()
        if choices is None:
            routing = op(logits, picks, **settings)
            weights, experts = routing.weights, routing.experts
        else:
            with torch.no_grad():
                size = (*logits.shape, settings["k"])
                experts = choices.take(size, lambda: op(logits.detach(), picks, **settings).experts)
            weights = weights_of(logits, experts, settings["scoring"], settings["renormalise"], settings["scale"])
        return logits, weights if wide_weights else weights.to(logits.dtype), experts

    return forward


def _tensor(module: nn.Module, role: str) -> Any:
    """A tensor of the module or of a child, by its dotted name; ``None`` where there is none."""
    for part in role.split("."):
        module = getattr(module, part, None)  # type: ignore[assignment]
    return module


def _refused(what: str, name: str) -> LegalityError:
    return LegalityError("fusion-router", what, where=name, next_action="reject this proposal")


def weights_of(logits: Tensor, experts: Tensor, scoring: str, renormalise: bool, scale: float) -> Tensor:
    """[T, E] logits and [T, K] experts → [T, K] fp32 weights, differentiable in the logits.

    A renormalised softmax over all experts is the softmax over the chosen ones.
    """
    if scoring == "softmax" and renormalise:
        scores = logits.gather(1, experts).float().softmax(-1)
    elif scoring == "softmax":
        wide = logits.float()
        scores = (wide.gather(1, experts) - wide.logsumexp(-1, keepdim=True)).exp()
    else:
        scores = logits.gather(1, experts).float().sigmoid()
        if renormalise:
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores if scale == 1 else scores * scale
