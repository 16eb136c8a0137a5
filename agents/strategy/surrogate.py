"""What the trials so far say of plans that were not tried: a Gaussian process over the axes.

Two of them, with one kernel: the logarithm of the step time, and how far a plan is beyond its memory. A plan's promise
is the step time that it is expected to save on the best so far, times the chance that it fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.search_spaces.cost.plans import Array
from shardwright.search_spaces.executable import Value

LENGTHS = (2.0, 4.0, 8.0, 16.0)
"""Distances over which plans are alike, in doublings of one axis; the likeliest is taken."""

OTHER = 2.0
"""Distance, in doublings, of two values that are not numbers."""

NOISE = 1e-3
"""Variance that no axis explains, over that of all trials."""

FITTING = -0.05
"""What a plan that fits stands for in place of its logarithmic excess: recomputation fills memory whatever is left."""

DIGITS = 9
"""Promises are compared to so many decimals: the last ones depend on the machine."""

Point = tuple[Value, ...]
"""One plan: the value of each axis."""


@dataclass(frozen=True)
class Surrogate:
    """Fitted to trials."""

    tried: Sequence[Point]
    length: float
    best: float
    """Logarithm of the best step time that fits; infinite where none does."""
    half: Array
    """Inverse Cholesky factor of the kernel of the trials, [n, n]."""
    means: tuple[float, float]
    scales: tuple[float, float]
    weights: Array
    """[n, 2]: for the step time and for the excess, of standard values."""

    @classmethod
    def of(cls, tried: Sequence[Point], step_ms: Sequence[float], excess: Sequence[float]) -> Surrogate:
        """
        Args:
            excess: memory beyond what a plan may take, over that; at most 0 where it fits.
        """
        over = np.array(excess, dtype=np.float64)
        times = np.log(np.array(step_ms, dtype=np.float64))
        wanted = np.stack([times, np.where(over > 0, np.log1p(np.maximum(over, 0)), FITTING)], axis=1)
        means, scales = wanted.mean(axis=0), np.maximum(wanted.std(axis=0), 1e-6)
        standard = (wanted - means) / scales
        square, fits = squared_distances(tried, tried), over <= 0
        found = [(*_solved(kernel(square, length), standard), length) for length in LENGTHS]
        _, half, weights, length = max(found, key=lambda one: (round(one[0], 6), one[3]))
        best = float(times[fits].min()) if fits.any() else math.inf
        return cls(
            tried, length, best, half, (float(means[0]), float(means[1])), (float(scales[0]), float(scales[1])), weights
        )

    def promise(self, points: Sequence[Point]) -> list[float]:
        """Of each plan, more is better: the logarithm of what it is expected to save, times its chance to fit."""
        near = kernel(squared_distances(points, self.tried), self.length)
        mean = near @ self.weights
        left = 1 - np.sum((self.half @ near.T) ** 2, axis=0)
        deviation = np.sqrt(np.maximum(left, 1e-9))
        found = []
        for (step, over), spread in zip(mean, deviation, strict=True):
            chance = _below((0 - self.means[1]) / self.scales[1], over, spread)
            promise = math.log(max(chance, 1e-300))
            if math.isfinite(self.best):
                promise += math.log(max(_saving((self.best - self.means[0]) / self.scales[0], step, spread), 1e-300))
            found.append(round(promise, DIGITS))
        return found


def squared_distances(one: Sequence[Point], other: Sequence[Point]) -> Array:
    """[one, other]: doublings between numbers, ``OTHER`` between other values that differ, squared and added up."""
    total = np.zeros((len(one), len(other)))
    for left, right in zip(zip(*one, strict=True), zip(*other, strict=True), strict=True):
        if isinstance(left[0], int) and not isinstance(left[0], bool):
            total += (_doublings(left)[:, None] - _doublings(right)[None, :]) ** 2
        else:
            codes = {value: code for code, value in enumerate(dict.fromkeys((*left, *right)))}
            a, b = (np.array([codes[value] for value in values]) for values in (left, right))
            total += OTHER**2 * (a[:, None] != b[None, :])
    return total


def kernel(square: Array, length: float) -> Array:
    """Matérn 5/2: twice differentiable, so slopes carry to neighbours without ringing."""
    reach = np.sqrt(5 * square) / length
    return np.asarray((1 + reach + reach**2 / 3) * np.exp(-reach))


def _doublings(values: Sequence[Value]) -> Array:
    """Of numbers; none counts as half of one."""
    return np.log2(np.maximum(np.array(values, dtype=np.float64), 0.5))


def _solved(alike: Array, standard: Array) -> tuple[float, Array, NDArray[np.float64]]:
    """(log likelihood up to a constant, inverse Cholesky factor, weights)."""
    half = np.linalg.inv(np.linalg.cholesky(alike + NOISE * np.eye(len(alike))))
    whitened = half @ standard
    likelihood = -0.5 * float(np.sum(whitened**2)) + standard.shape[1] * float(np.sum(np.log(np.diag(half))))
    return likelihood, half, half.T @ whitened


def _below(limit: float, mean: float, deviation: float) -> float:
    """Chance that a normal value is at most the limit."""
    return 0.5 * math.erfc((mean - limit) / (deviation * math.sqrt(2)))


def _saving(best: float, mean: float, deviation: float) -> float:
    """How far below the best a normal value is expected, where it is below."""
    z = (best - mean) / deviation
    return deviation * (z * 0.5 * math.erfc(-z / math.sqrt(2)) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
