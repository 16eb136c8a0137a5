"""Tables of different rooms that name the same things: what one promises, another holds.

``agents`` and ``runtime`` never import each other, so neither can look for itself.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="fused forwards name triton kernels")

from shardwright.agents.structure.patterns import PATTERNS
from shardwright.agents.structure.patterns.base import Pattern
from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.fuse import OPERATOR_FORWARDS
from shardwright.search_spaces import executable

CONTRACTS = Path(__file__).parent / "agents" / "structure"


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_what_a_plan_may_choose_can_be_installed(pattern: Pattern) -> None:
    """Otherwise workers refuse a plan that was approved."""
    for variant in pattern.variants():
        if variant.provider == "shardwright":
            assert variant.op in OPERATORS
        if not variant.not_installable:
            assert variant.provider in ("eager", "compile") or variant.op in OPERATOR_FORWARDS, variant.name


def test_every_installed_operator_is_offered_by_a_pattern() -> None:
    offered = {variant.op for pattern in PATTERNS for variant in pattern.variants() if not variant.not_installable}
    assert set(OPERATOR_FORWARDS) <= offered
    assert set(OPERATOR_FORWARDS) <= set(OPERATORS)


def test_every_pattern_is_held_to_the_contract() -> None:
    """Some test class of ``PatternContract`` names it as its ``pattern``."""
    held = {
        node.value.func.id
        for path in CONTRACTS.glob("test_pattern_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and [getattr(target, "id", "") for target in node.targets] == ["pattern"]
    }
    assert {type(pattern).__name__ for pattern in PATTERNS} == held


def test_operators_that_run_on_cut_sequences_exist() -> None:
    assert set(OPERATORS) >= executable.CONTEXT_OPERATORS
