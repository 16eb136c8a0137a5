"""The differential test: a region and an independent formula, forward and backward in fp64, on adversarial inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

TOLERANCE = 1e-9
"""Largest error allowed in fp64, relative to the largest magnitude of the expected value."""

Function = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Comparison:
    """The worst case of one differential test."""

    error: float
    """Relative to the largest expected magnitude; infinite where finite and non-finite disagree."""
    where: str
    cases: int
    values: int
    """Compared numbers, forward and backward."""


def compare(
    region: Function, oracle: Function, cases: dict[str, dict[str, torch.Tensor]], trainable: tuple[str, ...]
) -> Comparison:
    """Run both functions on every case; compare results and gradients of the trainable inputs.

    Args:
        cases: name → tensors by role (fp64 or integer), never modified.
        trainable: roles whose gradients are compared, one at least.

    Raises:
        ValueError: no role is trainable, or the functions do not give the same results by name.
    """
    if not trainable:
        raise ValueError("no role is trainable: gradients would go untested")
    worst, where, values = 0.0, "nowhere", 0
    for name, tensors in cases.items():
        seen = _run(region, tensors, trainable, name)
        expected = _run(oracle, tensors, trainable, name)
        if seen.keys() != expected.keys():
            raise ValueError(f"results {sorted(seen)} against {sorted(expected)}")
        for role, value in expected.items():
            values += value.numel()
            error = _error(seen[role], value)
            if error > worst:
                worst, where = error, f"{role}, case {name}"
    return Comparison(worst, where, len(cases), values)


def _run(
    function: Function, tensors: dict[str, torch.Tensor], trainable: tuple[str, ...], seed_text: str
) -> dict[str, torch.Tensor]:
    """Results and gradients under a fixed random cotangent, the same for both functions."""
    leaves = {role: _fresh(t).requires_grad_(role in trainable) for role, t in tensors.items()}
    results = function(leaves)
    generator = torch.Generator().manual_seed(len(seed_text) * 1009 + sum(map(ord, seed_text)))
    total = torch.zeros((), dtype=torch.float64)
    for role in sorted(results):
        value = results[role]
        cotangent = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        total = total + (value * cotangent).sum()
    gradients = torch.autograd.grad(total, [leaves[r] for r in trainable], allow_unused=False)
    found = {role: value.detach() for role, value in results.items()}
    return found | {f"gradient of {r}": g for r, g in zip(trainable, gradients, strict=True)}


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, so that non-contiguous cases stay so."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def _error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    if seen.shape != expected.shape:
        return float("inf")
    if not torch.equal(torch.isfinite(seen), torch.isfinite(expected)):
        return float("inf")
    if not expected.numel():
        return 0.0
    mask = torch.isfinite(expected)
    if not bool(mask.any()):
        return 0.0
    scale = float(expected[mask].abs().max())
    return float((seen - expected)[mask].abs().max()) / max(scale, 1e-300)


def float_cases(
    shapes: dict[str, tuple[int, ...]], seed: int, *, strided: tuple[str, ...] = ()
) -> dict[str, dict[str, torch.Tensor]]:
    """Adversarial floating inputs: normal, zero rows, one huge row, tiny, one-hot rows, and non-contiguous."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> dict[str, torch.Tensor]:
        return {r: torch.randn(s, generator=generator, dtype=torch.float64) for r, s in shapes.items()}

    cases = {"normal": normal(), "zero-row": normal(), "huge-row": normal(), "tiny": normal(), "one-hot": normal()}
    for role, shape in shapes.items():
        if len(shape) < 2:
            continue
        cases["zero-row"][role].view(-1, shape[-1])[0] = 0
        cases["huge-row"][role].view(-1, shape[-1])[0] *= 1e4
        cases["tiny"][role] *= 1e-7
        cases["one-hot"][role].view(-1, shape[-1])[1:] = 0
        cases["one-hot"][role].view(-1, shape[-1])[1:, 0] = 1
    if strided:
        cases["non-contiguous"] = normal()
        for role in strided:
            value = cases["non-contiguous"][role]
            wide = torch.zeros((*value.shape[:-1], 2 * value.shape[-1]), dtype=value.dtype)
            cases["non-contiguous"][role] = wide[..., ::2].copy_(value)
    return cases
