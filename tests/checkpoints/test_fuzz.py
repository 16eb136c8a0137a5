"""A slice of the readers' fuzz run: nothing but the typed error, and the same inputs every time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "fuzz_readers.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_readers", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_changed_checkpoints_are_accepted_or_refused_with_the_typed_error(fuzz: ModuleType) -> None:
    result = fuzz.run(500)
    assert sum(result["outcomes"].values()) == 500
    assert len(result["outcomes"]) >= 6, "the changes must reach several checks"


def test_the_sound_checkpoint_that_inputs_start_from_is_accepted(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "change", lambda value, draw: value)
    monkeypatch.setattr(fuzz, "scramble", lambda data, draw: data)
    sound = 0
    for number in range(40):
        fuzz.write_input(tmp_path, number)
        sound += fuzz.outcome(tmp_path) == "accepted"
    assert sound >= 20


def test_inputs_are_made_again_from_their_number(fuzz: ModuleType, tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        fuzz.write_input(folder, 1234)
    one, two = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (tmp_path / "one", tmp_path / "two"))
    assert one == two
