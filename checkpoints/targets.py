"""LoRA targets: from role names and patterns to weights, with the true rank and orientation of each."""

from __future__ import annotations

import math
from decimal import Decimal
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import torch

from shardwright.checkpoints.build import build_on_meta
from shardwright.checkpoints.components import component_of
from shardwright.checkpoints.layouts import expert_layout, not_adapted
from shardwright.schemas.errors import LegalityError, RecipeError
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.recipe import LoraSpec

Role = Literal["attention", "experts", "shared_experts", "dense_mlp", "head", "router", "other"]

ROLES: dict[str, tuple[Role, ...]] = {
    "attention": ("attention",),
    "experts": ("experts",),
    "shared_experts": ("shared_experts",),
    "dense_mlp": ("dense_mlp",),
    "head": ("head",),
    "router": ("router",),
}
"""Names a recipe may use, and what each takes."""

ALL_LINEAR = "all-linear"
"""Everything in the layers but the router and helpers such as indexers."""
ALL_LINEAR_ROLES: tuple[Role, ...] = ("attention", "experts", "shared_experts", "dense_mlp")

MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Families in which PEFT refuses ``out_proj``; their attention calls its own output ``o_proj``."""

GROUPED: dict[str, tuple[str, ...]] = {"deepseek_v4": (".self_attn.o_a_proj.weight",)}
"""Family → weights of subclasses of ``nn.Linear`` that are no linear map of their whole input; endings of names."""

_COMPONENT_ROLE: dict[str, Role] = {
    "attention": "attention",
    "linear_attention": "attention",
    "routed_experts": "experts",
    "shared_experts": "shared_experts",
    "dense_mlp": "dense_mlp",
    "head": "head",
    "router": "router",
}


def parameter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Parameter → shape of a checkpoint's model, tied ones once; no weights are read.

    Raises:
        CheckpointError: as :func:`build_on_meta`.
    """
    model = build_on_meta(folder, torch.bfloat16)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def role_of(parameter: str, rank: int) -> Role:
    """The role of a parameter, from its name and the number of its dims."""
    if "shared_expert_gate" in parameter:
        return "router"
    return _COMPONENT_ROLE.get(component_of(parameter, rank), "other")


