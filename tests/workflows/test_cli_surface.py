"""The public command line is frozen: verbs, arguments, options and exit codes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from shardwright.schemas.errors import ExitCode
from shardwright.workflows.cli.examples import EXAMPLES
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


def test_every_verb_ends_with_an_example() -> None:
    from typer.testing import CliRunner

    groups = {"", "cluster", "kernels", "policy"}
    assert set(EXAMPLES) == set(surface()) - groups
    for verb, line in EXAMPLES.items():
        assert f"shardwright {verb}" in line
        assert f"Example:\n    {line}" in CliRunner().invoke(app, [*verb.split(), "--help"]).stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [("kernels ver", ["verify"]), ("plan X --cluster h200-12", ["h200-128"]), ("apply --dry", ["--dry-run"])],
)
def test_the_shell_completes_verbs_options_and_clusters(words: str, found: list[str]) -> None:
    asked = {"_SHARDWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": f"shardwright {words}"}
    environment = {**os.environ, **asked, "COMP_CWORD": str(len(words.split()))}
    script = "import sys; sys.argv[0] = 'shardwright'; from shardwright.workflows.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == found, done.stderr


@pytest.mark.parametrize("group", ["", "kernels", "runs", "cluster", "policy"])
def test_no_sentence_of_a_list_of_verbs_is_cut(group: str) -> None:
    from typer.testing import CliRunner

    verbs = CliRunner().invoke(app, [*group.split(), "--help"]).stdout.split("Commands:")[1]
    assert "..." not in verbs and verbs.count(".") >= 2 - bool(group)


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    """Processor time, which other work on the machine does not stretch: 0.16 s on two cores. Best of three."""
    script = (
        "import sys\nfrom shardwright.workflows.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'langgraph', 'optuna', 'pydantic', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*EXECUTABLE, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) <= 0.4


def test_usage_errors_exit_with_2() -> None:
    for arguments in ([], ["no-such-verb"], ["plan"], ["plan", "x", "--no-such-option"]):
        done = subprocess.run([*EXECUTABLE, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2, arguments
        assert "Usage:" in done.stderr + done.stdout
