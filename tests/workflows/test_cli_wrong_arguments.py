"""Every verb with every kind of wrong argument: a typed error on stderr, the documented exit code, no result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import review_plans
import workflow_fakes as fakes

from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.files import write_atomic
from shardwright.workflows.request import Request

X = "X"
"""Where the wrong argument stands."""
PROGRAM = [sys.executable, "-m", "shardwright.workflows.cli.main"]

KINDS: dict[str, bytes | None] = {
    "absent": None,
    "folder": None,
    "loop": None,
    "empty": b"",
    "binary": b"\xff\xfe\x00\x80",
    "list": b"[1, 2]\n",
    "broken": b'{"a": [1\n b: }\n',
    "other": b'{"schema_version": 1, "x": 2}\n',
    "deep": b"[" * 100_000,
}
"""Kind → content of the file; ``None`` where there is no file."""

FILE, RUN, STALE = 2, 1, 5
"""Exit codes: a recipe, cluster, policy, calibration or evidence file; a checkpoint, a run or an adapter; a plan."""

GIVEN = "-c cpu-2 -r inputs/recipe.yaml"
CASES: tuple[tuple[str, int], ...] = (
    ("inspect X", RUN),
    (f"plan X {GIVEN}", RUN),
    ("plan inputs/checkpoint -c X -r inputs/recipe.yaml", FILE),
    ("plan inputs/checkpoint -c cpu-2 -r X", FILE),
    (f"plan inputs/checkpoint {GIVEN} --calibration X", FILE),
    (f"plan inputs/checkpoint {GIVEN} --load-profile X", FILE),
    (f"plan inputs/checkpoint {GIVEN} --evidence X", FILE),
    (f"plan inputs/checkpoint {GIVEN} --llm-config X", FILE),
    (f"adapt X {GIVEN} --run-dir r", RUN),
    ("adapt inputs/checkpoint -c cpu-2 -r X --run-dir r", FILE),
    (f"adapt inputs/checkpoint {GIVEN} --run-dir r --headless --policy X", FILE),
    ("review X", STALE),
    ("review plan.json --policy X", FILE),
    ("apply X --checkpoint inputs/checkpoint", STALE),
    ("show X", STALE),
    ("explain X", STALE),
    ("diff X plan.json", STALE),
    ("diff plan.json X", STALE),
    ("simulate X --checkpoint inputs/checkpoint", STALE),
    ("simulate plan.json --checkpoint X", RUN),
    ("status X", RUN),
    ("logs X", RUN),
    ("logs X --follow", RUN),
    ("resume X", RUN),
    ("cancel X", RUN),
    ("runs --root X", FILE),
    ("runs show X", RUN),
    ("runs fork X --at search --to f", RUN),
    ("profile X", RUN),
    ("export X", RUN),
    ("export X --format merged", RUN),
    ("export X --format per-expert", RUN),
    ("generate X", RUN),
    ("generate inputs/checkpoint --adapter X", FILE),
    ("watch X -c cpu-2 -r inputs/recipe.yaml --policy policy.yaml --once -o w", FILE),
    (f"watch inputs {GIVEN} --policy X --once -o w", FILE),
    ("policy test X plan.json", FILE),
    ("policy test policy.yaml X", STALE),
    ("kernels verify X", FILE),
    ("kernels bench X", FILE),
    ("kernels tune X", FILE),
    ("kernels prebuild X", FILE),
    ("kernels write X --region r --policy written.yaml", STALE),
    ("cluster detect --nvidia-smi X", FILE),
    ("show --schema X", FILE),
)
OTHERWISE = {
    ("runs --root X", "folder"): 0,  # a folder without runs
    ("watch X -c cpu-2 -r inputs/recipe.yaml --policy policy.yaml --once -o w", "folder"): 0,
    ("show X", "folder"): RUN,  # folders are runs
    ("generate inputs/checkpoint --adapter X", "folder"): RUN,
    ("kernels write X --region r --policy written.yaml", "folder"): STALE,
}
"""What another kind of argument makes of a verb."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right inputs, a plan, and one wrong thing of each kind under its name."""
    root = tmp_path_factory.mktemp("wrong")
    fakes.make_inputs(root / "inputs")
    review_plans.plan_of(review_plans.many(2)).save(root / "plan.json")
    (root / "policy.yaml").write_text("approve: true\n")
    (root / "written.yaml").write_text("allow_written_kernels: true\n")
    for kind, content in KINDS.items():
        if content is not None:
            (root / kind).write_bytes(content)
    (root / "folder").mkdir()
    (root / "loop").symlink_to("loop")
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("words", "code"), CASES, ids=[words for words, _ in CASES])
def test_a_wrong_argument(cli, world, monkeypatch, words: str, code: int, kind: str) -> None:
    monkeypatch.chdir(world)
    wanted = OTHERWISE.get((words, kind), code)
    for made in ("r", "w", "f"):
        shutil.rmtree(world / made, ignore_errors=True)
    done = cli(*(kind if word == X else word for word in words.split()))
    assert "Traceback" not in done.err
    deep = kind == "deep" and "error: [usage/too-deep]" in done.err
    assert done.code == (2 if deep else wanted), done.err
    if wanted:
        (first,) = [line for line in done.err.splitlines() if line.startswith("error: [")]
        assert "\n  where: " in done.err and "\n  next:  " in done.err and done.out == "", first


