"""Context parallelism: a sequence is cut into 2·cp pieces, so that causal work is even.

A search takes degrees above 1 into account for long sequences only: below them ranks that read different sequences do
the same work without passing keys and states on. A plan that names one, made or edited, is legal at any length.
"""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces import executable
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext, divisors, nearest

LONG_TOKENS = 32_768
"""Sequences that a search may cut."""


def degrees(context: SearchContext, ranks: int) -> tuple[int, ...]:
    """Degrees that a search considers: the ring of keys and values stays off the network cards.

    Where the runtime runs them, for long sequences, they may cross: latents and states are small.
    """
    cuttable = context.explore or (context.sequence_tokens >= LONG_TOKENS and not whole_only(context))
    if not cuttable:
        return (1,)
    most = context.domain if context.explore and context.sequence_tokens < LONG_TOKENS else ranks
    return tuple(d for d in divisors(ranks) if d == 1 or (d <= most and context.sequence_tokens % (2 * d) == 0))


def whole_only(context: SearchContext) -> tuple[Violation, ...]:
    """Why this model or recipe runs on whole sequences only; empty where it may be cut."""
    found: list[tuple[str, str]] = []
    family = context.profile.model_type.removesuffix("_text")
    for kind in context.profile.layer_kinds:
        if kind.attention not in executable.CONTEXT_ATTENTION:
            found.append(("context-layer", f"layers {kind.name}: {kind.attention} attention runs on whole sequences"))
        elif family not in executable.CONTEXT_FAMILIES and kind.attention != "none":
            known = ", ".join(executable.CONTEXT_FAMILIES)
            what = f"layers {kind.name} of {family}: cut sequences are proved for {known}"
            found.append(("context-layer", what))
    if context.recipe.data.images_field:
        found.append(("context-images", "an image's patches would lie on several ranks"))
    if context.recipe.balance.active:
        found.append(("context-balance", "a balancing loss needs the shares of whole micro-batches and sequences"))
    return tuple(Violation(rule=rule, message=what, nearest_legal=("cp = 1",)) for rule, what in found)


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return degrees(context, context.world // draws["pp"])


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    cp, tokens = strategy.mesh.cp, context.sequence_tokens
    if cp == 1:
        return ()
    found = () if context.explore else whole_only(context)
    if tokens % (2 * cp) == 0:
        return found
    legal = tuple(d for d in divisors(tokens) if tokens % (2 * d) == 0) or (1,)
    uneven = Violation(
        rule="sequence-divides",
        message=f"{tokens} tokens do not divide into 2·cp = {2 * cp} pieces",
        nearest_legal=nearest(legal, cp),
    )
    return (*found, uneven)


AXIS = Axis("cp", _choices, lambda s: s.mesh.cp, _check)
