"""The experts' own class as a witness: its loop over experts against the pattern's formula, on real fp64 weights.

What a worker trains is the class; what the pattern matches is the batched spelling that the capture chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.agents.structure.capture import EXPERT_VALUES
from shardwright.agents.structure.differential import TOLERANCE, compare
from shardwright.agents.structure.interpret import KeepFp64, Sizes
from shardwright.agents.structure.patterns.base import Match, Tensors
from shardwright.agents.structure.patterns.experts_kernels import DOWN


def own_loop_agrees(
    match: Match,
    sizes: Sizes,
    cases: dict[str, Tensors],
    oracle: Callable[[Tensors], Tensors],
    trained: tuple[str, ...],
) -> str:
    """What was compared, in words.

    Args:
        sizes: of the cases.
        trained: roles whose gradients are compared.

    Raises:
        ArithmeticError: the loop computes something else.
    """
    module = match.captured.module
    stacks, experts = tuple(match.parameters), match.constants["experts"]

    def loop(values: Tensors) -> Tensors:
        given = {name: values[name] for name in stacks}
        with _eager(module), KeepFp64(), _narrow(module, values[DOWN], match.constants["transposed"]):
            return {"y": torch.func.functional_call(module, given, tuple(values[v] for v in EXPERT_VALUES))}

    try:
        seen = compare(loop, oracle, cases, trained)
    except (IndexError, RuntimeError):
        if sizes.of(experts) == experts:
            raise
        cases = {name: _kept_experts(case, experts, stacks) for name, case in cases.items()}
        seen = compare(loop, oracle, cases, trained)
    if seen.error > TOLERANCE:
        raise ArithmeticError(f"the class's own loop differs by {seen.error:.1e} at {seen.where}")
    return f"; the class's own loop over experts too ({seen.values} numbers, {seen.error:.0e})"


def _kept_experts(case: Tensors, experts: int, stacks: tuple[str, ...]) -> Tensors:
    """Stacks of the true number of experts: a class may look at each of them by its number."""
    return {
        name: torch.cat([v] * (experts // v.shape[0] + 1))[:experts].contiguous() if name in stacks else v
        for name, v in case.items()
    }


@contextmanager
def _narrow(module: nn.Module, down: torch.Tensor, transposed: bool) -> Iterator[None]:
    """Widths that a class keeps as plain numbers, set to those of the test's small stacks inside the block."""
    one, other = down.shape[1:]
    hidden, width = (other, one) if transposed else (one, other)
    sizes = {"hidden_size": hidden, "hidden_dim": hidden, "intermediate_size": width, "intermediate_dim": width}
    held: dict[str, Any] = {n: module.__dict__[n] for n in sizes if isinstance(module.__dict__.get(n), int)}
    module.__dict__.update({name: sizes[name] for name in held})
    try:
        yield
    finally:
        module.__dict__.update(held)


@contextmanager
def _eager(module: nn.Module) -> Iterator[None]:
    """The class's own loop, chosen on its config inside the block."""
    config: Any = getattr(module, "config", None)
    if config is None:
        yield
        return
    before = getattr(config, "_experts_implementation_internal", None)
    config._experts_implementation_internal = "eager"
    try:
        yield
    finally:
        config._experts_implementation_internal = before