@pytest.mark.parametrize("words", [words for words, _ in CASES])
def test_an_empty_word_is_no_folder(cli, world, monkeypatch, words: str) -> None:
    """``shardwright inspect "$CKPT"`` where CKPT is not set must not look at the current folder."""
    monkeypatch.chdir(world)
    done = cli(*("" if word == X else word for word in words.split()))
    assert done.code == 2 and "error: [usage/empty-argument]" in done.err and done.out == ""


def test_words_of_a_person_may_be_empty(cli, world, monkeypatch) -> None:
    monkeypatch.chdir(world)
    done = cli("review", "plan.json", "--reason", "")
    assert done.code == 3 and "empty-argument" not in done.err


def test_an_older_plan_and_another_runs_folder_are_named(cli, world, tmp_path) -> None:
    older = tmp_path / "older.json"
    older.write_text(json.dumps({**json.loads((world / "plan.json").read_text()), "schema_version": 0}))
    done = cli("show", older)
    assert done.code == 5 and "[plan/schema-version]" in done.err and "0" in done.err
    asked = Request(goal="plan", checkpoint=str(world), data_root=str(world))
    write_atomic(tmp_path / "planned" / "request.json", pretty_bytes(asked))
    done = cli("resume", tmp_path / "planned")
    assert done.code == 2 and "[usage/not-a-run]" in done.err


def test_part_of_an_id_names_what_it_could_mean(cli, world) -> None:
    done = cli("explain", world / "plan.json", "norm")
    assert done.code == 2 and "name one of: norm.00, norm.01;" in done.err
    done = cli("explain", world / "plan.json", "memroy")
    assert "name one of: memory, time;" in done.err


@pytest.mark.parametrize("where", ["sp ace", "é漢", "-dash"])
def test_odd_names_of_folders(cli, world, tmp_path, monkeypatch, where: str) -> None:
    folder = tmp_path / where
    folder.mkdir()
    shutil.copy(world / "plan.json", folder)
    monkeypatch.chdir(tmp_path)
    plan = f"{where}/plan.json"
    done = cli("show", "--json", "--", plan)
    assert done.code == 0 and done.out.startswith("{"), done.err
    assert cli("explain", "--", plan, "memory").code == 0


def test_a_place_that_nobody_may_write(cli, world, monkeypatch) -> None:
    refused = OSError(13, "Permission denied", "locked/plan.json")

    def refuse(*_: object, **__: object) -> None:
        raise refused

    monkeypatch.setattr("shardwright.workflows.review.session.ReviewSession.open", refuse)
    done = cli("review", world / "plan.json", "--approve")
    assert done.code == 1 and "[system/eacces] Permission denied\n  where: locked/plan.json" in done.err
    assert "name another place" in done.err


@pytest.mark.parametrize("settings", [{"NO_COLOR": "1"}, {"COLUMNS": "40"}, {"LANG": "C", "LC_ALL": "C"}])
def test_the_surroundings_change_no_data(world, settings: dict[str, str]) -> None:
    """A pipe gets the same bytes whatever the terminal around it, and no colours."""
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LANG", "LC_ALL")}
    command = [*PROGRAM, "explain", str(world / "plan.json"), "memory"]
    seen = [
        subprocess.run(command, env={**plain, **more}, capture_output=True, check=True).stdout
        for more in ({"LANG": "C.UTF-8"}, settings)
    ]
    assert seen[0] == seen[1] and b"\x1b" not in seen[0] and "·".encode() in seen[0]


def test_what_nobody_foresaw_is_told_in_the_same_form(world, tmp_path) -> None:
    """The trace is one variable away, and the exit code is that of any error."""
    script = (
        "import sys\nfrom shardwright.workflows import machine\nfrom shardwright.workflows.cli.main import main\n"
        "def examine(): raise KeyError('gone')\n"
        "machine.examine = examine\nsys.argv = ['shardwright', 'doctor']\nmain()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "SHARDWRIGHT_TRACEBACK"}
    short, whole = (
        subprocess.run([sys.executable, "-c", script], env={**environment, **more}, capture_output=True, text=True)
        for more in ({}, {"SHARDWRIGHT_TRACEBACK": "1"})
    )
    assert short.returncode == whole.returncode == 1
    assert short.stderr.startswith("error: [internal/unforeseen] KeyError: 'gone'\n  where: ")
    assert "SHARDWRIGHT_TRACEBACK=1" in short.stderr and "Traceback" not in short.stderr
    assert "Traceback" in whole.stderr
