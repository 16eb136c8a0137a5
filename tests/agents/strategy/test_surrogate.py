"""The model of the trials: its numbers from the textbook's formulas, its promises where the answer is plain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.agents.strategy.surrogate import LENGTHS, NOISE, Point, Surrogate, squared_distances

POINTS: list[Point] = [
    (1, True, "a"),
    (2, True, "a"),
    (8, False, "a"),
    (4, True, "b"),
    (16, False, "b"),
    (1, False, "c"),
]
STEPS = [100.0, 90.0, 60.0, 80.0, 40.0, 120.0]
EXCESS = [-0.3, -0.1, 0.0, -0.2, 0.5, 1.5]


def test_distances_count_doublings_and_other_values() -> None:
    """1 → 8 are three doublings, none → 1 is one, and any two values that are not numbers are two apart."""
    found = squared_distances([(1, 0, True, "a")], [(8, 0, True, "a"), (1, 1, True, "a"), (2, 4, False, "b")])
    assert found.tolist() == [[9.0, 1.0, 1.0 + 9.0 + 4.0 + 4.0]]


def textbook(length: float, unknown: Point) -> tuple[float, np.ndarray, float]:
    """(log likelihood, mean of both, deviation), by the inverse and the determinant of the whole kernel."""

    def alike(one: Point, other: Point) -> float:
        square = math.log2(one[0] / other[0]) ** 2 + 4 * (one[1] != other[1]) + 4 * (one[2] != other[2])
        reach = math.sqrt(5 * square) / length
        return (1 + reach + reach * reach / 3) * math.exp(-reach)

    kernel = np.array([[alike(a, b) for b in POINTS] for a in POINTS]) + NOISE * np.eye(len(POINTS))
    wanted = np.array([[math.log(s), math.log(1 + e) if e > 0 else -0.05] for s, e in zip(STEPS, EXCESS, strict=True)])
    standard = (wanted - wanted.mean(axis=0)) / wanted.std(axis=0)
    inverse, near = np.linalg.inv(kernel), np.array([alike(unknown, b) for b in POINTS])
    likelihood = -0.5 * np.trace(standard.T @ inverse @ standard) - math.log(np.linalg.det(kernel))
    mean = wanted.mean(axis=0) + wanted.std(axis=0) * (near @ inverse @ standard)
    return float(likelihood), mean, math.sqrt(1 - near @ inverse @ near)


@pytest.mark.parametrize("unknown", [(4, False, "a"), (2, False, "b"), (32, True, "c")])
def test_a_promise_is_the_expected_saving_times_the_chance_to_fit(unknown: Point) -> None:
    """Both integrals by sums over the normal density."""
    model = Surrogate.of(POINTS, STEPS, EXCESS)
    assert model.length == max(LENGTHS, key=lambda length: textbook(length, unknown)[0])
    _, mean, deviation = textbook(model.length, unknown)
    z = np.linspace(-9, 9, 400_001)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    over = np.array([math.log(1 + e) if e > 0 else -0.05 for e in EXCESS])
    steps = np.log(STEPS)
    best = math.log(min(s for s, e in zip(STEPS, EXCESS, strict=True) if e <= 0))
    saving = float(np.sum(np.maximum(best - (mean[0] + deviation * steps.std() * z), 0) / steps.std() * density))
    chance = float(np.sum((mean[1] + deviation * over.std() * z <= 0) * density))
    assert model.promise([unknown])[0] == pytest.approx(math.log(saving) + math.log(chance), rel=1e-3)


def test_what_is_faster_and_fits_promises_most() -> None:
    """Two axes: doubling the first halves the step, doubling the second takes memory."""
    tried: list[Point] = [(2**a, 2**b) for a in range(4) for b in range(4) if (a, b) != (3, 0)]
    model = Surrogate.of(tried, [1000 / one[0] for one in tried], [one[1] / 4 - 1 for one in tried])
    wanted, slow, full = model.promise([(16, 1), (1, 1), (16, 16)])
    assert wanted > slow and wanted > full


def test_where_nothing_fits_the_leanest_promises_most() -> None:
    tried: list[Point] = [(1,), (2,), (4,)]
    model = Surrogate.of(tried, [1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    promises = model.promise([(8,), (1,), (2,)])
    assert promises[0] == max(promises) and math.isinf(model.best)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), st.booleans(), st.sampled_from("abc")), min_size=1, max_size=30)
)
def test_every_set_of_trials_has_a_model(tried: list[Point]) -> None:
    """Also one trial, equal values and plans tried twice."""
    steps = [1.0 + sum(map(len, map(str, point))) for point in tried]
    model = Surrogate.of(tried, steps, [steps[0] - step for step in steps])
    promises = model.promise(POINTS)
    assert all(map(math.isfinite, promises)) and promises == Surrogate.of(
        tried, steps, [steps[0] - step for step in steps]
    ).promise(POINTS)
