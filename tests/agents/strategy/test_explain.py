"""The plan's story in sentences."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from shardwright.agents.strategy.run import SearchResult, run_search
from shardwright.agents.strategy.words import gib, milliseconds, term
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.space import legal_strategies

Search = Callable[..., SearchResult]


def test_the_story_names_what_fills_memory_and_what_bounds_the_step(search: Search) -> None:
    result = search("qwen3_30b", "h200-8", batch=64, tokens=4096)
    story = " ".join(result.explanation)
    memory = result.cost.memory
    alive = [c for c in memory.components if memory.peak_moment in c.moments]
    fullest = max(alive, key=lambda c: c.bytes)
    assert f"{term(fullest.name)} {gib(fullest.bytes)}" in story
    assert f"bound by {term(result.cost.time.bound_by)}" in story
    assert f"All {result.record.legal_strategies:,} legal strategies" in story
    assert result.best.text() in result.explanation[0]
    fastest = min(result.alternatives, key=lambda one: (not one.feasible, one.step_ms))
    assert fastest.strategy.text() in story


def test_the_numbers_of_the_story_are_the_reports(search: Search) -> None:
    result = search("smol", "cpu-2", tokens=256, base="float32")
    percent = int(re.search(r"a rank \((\d+)%\)", result.explanation[1]).group(1))  # type: ignore[union-attr]
    assert percent == round(100 * result.cost.memory.fraction)
    assert milliseconds(result.cost.time.step_ms) in result.explanation[2]


def test_one_rank_neither_gathers_nor_waits(search: Search) -> None:
    result = search("qwen3_30b", "h200-1", batch=4, tokens=2048)
    assert "gathers nothing" in result.explanation[0] and "drops gathered" not in result.explanation[0]
    assert "no rank waits for another" in " ".join(result.explanation)
    several = search("qwen3_30b", "h200-8", batch=64, tokens=4096)
    assert "communication that nothing hides" in " ".join(several.explanation)


def test_a_plan_without_margin_says_so(build: SimpleNamespace, tmp_path: Path) -> None:
    """A budget of 1.03 times the leanest plan: it fits, and no plan keeps 5% free."""
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=8), build.load_cluster("h200-8")
    work = workload(profile, recipe, ())
    lean = min(price(work, cluster, s).memory.reserved_bytes for s in legal_strategies(profile, recipe, cluster))
    tight = build.with_memory(cluster, int(1.03 * lean))
    result = run_search(profile, recipe, tight, (), trials=2, seed=0, journal=tmp_path / "journal")
    assert any("safety margin of 5%" in sentence for sentence in result.explanation)
    assert result.cost.memory.reserved_bytes == lean
    roomy = run_search(profile, recipe, cluster, (), trials=2, seed=0, journal=tmp_path / "roomy")
    assert not any("safety margin of 5%" in sentence for sentence in roomy.explanation)


def test_words() -> None:
    assert gib(2**30) == "1.00 GiB" and gib(2**20) == "1.0 MiB"
    assert milliseconds(12_345) == "12.35 s" and milliseconds(2.5) == "2.5 ms"
    assert term("dispatch_buffers") == "expert dispatch buffers" and term("some_new_term") == "some new term"