def adaptable(parameter: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is the matrix of a linear map, or a stack of such matrices."""
    role = role_of(parameter, len(shape))
    if len(shape) == 3:
        return role == "experts" and not parameter.endswith("bias")
    if len(shape) != 2 or min(shape) < 1 or not parameter.endswith(".weight"):
        return False
    component = component_of(parameter, 2)
    return component not in ("embedding", "norms") and "embed" not in parameter.rsplit(".", 2)[-2]


def left_out(parameter: str, model_type: str) -> str:
    """Why no adapter of this weight can be run and loaded; empty where one can."""
    if model_type in MAMBA and parameter.endswith(".out_proj.weight"):
        return "fused kernels read it past its module, and PEFT refuses it"
    if parameter.endswith(GROUPED.get(model_type, ())):
        return "it multiplies groups of its input, each by rows of its own, which A and B of one matrix cannot"
    return ""


def matches(pattern: str, parameter: str) -> bool:
    """Whether a pattern names a parameter or its module: whole, as an fnmatch pattern, or as a dotted suffix."""
    module = parameter.removesuffix(".weight")
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in (parameter, module))


def resolve_targets(
    parameter_shapes: dict[str, tuple[int, ...]], lora: LoraSpec, *, model_type: str
) -> tuple[LoraTarget, ...]:
    """Resolve a recipe's targets against a model.

    Args:
        parameter_shapes: the model's parameters, tied ones once.
        lora: what the recipe asks for.
        model_type: the family, which decides the orientation of stacked experts.

    Returns:
        Targets in the model's order, each weight once.

    Raises:
        LegalityError: ``target-matches-nothing``, ``target-left-out``, ``rank-pattern-matches-nothing``,
            ``shared-matches-nothing``, ``router-target``, ``unknown-expert-layout``, ``experts-not-adapted``.
        RecipeError: ``expert-dropout``, ``router-dropout``.
    """
    candidates = {name: shape for name, shape in parameter_shapes.items() if adaptable(name, shape)}
    frozen = {name: why for name in candidates if (why := left_out(name, model_type))}
    candidates = {name: shape for name, shape in candidates.items() if name not in frozen}
    for target in lora.targets:
        _refuse_left_out(target, frozen, candidates)
    why = not_adapted(model_type)
    if why and any(role_of(name, len(shape)) == "experts" for name, shape in parameter_shapes.items()):
        candidates = {name: shape for name, shape in candidates.items() if role_of(name, len(shape)) != "experts"}
        refused = [target for target in lora.targets if _asks_for_experts(target, parameter_shapes)]
        if refused:
            raise LegalityError(
                "experts-not-adapted",
                f"target {refused[0]!r} asks for the routed experts of {model_type}: {why}",
                where="recipe.lora.targets",
                next_action="target attention, dense_mlp, shared_experts or all-linear, whichever the model has",
            )
    chosen: set[str] = set()
    for target in lora.targets:
        chosen |= _matched(target, candidates, lora.allow_router)
    for pattern in lora.rank_pattern:
        if not any(matches(pattern, name) for name in chosen):
            raise LegalityError(
                "rank-pattern-matches-nothing",
                f"rank_pattern {pattern!r} matches none of the {len(chosen)} targets",
                where="recipe.lora.rank_pattern",
                next_action="correct or remove this pattern",
            )
    targets = tuple(_target(name, shape, lora, model_type) for name, shape in candidates.items() if name in chosen)
    stacked = next((target for target in targets if target.kind == "experts"), None)
    if stacked is None and lora.experts == "shared":
        raise LegalityError(
            "shared-matches-nothing",
            f"one adapter for all experts of a block is asked for, and none of the {len(targets)} targets is a stack "
            "of experts",
            where="recipe.lora.experts",
            next_action="add experts to recipe.lora.targets, or set recipe.lora.experts to per_expert",
        )
    router = next((target for target in targets if target.role == "router"), None)
    if router is not None and Decimal(lora.dropout) != 0:
        raise RecipeError(
            "router-dropout",
            f"dropout {lora.dropout} cannot be applied to a router's matrix (first: {router.parameter})",
            where="recipe.lora.dropout",
            next_action="set dropout to 0, or leave the routers frozen",
        )
    if stacked is not None and Decimal(lora.dropout) != 0:
        raise RecipeError(
            "expert-dropout",
            f"dropout {lora.dropout} cannot be applied to stacked experts (first: {stacked.parameter}); "
            "PEFT refuses to load such an adapter",
            where="recipe.lora.dropout",
            next_action="set dropout to 0, or target attention only",
        )
    return targets


def _refuse_left_out(target: str, frozen: dict[str, str], candidates: dict[str, tuple[int, ...]]) -> None:
    """A pattern that names nothing but weights without adapters is told why; a role goes without them."""
    named = [name for name in frozen if matches(target, name)]
    if named and target not in (*ROLES, ALL_LINEAR) and not any(matches(target, name) for name in candidates):
        raise LegalityError(
            "target-left-out",
            f"target {target!r} names {named[0]}: {frozen[named[0]]}",
            where="recipe.lora.targets",
            next_action="remove it; the role it belongs to takes every other matrix of its layer",
        )


def _asks_for_experts(target: str, parameter_shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether a target is the experts' role, or a pattern that names nothing but their parameters."""
    if target in ROLES or target == ALL_LINEAR:
        return target == "experts"
    named = [name for name in parameter_shapes if matches(target, name)]
    return bool(named) and all(role_of(name, len(parameter_shapes[name])) == "experts" for name in named)


def _matched(target: str, candidates: dict[str, tuple[int, ...]], allow_router: bool) -> set[str]:
    roles = {name: role_of(name, len(shape)) for name, shape in candidates.items()}
    if target == ALL_LINEAR:
        found = {name for name in candidates if roles[name] in ALL_LINEAR_ROLES}
    elif target in ROLES:
        found = {name for name in candidates if roles[name] in ROLES[target]}
    else:
        found = {name for name in candidates if matches(target, name)}
    kept = found if allow_router else {name for name in found if roles[name] != "router"}
    if found and not kept:
        raise LegalityError(
            "router-target",
            f"target {target!r} takes only router weights (first: {min(found)})",
            where="recipe.lora.targets",
            next_action="remove it, or set allow_router: true to train the routing on purpose",
        )
    if not kept:
        raise LegalityError(
            "target-matches-nothing",
            f"target {target!r} matches no adaptable parameter{_nearest(target, candidates)}",
            where="recipe.lora.targets",
            next_action=f"use a role ({', '.join((*ROLES, ALL_LINEAR))}) or a pattern on the model's own names",
        )
    return kept


def _nearest(target: str, candidates: dict[str, tuple[int, ...]]) -> str:
    leaves = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in candidates})
    wanted = target.rsplit(".", 1)[-1]
    common = {one: SequenceMatcher(None, wanted, one).find_longest_match().size for one in (*leaves, *ROLES)}
    close = sorted((one for one in common if 2 * common[one] >= len(wanted)), key=lambda one: -common[one])[:3]
    return f"; the nearest names are {', '.join(close)}" if close else f"; its names are {', '.join(leaves[:12])}"


def _target(name: str, shape: tuple[int, ...], lora: LoraSpec, model_type: str) -> LoraTarget:
    rank = next((rank for pattern, rank in lora.rank_pattern.items() if matches(pattern, name)), lora.rank)
    if len(shape) == 3:
        layout = expert_layout(model_type).order
        out_features, in_features = shape[1:] if layout == "out_in" else (shape[2], shape[1])
        kind: Literal["dense", "experts"] = "experts"
    else:
        layout, kind = "out_in", "dense"
        out_features, in_features = shape
    return LoraTarget(
        parameter=name,
        role=role_of(name, len(shape)),
        kind=kind,
        layout=layout,
        in_features=in_features,
        out_features=out_features,
        num_experts=shape[0] if kind == "experts" else 0,
        shared=kind == "experts" and lora.experts == "shared",
        rank=rank,
        alpha=lora.alpha,
        scaling=scaling(lora.alpha, rank, lora.use_rslora),
    )


def scaling(alpha: str, rank: int, use_rslora: bool) -> str:
    """alpha / rank, or alpha / √rank with rank-stabilised LoRA, as decimal text with 17 significant digits.

    The text reads back as exactly the double that PEFT computes.
    """
    value = float(alpha) / (math.sqrt(rank) if use_rslora else rank)
    return format(Decimal(repr(value)), "f")
