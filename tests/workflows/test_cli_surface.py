"""The public command line is frozen: verbs, arguments, options and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main

from shardwright.schemas.errors import ExitCode
from shardwright.workflows.cli.main import EXIT_CODES, app

FROZEN = Path(__file__).with_name("cli_surface.json")
EXECUTABLE = [sys.executable, "-m", "shardwright.workflows.cli.main"]


def surface() -> dict[str, list[str]]:
    """Verb → its parameters, as a user writes them."""
    found: dict[str, list[str]] = {}

    def walk(command, path: str) -> None:
        found[path] = sorted(
            "/".join([*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else f"<{p.name}>"
            for p in command.params
        )
        for name, child in getattr(command, "commands", {}).items():
            walk(child, f"{path} {name}".strip())

    walk(typer.main.get_command(app), "")
    return found


def test_verbs_and_options_are_frozen() -> None:
    """Changing this file changes what scripts rely on: do it in a commit of its own that says why."""
    assert surface() == json.loads(FROZEN.read_text())


def test_every_designed_verb_is_there() -> None:
    verbs = """inspect; cluster detect; cluster init; plan; review; apply; adapt; status; logs; resume; cancel; show;
    explain; diff; calibrate; kernels verify; kernels bench; kernels prebuild; export; generate; doctor"""
    assert {" ".join(verb.split()) for verb in verbs.split(";")} <= set(surface())


def test_exit_codes_are_frozen_and_told() -> None:
    table = {
        "OK": 0,
        "ERROR": 1,
        "USAGE": 2,
        "NEEDS_APPROVAL": 3,
        "POLICY_DENIED": 4,
        "STALE_PLAN": 5,
        "LEGALITY_FAILED": 6,
        "INFEASIBLE": 7,
        "LLM_UNAVAILABLE": 8,
        "CHECK_FAILED": 9,
        "INTERRUPTED": 130,
    }
    assert {code.name: code.value for code in ExitCode} == table
    assert all(f"{value} " in EXIT_CODES for value in table.values())


@pytest.mark.parametrize("verb", sorted({path for path in json.loads(FROZEN.read_text()) if path}))
def test_every_verb_has_help(verb: str) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert result.exit_code == 0 and len(result.stdout.splitlines()) > 5
    assert "[[" not in result.stdout, "brackets of the metavar beside Typer's own"


@pytest.mark.parametrize("group", ["", "kernels", "runs", "cluster", "policy"])
def test_no_sentence_of_a_list_of_verbs_is_cut(group: str) -> None:
    from typer.testing import CliRunner

    verbs = CliRunner().invoke(app, [*group.split(), "--help"]).stdout.split("Commands:")[1]
    assert "..." not in verbs and verbs.count(".") >= 2 - bool(group)


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    """Measured 0.09 s on two idle cores; the bound leaves room for a loaded machine. Best of three."""
    script = (
        "import sys\nfrom shardwright.workflows.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'langgraph', 'optuna', 'pydantic', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([*EXECUTABLE, "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    assert min(times) <= 0.6


def test_usage_errors_exit_with_2() -> None:
    for arguments in ([], ["no-such-verb"], ["plan"], ["plan", "x", "--no-such-option"]):
        done = subprocess.run([*EXECUTABLE, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2, arguments
        assert "Usage:" in done.stderr + done.stdout
