"""Rooms import only lower floors, by their full names, and keep heavy libraries out of low floors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOOR = {
    "schemas": 0,
    "checkpoints": 1,
    "kernels": 1,
    "search_spaces": 2,
    "agents": 3,
    "runtime": 3,
    "workflows": 4,
}

BANNED_LIBRARIES = {
    "schemas": {"torch", "transformers", "triton", "langgraph", "optuna", "openai"},
    "checkpoints": {"langgraph", "optuna", "openai", "triton"},
    "kernels": {"langgraph", "optuna", "openai", "transformers", "peft"},
    "search_spaces": {"torch", "transformers", "triton", "langgraph", "optuna", "openai"},
    "runtime": {"langgraph", "optuna", "openai"},
    "agents": {"langgraph", "openai"},
    "workflows": set(),
}
"""Libraries that a room may not import."""

LOOP = Path("agents/llm")
"""The language model's agents: the one place below the workflow for langgraph and openai."""


def imports(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.append((node.lineno, module))
            if module == "shardwright":
                found += [(node.lineno, f"shardwright.{alias.name}") for alias in node.names]
    return found


def modules(room: str) -> list[Path]:
    return sorted(p for p in (ROOT / room).rglob("*.py"))


def complaints(room: str, path: Path) -> list[str]:
    lines = []
    for number, name in imports(path):
        parts = name.split(".")
        place = f"{path.relative_to(ROOT)}:{number} imports {name}"
        if parts[0] in FLOOR:
            lines.append(f"{place}: rooms are imported as shardwright.{parts[0]}")
        if parts[0] in BANNED_LIBRARIES[room] and not path.relative_to(ROOT).is_relative_to(LOOP):
            lines.append(f"{place}: not allowed in {room}")
        other = parts[1] if parts[0] == "shardwright" and len(parts) > 1 else room
        if other in FLOOR and other != room and FLOOR[other] >= FLOOR[room]:
            lines.append(f"{place}: {other} is not below {room}")
    return lines


@pytest.mark.parametrize("room", FLOOR)
def test_room_keeps_the_contract(room: str) -> None:
    assert modules(room), f"{room} is empty"
    assert [line for path in modules(room) for line in complaints(room, path)] == []


def test_the_check_sees_each_kind_of_breach(tmp_path: Path) -> None:
    source = tmp_path / "bad.py"
    source.write_text("import torch\nfrom kernels import registry\nfrom shardwright import workflows\n")
    global_root = ROOT
    try:
        globals()["ROOT"] = tmp_path
        found = complaints("schemas", source)
    finally:
        globals()["ROOT"] = global_root
    assert len(found) == 3


@pytest.mark.parametrize("room", FLOOR)
def test_no_room_is_a_regular_top_level_package(room: str) -> None:
    """A regular top-level package called kernels makes transformers import ours instead of its own."""
    assert not (ROOT / room / "__init__.py").exists()
    link = ROOT / "src" / "shardwright" / room
    assert link.is_symlink() and link.resolve() == ROOT / room


@pytest.mark.parametrize("part", ["contract", "cost"])
def test_kernel_contracts_and_costs_need_no_torch(part: str) -> None:
    for path in (ROOT / "kernels").glob(f"*/{part}.py"):
        assert not {name.split(".")[0] for _, name in imports(path)} & {"torch", "triton"}, path


@pytest.mark.parametrize("room", ["schemas", "search_spaces"])
def test_low_rooms_load_without_torch(room: str) -> None:
    names = [
        "shardwright." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in modules(room)
    ]
    script = f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT / "tests")
