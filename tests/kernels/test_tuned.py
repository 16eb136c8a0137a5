"""Launch choices as data: looked up, pinned, chosen; never tuned where workers run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="tuning runs kernels")

from shardwright.kernels import registry, tuned
from shardwright.kernels.cases import TuneCase
from shardwright.kernels.registry import code_sha256, source_sha256
from shardwright.kernels.tune import merged, tune_case
from shardwright.schemas.errors import KernelError
from shardwright.schemas.tuned import TunedEntry, TunedFile


@dataclass(frozen=True)
class Tile:
    BN: int = 64
    warps: int = 4
    reload: bool = False


BUCKET = tuned.bucket(T=1000, E=896, k=16)


def entry(**changes: object) -> TunedEntry:
    facts: dict[str, object] = {
        "op": "router",
        "kernel": "router_fwd",
        "bucket": BUCKET,
        "choice": {"BN": 128},
        "code_sha256": code_sha256("router"),
        "median_ms": 0.1,
        "default_ms": 0.2,
        "candidates": 5,
    }
    return TunedEntry.model_validate({**facts, **changes})


def write(folder: Path, *entries: TunedEntry) -> None:
    file = TunedFile(device="NVIDIA H200", versions={"triton": "3.6.0"}, entries=entries)
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-h200.json").write_text(file.model_dump_json())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of choices, on a machine that claims to be an H200."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    tuned.forget()
    with tuned.on("nvidia-h200"):
        yield tmp_path / "tuned"
    tuned.forget()


def look() -> Tile:
    return tuned.lookup("router", "router_fwd", BUCKET, Tile())


def test_rows_share_a_bucket_and_widths_do_not() -> None:
    assert tuned.bucket(T=513, E=8) == tuned.bucket(T=1024, E=8) == "E8,T1024"
    assert tuned.bucket(T=513, E=8) != tuned.bucket(T=513, E=9)


def test_a_file_changes_named_fields_only_and_says_so(folder: Path) -> None:
    write(folder, entry())
    assert look() == Tile(BN=128)
    (found,) = tuned.decisions()
    assert (found.source, found.choice) == ("file", Tile(BN=128))


@pytest.mark.parametrize(
    ("made", "source"),
    [
        ((), "no-entry"),
        ((entry(bucket=tuned.bucket(T=4096, E=896, k=16)),), "no-entry"),
        ((entry(kernel="router_bwd"),), "no-entry"),
        ((entry(code_sha256="0" * 64),), "stale"),
    ],
)
def test_a_default_is_a_recorded_fallback(folder: Path, made: tuple[TunedEntry, ...], source: str) -> None:
    write(folder, *made)
    assert look() == Tile()
    assert [found.source for found in tuned.decisions()] == [source]


def test_without_file_or_device_the_default_stands(folder: Path) -> None:
    assert look() == Tile() and tuned.decisions()[0].source == "no-file"
    with tuned.on(None):
        assert look() == Tile() and tuned.decisions()[0].source == "no-device"


@pytest.mark.parametrize("choice", [{"BM": 1}, {"warps": True}, {"reload": 1}])
def test_a_choice_of_another_shape_is_refused(folder: Path, choice: dict[str, int | bool]) -> None:
    write(folder, entry(choice=choice))
    with pytest.raises(KernelError) as caught:
        look()
    assert caught.value.code == "kernel/tuned-mismatch" and BUCKET in caught.value.where


def test_a_corrupt_file_is_named(folder: Path) -> None:
    folder.mkdir()
    (folder / "nvidia-h200.json").write_text('{"entries": 3}')
    with pytest.raises(KernelError) as caught:
        look()
    assert caught.value.code == "kernel/corrupt-tuned-file" and "nvidia-h200.json" in caught.value.where


def test_two_entries_for_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="two entries"):
        TunedFile(device="x", versions={}, entries=(entry(), entry(choice={"BN": 32})))


def test_an_override_holds_inside_its_block_only(folder: Path) -> None:
    write(folder, entry())
    with tuned.override("router", "router_fwd", Tile(BN=16)):
        assert look() == Tile(BN=16)
        assert tuned.lookup("router", "router_bwd", BUCKET, Tile()) == Tile()
    assert look() == Tile(BN=128)


def test_a_plan_pins_choices_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another choice is another hash for the operator and for those that run it, and for nobody else."""
    room = tmp_path / "kernels"
    shutil.copytree(registry.ROOM, room, ignore=shutil.ignore_patterns("__pycache__", "tuned"))
    monkeypatch.setattr(registry, "ROOM", room)
    ops = ("router", "permute", "moe_layer", "rms_norm")
    bare = {op: source_sha256(op) for op in ops}
    assert all(bare[op] == code_sha256(op) for op in ops)
    write(room / "tuned", entry(op="permute"))
    pinned = {op: source_sha256(op) for op in ops}
    assert [op for op in ops if pinned[op] != bare[op]] == ["permute", "moe_layer"]
    assert code_sha256("permute") == bare["permute"], "an entry does not make itself stale"
    write(room / "tuned", entry(op="permute", median_ms=0.05))
    assert source_sha256("permute") == pinned["permute"], "times are no part of what is pinned"


