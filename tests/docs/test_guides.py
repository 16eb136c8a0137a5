"""Every command of the user guide is run as it stands; the reference is what the program says; links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
TRAINS = {"adapt", "ci"}
"""Guides that train; they take longer than 20 s."""


def scripts(text: str) -> list[str]:
    """The shell blocks of a page, in order."""
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "guide",
    [pytest.param(g, id=g.stem, marks=[pytest.mark.slow] if g.stem in TRAINS else []) for g in GUIDES],
)
def test_every_command_of_a_guide_runs(guide: Path, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, words in (
        ("shardwright", f"{sys.executable} -m shardwright.workflows.cli.main"),
        ("python", sys.executable),
    ):
        (commands / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (commands / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    blocks = scripts(guide.read_text())
    assert blocks, "a guide without a command"
    script = "set -euo pipefail\n" + "\n".join(blocks)
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["SHARDWRIGHT_CACHE"] = str(tmp_path / "cache")
    command = ["timeout", "-k", "5", "500", "bash", "--noprofile", "--norc", "-c", script]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli", "schemas"])
def test_the_reference_is_current(name: str) -> None:
    made = generator()
    wanted = made.cli_reference() if name == "cli" else made.schema_reference()
    found = (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    assert found == wanted, "run `python docs/generate_reference.py`"


def test_the_readmes_measurements_are_those_of_the_results() -> None:
    text = generator().README.read_text(encoding="utf-8")
    assert text == generator().readme(), "run `python docs/generate_reference.py`"
    assert text.count("| ×") == len(generator().MEASURED)


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
