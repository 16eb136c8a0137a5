"""Which measured time stands for an operator, and which file it is named by."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from shardwright.agents.structure.measured import Seen, find, shipped_evidence, verified
from shardwright.agents.structure.run import run_structure
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.kernels import evidence
from shardwright.kernels.registry import source_sha256
from shardwright.schemas.ops import MeasuredTime
from shardwright.schemas.recipe import Recipe
from shardwright.search_spaces.catalogue import load_cluster

SHAPE, BUCKET = {"T": 400, "H": 64}, "H64,T512"


def time(median_ms: float, **changes: object) -> MeasuredTime:
    facts: dict[str, object] = {
        "op": "rms_norm",
        "provider": "shardwright",
        "pass_name": "fwd+dx",
        "device": "Some GPU",
        "driver": "",
        "versions": {},
        "source_sha256": source_sha256("rms_norm"),
        "shape_bucket": BUCKET,
        "dtype": "bfloat16",
        "median_ms": median_ms,
        "floor_ms": 0.1,
        "peak_bytes": 0,
        "repeats": 7,
        "date": "2026-01-01",
    }
    return MeasuredTime.model_validate({**facts, **changes})


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What comes with the package: one time of 4 ms."""
    monkeypatch.setattr(evidence, "SHIPPED", tmp_path / "measured")
    evidence.EvidenceStore(tmp_path / "measured" / "some-gpu.jsonl").add([time(4.0)])
    return tmp_path / "measured"


def own(path: Path, *times: MeasuredTime) -> Path:
    evidence.EvidenceStore(path).add(times)
    return path


def seen(*files: Path, provider: str = "shardwright") -> Seen | None:
    return find("rms_norm", provider, SHAPE, "Some GPU", "bfloat16", (*shipped_evidence(), *files))


def test_a_shipped_time_has_no_file_and_says_so(shipped: Path) -> None:
    found = seen()
    assert found is not None and (found.time.median_ms, found.file) == (4.0, "")
    assert found.basis == "measured on Some GPU, 2026-01-01, H64,T512, fwd+dx, 7 repeats; shipped"


def test_an_own_time_of_the_same_case_goes_before_the_shipped_one_in_any_pass(shipped: Path, tmp_path: Path) -> None:
    first, second = own(tmp_path / "first.jsonl", time(3.0)), own(tmp_path / "second.jsonl", time(5.0))
    for path, files in ((first, (first,)), (second, (first, second)), (first, (second, first))):
        found = seen(*files)
        assert found is not None and found.file == hashlib.sha256(path.read_bytes()).hexdigest()
        assert found.time.median_ms == {first: 3.0, second: 5.0}[path]
        assert found.basis.endswith(f"; evidence file {found.file[:16]}…")
    backward = own(tmp_path / "backward.jsonl", time(9.0, pass_name="fwd+bwd"))
    found = seen(backward)
    assert found is not None and found.time.median_ms == 9.0


@pytest.mark.parametrize(
    "other",
    [
        {"device": "Other GPU"},
        {"source_sha256": "0" * 64},
        {"shape_bucket": "H128,T512"},
        {"dtype": "float32"},
        {"pass_name": "fwd"},
        {"op": "router"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_an_own_time_of_anything_else_leaves_the_shipped_one(shipped: Path, tmp_path: Path, other) -> None:  # type: ignore[no-untyped-def]
    found = seen(own(tmp_path / "mine.jsonl", time(1.0, **other)))
    assert found is not None and (found.time.median_ms, found.file) == (4.0, "")


def test_own_times_add_to_the_shipped_ones(shipped: Path, tmp_path: Path) -> None:
    mine = own(tmp_path / "mine.jsonl", time(8.0, provider="eager"))
    assert seen(provider="eager") is None
    eager, ours = seen(mine, provider="eager"), seen(mine)
    assert eager is not None and ours is not None and (eager.time.median_ms, ours.time.median_ms) == (8.0, 4.0)
    assert eager.file and not ours.file


def test_a_file_that_changes_is_read_again(shipped: Path, tmp_path: Path) -> None:
    path = own(tmp_path / "mine.jsonl", time(3.0))
    before = seen(path)
    own(path, time(2.0))
    after = seen(path)
    assert before is not None and after is not None
    assert (before.time.median_ms, after.time.median_ms) == (3.0, 2.0) and before.file != after.file


def test_a_time_of_ours_for_the_present_source_stands_for_a_verification(shipped: Path, tmp_path: Path) -> None:
    assert verified("rms_norm") and not verified("router")
    mine = own(tmp_path / "mine.jsonl", time(1.0, op="router", source_sha256=source_sha256("router")))
    assert verified("router", (mine,))


@pytest.mark.parametrize(
    ("kernel_ms", "compile_ms", "runs", "because"),
    [
        (0.1, 0.25, "kernel", "kernel: 0.3 → 0.1 ms a call (measured), ×3.00"),
        (0.25, 0.1, "compile", "compile: 0.3 → 0.1 ms a call (measured), ×3.00"),
        (0.4, 0.35, "eager", "eager: compile is not faster (0.3 → 0.35 ms a call (measured), ×0.86)"),
    ],
)
def test_own_times_decide_on_a_device_that_nothing_shipped_was_measured_on(
    mixtral_folder: Path,
    recipe: Recipe,
    tmp_path: Path,
    kernel_ms: float,
    compile_ms: float,
    runs: str,
    because: str,
) -> None:
    cluster = load_cluster("b200-8")
    assert not any(cluster.device.name in path.read_text() for path in shipped_evidence())
    bucket = evidence.shape_bucket({"T": recipe.batch.sequence_tokens, "H": 64})
    path = own(
        tmp_path / "mine.jsonl",
        *(
            time(ms, provider=provider, device=cluster.device.name, shape_bucket=bucket)
            for provider, ms in (("shardwright", kernel_ms), ("compile", compile_ms), ("eager", 0.3))
        ),
    )
    found = run_structure(mixtral_folder, profile_checkpoint(mixtral_folder), cluster, recipe, (path,)).proposals
    (norm,) = [proposal for proposal in found if proposal.id.startswith("rms_norm:final:")]
    assert (norm.chosen, norm.reason) == (runs, because)
    name = hashlib.sha256(path.read_bytes()).hexdigest()
    gains = {v.name: v.gain for v in norm.variants if v.gain is not None}
    assert all(gains[way].evidence == (name,) and gains[way].origin == "measured" for way in ("kernel", "eager"))
    assert {file for p in found for v in p.variants if v.gain for file in v.gain.evidence} == {name}