def test_looking_up_imports_no_torch() -> None:
    script = (
        "import sys\nfrom dataclasses import dataclass\nfrom shardwright.kernels import tuned\n"
        "@dataclass(frozen=True)\nclass C:\n    warps: int = 4\n"
        "assert tuned.lookup('router', 'x', 'T16', C()) == C()\n"
        "assert tuned.decisions()[0].source == 'no-device' and not {'torch', 'triton'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def case(values: dict[int, tuple[float, float]]) -> tuple[TuneCase, dict[int, float]]:
    """A pretend kernel: BN → (value it computes, ms it takes); the right value is 1."""
    out = torch.zeros(4)

    def run() -> None:
        out.fill_(values[look().BN][0])

    times = {BN: ms for BN, (_, ms) in values.items()}
    choices = tuple(Tile(BN=BN) for BN in values)
    return TuneCase(
        "router_fwd", BUCKET, Tile(), choices, lambda: (run, lambda: [(out, torch.ones(4).double())])
    ), times


def test_the_fastest_right_choice_is_taken() -> None:
    """32 is faster and wrong, 128 is faster and right."""
    made, times = case({64: (1.0, 3.0), 32: (1.5, 1.0), 128: (1.0, 2.0), 256: (1.0, 2.5)})
    found, tried = tune_case("router", made, lambda run: times[look().BN])
    assert found is not None and found.choice["BN"] == 128 and (found.median_ms, found.default_ms) == (2.0, 3.0)
    assert [t.remark for t in tried] == ["", "wrong", "", ""]


def test_a_default_that_is_about_as_fast_stands() -> None:
    made, times = case({64: (1.0, 3.0), 128: (1.0, 2.99)})
    assert tune_case("router", made, lambda run: times[look().BN])[0] is None


def test_a_wrong_default_is_an_error() -> None:
    made, times = case({64: (1.5, 3.0), 128: (1.0, 1.0)})
    with pytest.raises(KernelError) as caught:
        tune_case("router", made, lambda run: times[look().BN])
    assert caught.value.code == "kernel/default-wrong"


def test_other_operators_keep_their_entries() -> None:
    old = TunedFile(device="d", versions={}, entries=(entry(), entry(op="permute", kernel="combine")))
    new = merged(old, ["router"], [entry(kernel="router_bwd")], "d")
    assert [(e.op, e.kernel) for e in new.entries] == [("permute", "combine"), ("router", "router_bwd")]


def test_the_expert_products_ask_for_what_is_tuned() -> None:
    """Every tune case's key is one that a layer of its size looks up."""
    from shardwright.kernels.grouped_lora_mlp import cases, tuning

    tuned.forget()
    with tuned.on("nvidia-none"):
        for size in tuning.SIZES:
            cases.launched("", {**size, "r": tuning.RANK})
        asked = {(found.kernel, found.bucket) for found in tuned.decisions() if found.op == "grouped_lora_mlp"}
    keys = {(case.kernel, case.bucket) for case in tuning.tune_cases()}
    assert keys <= asked and {kernel for kernel, _ in keys} == {"way", "product", "adapter_grads"}
    tuned.forget()


def test_routings_ask_for_what_is_tuned() -> None:
    from shardwright.kernels.permute import cases, tuning

    tuned.forget()
    with tuned.on("nvidia-none"):
        for T, K, E in tuning.SIZES:
            cases.launched(T, K, E, 64)
        asked = {(found.kernel, found.bucket) for found in tuned.decisions() if found.op == "permute"}
    assert {(case.kernel, case.bucket) for case in tuning.tune_cases()} <= asked
    tuned.forget()
