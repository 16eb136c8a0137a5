"""Whether a strategy can run at all: every broken rule with its name and the nearest legal values."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces import executable
from shardwright.search_spaces.axes import AXES, checkpointed_layers
from shardwright.search_spaces.axes.base import Violation
from shardwright.search_spaces.axes.cp import degrees
from shardwright.search_spaces.axes.ep import legal_degrees
from shardwright.search_spaces.context import SearchContext, divisors, nearest

__all__ = ["Violation", "recipe_violations", "refuse", "violations"]

GROUPED_GEMM_MULTIPLE = {"bfloat16": 8, "float32": 4}
"""Row strides of a grouped product are multiples of 16 bytes."""

BATCH_RULE = "global-batch"
"""Of a recipe: what a search can divide. A plan that cuts sequences has fewer data ranks; its own batch is judged."""

PACKED_BLOCK = {"mxfp4": 32, "gpt-oss-mxfp4": 32, "fp8-block": 128, "int4-group": 32}
"""Values that share one scale along the contracted dim, where the checkpoint does not say."""


def violations(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    *,
    explore: bool = False,
) -> tuple[Violation, ...]:
    """Every rule this strategy breaks; empty where it is legal.

    Args:
        explore: admit axis values and base formats that the runtime does not run.
    """
    return violations_in(SearchContext(profile, recipe, cluster, explore), strategy)


def violations_in(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    """``violations`` on a context that is kept between plans, with its load profile."""
    found = list(_mesh_covers_world(context, strategy))
    found += checkpointed_layers.check(context, strategy)
    for axis in AXES:
        found += axis.check(context, strategy)
        value = axis.read(strategy)
        if not context.admits(axis.name, value):
            found.append(
                Violation(
                    rule="runtime-runs-it",
                    message=f"{axis.name} = {value}: the runtime does not run this value",
                    nearest_legal=tuple(str(v) for v in executable.EXECUTABLE[axis.name].values),
                )
            )
    of_recipe = recipe_violations(context)
    if strategy.mesh.cp > 1:
        of_recipe = tuple(one for one in of_recipe if one.rule != BATCH_RULE)
    return (*found, *of_recipe)


def recipe_violations(context: SearchContext) -> tuple[Violation, ...]:
    """Rules that hold or fail whatever the strategy."""
    return tuple(violation for rule in RECIPE_RULES for violation in rule(context))


def refuse(context: SearchContext) -> LegalityError:
    """The error for a recipe, model and cluster that no strategy suits."""
    found = recipe_violations(context)
    if not found:
        shard = Mesh(shard=context.world)
        found = violations(
            context.profile,
            context.recipe,
            context.cluster,
            ParallelStrategy(mesh=shard),
            explore=context.explore,
        )
    rules = "; ".join(f"{v.rule}: {v.message}" for v in found) or "no axis value can be completed"
    legal = "; ".join(dict.fromkeys(value for v in found for value in v.nearest_legal))
    return LegalityError(
        found[0].rule if found else "no-legal-strategy",
        rules,
        where=f"recipe {context.recipe.name!r} on cluster {context.cluster.name!r}",
        next_action=f"use {legal}" if legal else "choose a cluster or batch that divides",
    )


def _mesh_covers_world(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    mesh, world = strategy.mesh, context.world
    if mesh.world_size == world:
        return ()
    legal = tuple(
        f"shard{world // ep}·ep{ep}" for ep in map(int, nearest(legal_degrees(context, world), mesh.ep)) if ep <= world
    )
    divides = "" if world % mesh.ep == 0 else f"; ep {mesh.ep} must divide {world}"
    return (
        Violation(
            rule="mesh-covers-world",
            message=f"{mesh.text()} is a mesh of {mesh.world_size} ranks; the cluster has {world}{divides}",
            nearest_legal=legal,
        ),
    )


def _expert_dropout(context: SearchContext) -> tuple[Violation, ...]:
    dropout = context.recipe.lora.dropout
    if not context.adapts_experts or float(dropout) == 0:
        return ()
    return (
        Violation(
            rule="expert-dropout",
            message=f"lora.dropout {dropout} with expert targets: adapters on fused expert stacks have no dropout",
            nearest_legal=("lora.dropout = 0",),
        ),
    )


def _grouped_gemm_alignment(context: SearchContext) -> tuple[Violation, ...]:
    """K, N and rank of a grouped product: multiples of 8 in bf16, of 4 in fp32."""
    if context.experts == 0 or not context.profile.shape.expert_stacks:
        return ()
    dtype = context.recipe.precision.base
    step = GROUPED_GEMM_MULTIPLE[dtype]
    shape, lora = context.profile.shape, context.recipe.lora
    sizes = {"hidden_size": shape.hidden_size, "expert_intermediate_size": shape.expert_intermediate_size}
    if context.adapts_experts:
        sizes["lora.rank"] = lora.rank
        sizes |= {f"lora.rank_pattern[{k!r}]": rank for k, rank in lora.rank_pattern.items() if "expert" in k}
    return tuple(
        Violation(
            rule="grouped-gemm-alignment",
            message=f"{name} {size} is not a multiple of {step}, which a {dtype} grouped product needs",
            nearest_legal=tuple(f"{name} = {value}" for value in _multiples_around(size, step)),
        )
        for name, size in sizes.items()
        if size % step
    )


def _packed_alignment(context: SearchContext) -> tuple[Violation, ...]:
    """Contracted dims of packed experts are whole blocks."""
    shape = context.profile.shape
    found = []
    for packing in context.profile.packing:
        block = PACKED_BLOCK.get(packing.format)
        if block is None or context.experts == 0:
            continue
        block = packing.block[-1] if packing.block else block
        for name, size in (
            ("hidden_size", shape.hidden_size),
            ("expert_intermediate_size", shape.expert_intermediate_size),
        ):
            if size % block:
                found.append(
                    Violation(
                        rule="packed-block-alignment",
                        message=f"{name} {size} is not a multiple of {block}, the block of {packing.format}",
                        nearest_legal=(f"{name} = {-(-size // block) * block}", "precision bfloat16"),
                    )
                )
    return tuple(found)


def _base_packing_runs(context: SearchContext) -> tuple[Violation, ...]:
    if context.explore:
        return ()
    formats = sorted({packing.format for packing in context.profile.packing} - set(executable.BASE_PACKINGS))
    return tuple(
        Violation(
            rule="base-packing-runs",
            message=f"the base is stored as {name}: the runtime does not load this format",
            nearest_legal=tuple(executable.BASE_PACKINGS),
        )
        for name in formats
    )


def _batch_covers_world(context: SearchContext) -> tuple[Violation, ...]:
    """Every rank reads its own data, so the batch is a multiple of the data ranks; fewer where sequences are cut.

    In the explored space tensor, context and pipeline parallelism leave fewer of them: its axes decide there.
    """
    world, batch = context.world, context.global_batch
    if context.explore or any(batch % (world // cp) == 0 for cp in degrees(context, world)):
        return ()
    around = [value for value in (batch // world * world, -(-batch // world) * world) if value]
    return (
        Violation(
            rule=BATCH_RULE,
            message=f"{batch} sequences do not divide over {world} data ranks",
            nearest_legal=(
                *(f"global_batch_sequences = {value}" for value in around),
                f"a cluster of {', '.join(nearest(divisors(batch), world))} ranks",
            ),
        ),
    )


def _images_need_a_tower(context: SearchContext) -> tuple[Violation, ...]:
    """Images go through a vision tower, which the checkpoint holds or does not."""
    field = context.recipe.data.images_field
    if not field or context.profile.parameters.by_component.get("vision", 0):
        return ()
    return (
        Violation(
            rule="images-without-vision-tower",
            message=f"data.images_field is {field!r}, and the checkpoint has no vision tower",
            nearest_legal=("data.images_field = (empty)",),
        ),
    )


def _sequence_within_context(context: SearchContext) -> tuple[Violation, ...]:
    """No sequence is longer than the context that the checkpoint states; one that states none has no limit."""
    tokens, most = context.sequence_tokens, context.profile.shape.max_position_tokens
    if not most or tokens <= most:
        return ()
    return (
        Violation(
            rule="sequence-past-context",
            message=f"sequences of {tokens} tokens; the checkpoint's context is {most}",
            nearest_legal=(f"batch.sequence_tokens = {most}",),
        ),
    )


def _multiples_around(size: int, step: int) -> tuple[int, ...]:
    return tuple(value for value in (size // step * step, -(-size // step) * step) if value)


RECIPE_RULES: tuple[Callable[[SearchContext], tuple[Violation, ...]], ...] = (
    _expert_dropout,
    _grouped_gemm_alignment,
    _packed_alignment,
    _base_packing_runs,
    _batch_covers_world,
    _images_need_a_tower,
    _sequence_within_context,
)
