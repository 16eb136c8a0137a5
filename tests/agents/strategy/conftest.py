"""The profile builders of the search-space tests, under the same fixture."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright.agents.strategy.run import SearchResult, run_search

BUILDERS = Path(__file__).resolve().parents[2] / "search_spaces" / "conftest.py"


@pytest.fixture(scope="session")
def build() -> SimpleNamespace:
    spec = importlib.util.spec_from_file_location("search_space_builders", BUILDERS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(**{name: value for name, value in vars(module).items() if not name.startswith("_")})


@pytest.fixture
def search(build: SimpleNamespace, tmp_path: Path) -> Callable[..., SearchResult]:
    """Search one of the known models; every call gets its own journal unless it names one."""
    calls = iter(range(1000))

    def run(
        model: str,
        cluster: str,
        *,
        batch: int = 8,
        tokens: int = 512,
        base: str = "bfloat16",
        trials: int = 16,
        seed: int = 0,
        journal: Path | None = None,
    ) -> SearchResult:
        profile = getattr(build, model)()
        return run_search(
            profile,
            build.recipe_of(batch=batch, tokens=tokens, base=base),
            build.load_cluster(cluster),
            build.targets_of(profile, rank=8),
            trials=trials,
            seed=seed,
            journal=journal or tmp_path / f"{next(calls)}.journal",
        )

    return run
