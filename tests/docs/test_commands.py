"""Every ``shardwright`` command that a page shows names verbs and options that the program has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shardwright.workflows.cli.examples import EXAMPLES
from shardwright.workflows.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def commands(text: str) -> list[list[str]]:
    """The words of every command line in the fenced blocks of a page, comments and continuations resolved."""
    found = []
    for block in re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||[|;<>]", line.split(" #")[0].removeprefix("$ ")):
                try:
                    words = shlex.split(part)
                except ValueError:
                    continue
                while words and ("=" in words[0] or words[0] in ("!", "if", "then", "export")):
                    words = words[1:]
                if words[:1] == ["shardwright"] and len(words) > 1:
                    found.append(words[1:])
    return found


def wrong_with(words: list[str]) -> str:
    """What the program does not know of a command; empty where it knows all."""
    command: Any = typer.main.get_command(app)
    at = 0
    while getattr(command, "commands", None) and at < len(words) and not words[at].startswith("-"):
        child = command.commands.get(words[at])
        if child is None:
            return f"no verb {words[at]!r}"
        command, at = child, at + 1
    options = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
    unknown = [w for w in words[at:] if re.match(r"--?[A-Za-z]", w) and w.split("=")[0] not in options]
    return f"no option {', '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_only_what_the_program_knows(page: Path) -> None:
    wrong = [f"{' '.join(words)}: {why}" for words in commands(page.read_text()) if (why := wrong_with(words))]
    assert wrong == []


def test_the_examples_of_the_help_are_commands_that_the_program_knows() -> None:
    for line in EXAMPLES.values():
        for words in commands(f"```bash\n{line}\n```\n"):
            assert wrong_with(words) == "", line


def test_the_pages_show_commands_and_a_wrong_one_is_found() -> None:
    assert sum(len(commands(page.read_text())) for page in PAGES) > 30
    (one, two, three) = commands(
        "```bash\nshardwright plan X -c C --tirals 3 # note\nshardwright plam X\nA=b shardwright show P\n```\n"
    )
    assert wrong_with(one) == "no option --tirals"
    assert wrong_with(two) == "no verb 'plam'"
    assert wrong_with(three) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_makes_can_be_made(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(asked) <= targets
    examples = re.findall(r"make adapt EXAMPLE=([\w-]+)", page.read_text(encoding="utf-8"))
    assert all((ROOT / "examples" / name / "build.py").is_file() for name in examples)
