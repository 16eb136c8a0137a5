"""The comparison that certificates rest on: what differs anywhere, forward or backward, is seen."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from shardwright.agents.structure.differential import compare, float_cases

Tensors = dict[str, torch.Tensor]
CASES = {"one": {"x": torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), "n": torch.tensor([3])}}


def square(values: Tensors) -> Tensors:
    return {"y": values["x"] ** 2, "count": (values["n"] + 1).double()}


def altered(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda values: {**square(values), "y": change(square(values)["y"])}


def test_equal_functions_differ_by_nothing_and_every_number_is_counted() -> None:
    seen = compare(square, lambda v: {"y": v["x"] * v["x"], "count": (v["n"] + 1).double()}, CASES, ("x",))
    assert (seen.error, seen.cases, seen.values) == (0.0, 1, 3 + 1 + 3)


def test_gradients_never_go_untested() -> None:
    with pytest.raises(ValueError, match="untested"):
        compare(square, square, CASES, ())


def test_an_error_is_relative_to_the_largest_expected_value() -> None:
    """0.5 at a value of 1, where the largest is 16."""
    seen = compare(altered(lambda y: y + torch.tensor([0.5, 0, 0])), square, CASES, ("x",))
    assert seen.error == 0.5 / 16 and seen.where == "y, case one"


def test_the_largest_error_of_all_cases_stands() -> None:
    more = {**CASES, "two": {"x": torch.tensor([3.0], dtype=torch.float64), "n": torch.tensor([0])}}
    seen = compare(altered(lambda y: y * 1.5), square, more, ("x",))
    assert seen.error == 0.5 and seen.cases == 2 and seen.values == 3 + 1 + 3 + 1 + 1 + 1


def test_a_wrong_gradient_is_seen_where_the_value_is_right() -> None:
    seen = compare(altered(lambda y: y.detach() + y - y.detach() * 1 + (y - y.detach())), square, CASES, ("x",))
    assert seen.error == pytest.approx(1.0) and seen.where == "gradient of x, case one"


def test_gradients_that_only_add_up_to_the_same_are_seen() -> None:
    """Each output's gradient goes to its neighbour's input: a cotangent of ones would not tell."""

    def through(turned: int) -> Callable[[Tensors], Tensors]:
        return lambda v: {"y": v["x"].detach() ** 2 + (v["x"] - v["x"].detach()).roll(turned)}

    assert compare(through(1), through(0), CASES, ("x",)).where == "gradient of x, case one"


def test_nothing_differs_by_nothing() -> None:
    empty = {"none": {"x": torch.zeros(0, 4, dtype=torch.float64), "n": torch.tensor([3])}}
    assert compare(square, square, empty, ("x",)).error == 0.0


@pytest.mark.parametrize(
    "change",
    [
        lambda y: torch.where(y == 4, math.nan, y),
        lambda y: torch.where(y == 4, math.inf, y),
        lambda y: y[:2],
    ],
)
def test_what_is_not_finite_or_of_another_shape_is_infinitely_wrong(change: Callable[..., torch.Tensor]) -> None:
    assert compare(altered(change), square, CASES, ("x",)).error == math.inf


def test_values_that_are_not_finite_on_both_sides_are_alike() -> None:
    def holed(values: Tensors) -> Tensors:
        return {"y": torch.where(values["x"] == 2, math.inf, values["x"])}

    assert compare(holed, holed, CASES, ("x",)).error == 0.0


@pytest.mark.parametrize("role", ["count", "more"])
def test_results_of_other_names_are_refused(role: str) -> None:
    def other(values: Tensors) -> Tensors:
        found = square(values)
        return {name: value for name, value in found.items() if name != role} | (
            {"more": found["y"]} if role == "more" else {}
        )

    for pair in ((square, other), (other, square)):
        with pytest.raises(ValueError, match="results"):
            compare(*pair, CASES, ("x",))


def test_inputs_are_never_modified() -> None:
    def in_place(values: Tensors) -> Tensors:
        values["n"].add_(1)
        return {"y": values["x"] * values["n"]}

    before = {role: tensor.clone() for role, tensor in CASES["one"].items()}
    assert compare(in_place, in_place, CASES, ("x",)).error == 0.0
    assert all(torch.equal(before[role], CASES["one"][role]) for role in before)


def test_cases_hold_what_breaks_a_formula() -> None:
    shapes = {"x": (2, 3, 4), "matrix": (3, 4), "weight": (4,)}
    cases = float_cases(shapes, seed=7, strided=("x",))
    assert list(cases) == ["normal", "zero-row", "huge-row", "tiny", "one-hot", "non-contiguous"]
    assert all(cases[name][role].shape == shape for name in cases for role, shape in shapes.items())
    assert not cases["zero-row"]["x"][0, 0].any() and cases["zero-row"]["x"][0, 1].all()
    assert cases["huge-row"]["x"][0, 0].abs().max() > 1e3 > cases["huge-row"]["x"][0, 1:].abs().max()
    assert all(0 < cases["tiny"][role].abs().max() < 1e-5 for role in ("x", "matrix"))
    assert cases["tiny"]["weight"].abs().max() > 1e-2
    assert torch.equal(cases["one-hot"]["x"][1, 2], torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    assert not cases["non-contiguous"]["x"].is_contiguous() and cases["non-contiguous"]["weight"].is_contiguous()
    again = float_cases(shapes, seed=7, strided=("x",))
    assert all(torch.equal(cases[name][role], again[name][role]) for name in cases for role in shapes)
