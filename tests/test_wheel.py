"""The wheel holds every room whole, and the console script starts from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("schemas", "checkpoints", "kernels", "search_spaces", "agents", "runtime", "workflows")
DATA = (".json", ".yaml", ".html", ".css", ".js", ".typed")


def test_wheel_holds_every_source_and_data_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", *ROOMS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"shardwright/{path.relative_to(ROOT)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", *DATA) and "__pycache__" not in path.parts
    }
    assert expected - packed == set()
    assert "shardwright/py.typed" in packed
    assert any(name.endswith("entry_points.txt") for name in packed)
