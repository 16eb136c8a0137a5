"""The table of operators: lazy, complete, and hashed by source."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.kernels import registry
from shardwright.kernels.registry import OPERATORS, operator, source_sha256
from shardwright.schemas.errors import KernelError


def test_the_table_loads_no_torch() -> None:
    script = (
        "import sys\n"
        "from shardwright.kernels.registry import OPERATORS, source_sha256\n"
        "for name, entry in OPERATORS.items():\n"
        "    source_sha256(name); entry.load_cost()\n"
        "    __import__(f'shardwright.kernels.{entry.folder}.contract'.replace('/', '.'))\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_all_its_parts(name: str) -> None:
    pytest.importorskip("triton")
    entry = operator(name)
    folder = registry.ROOM / entry.folder
    assert {"reference.py", "triton.py", "op.py", "contract.py", "cost.py"} <= {p.name for p in folder.glob("*.py")}
    assert callable(entry.load_op()) and callable(entry.load_cost())
    suite = entry.load_suite()
    assert suite.op == name and suite.small_shapes and suite.bench and suite.gate_cases()


@pytest.mark.parametrize("name", OPERATORS)
def test_every_compiled_kernel_comes_from_a_hashed_source(name: str) -> None:
    """What the gate compiles is bound to the operator's hash, in whichever folder it stands; names end alike."""
    pytest.importorskip("triton")
    hashed = {path.resolve() for path in registry.sources(name)}
    for suite in operator(name).load_suites():
        assert suite.op == name
        for case in suite.gate_cases():
            function = case.kernel.fn
            assert Path(function.__code__.co_filename).resolve() in hashed, case.name
            assert function.__name__.endswith("_kernel")


@pytest.mark.parametrize("name", OPERATORS)
def test_dimensions_are_those_of_the_cost_function(name: str) -> None:
    pytest.importorskip("triton")
    entry = operator(name)
    for suite in entry.load_suites():
        shapes = (*suite.small_shapes, *suite.large_shapes, *(case.shape for case in suite.bench))
        assert all({*entry.dimensions} <= {*shape} for shape in shapes)
        assert all({*suite.cost(**shape, dtype="bfloat16").shape} >= {*entry.dimensions} for shape in shapes)


@pytest.mark.parametrize(("name", "folder"), [("moe_layer", "grouped_lora_mlp"), ("grouped_lora_mlp", "permute")])
def test_a_borrowed_folder_counts_whole(name: str, folder: str) -> None:
    """Helpers of a borrowed folder decide results too; its costs and cases do not."""
    relative = {path.relative_to(registry.ROOM).as_posix() for path in registry.sources(name)}
    own = {f"{folder}/{path.name}" for path in (registry.ROOM / folder).glob("*.py")}
    left_out = own - relative
    assert own & relative and left_out <= {f"{folder}/{part}" for part in registry.NOT_RUN}


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(KernelError, match="'softmax'") as caught:
        source_sha256("softmax")
    assert caught.value.code == "kernel/unknown-operator"


def test_the_hash_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "kernels"
    shutil.copytree(registry.ROOM, room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(registry, "ROOM", room)
    before = {name: source_sha256(name) for name in ("rms_norm", "add_rms_norm")}
    assert before["rms_norm"] != before["add_rms_norm"]
    for path in registry.sources("add_rms_norm"):
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert source_sha256("add_rms_norm") != before["add_rms_norm"], path
        path.write_bytes(content)
    assert source_sha256("add_rms_norm") == before["add_rms_norm"]
    borrowed = room / "rms_norm" / "triton.py"
    borrowed.write_bytes(borrowed.read_bytes() + b"\n")
    assert source_sha256("add_rms_norm") != before["add_rms_norm"]


def test_costs_and_cases_may_change_without_a_new_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {p.name for p in registry.sources("rms_norm")}
    assert not names & {"cost.py", "cases.py"}


def test_tuned_choices_of_what_an_operator_runs_are_in_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own and those of folders that it borrows; a borrowed file brings no choices, another operator's none."""
    room = tmp_path / "kernels"
    shutil.copytree(registry.ROOM, room, ignore=shutil.ignore_patterns("__pycache__", "tuned"))
    monkeypatch.setattr(registry, "ROOM", room)
    names = ("permute", "moe_layer", "router", "short_conv")
    before = {name: source_sha256(name) for name in names}
    assert before == {name: registry.code_sha256(name) for name in names}

    def entry(op: str) -> dict[str, object]:
        return {"op": op, "kernel": "metadata", "bucket": "T=16", "choice": {"warps": 4}}

    (room / "tuned").mkdir()
    (room / "tuned" / "gpu.json").write_text(json.dumps({"entries": [entry("permute"), entry("kda")]}))
    (line,) = registry.launch_choices("moe_layer")
    assert json.loads(line) == ["gpu", "permute", "metadata", "T=16", {"warps": 4}]
    assert registry.launch_choices("permute") == (line,)
    assert registry.launch_choices("router") == registry.launch_choices("short_conv") == ()
    assert {name for name in names if source_sha256(name) != before[name]} == {"permute", "moe_layer"}
    both = source_sha256("moe_layer")
    (room / "tuned" / "gpu.json").write_text(
        json.dumps({"entries": [entry("grouped_lora_mlp"), entry("permute"), entry("moe_layer")]})
    )
    assert [json.loads(line)[1] for line in registry.launch_choices("moe_layer")] == [
        "grouped_lora_mlp",
        "moe_layer",
        "permute",
    ]
    assert source_sha256("moe_layer") not in (both, before["moe_layer"])
