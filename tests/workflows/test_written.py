"""``kernels write|approve``: compiled, written under a policy, judged apart, kept until a person names its hash."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.agents.llm.kernel_writer.candidates import load, usable
from shardwright.agents.llm.scripted import in_turn, message, serve
from shardwright.schemas.errors import LlmError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from written_kernels.cheats import HONEST

ALLOWED = "approve: true\nallow_written_kernels: true\n"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return message(calls=[(name, arguments)])


PROPOSES = [
    call("propose_region", region="region-3", nodes=["node-0", "node-1", "node-2"], reason="one pass"),
    call("finish", order=["region-3"], reason="it is all there is"),
    call("finish", explanation="none"),
]


@pytest.fixture
def planned(cli, sinks: Path, tmp_path: Path) -> Path:
    """A plan of a tiny gpt_oss with one proposed region, made by the first test that asks."""
    kept, out = sinks.parent / "sinks-with-a-proposed-region.json", tmp_path / "plan.json"
    if not kept.exists():
        with serve(in_turn(PROPOSES)) as served:
            llm = ("--llm", "required", "--llm-url", served.base_url, "--llm-model", "scripted")
            more = ("-c", "cpu-2", "-r", sinks / "recipe.yaml", "-o", kept, "--trials", "2", *llm)
            done = cli("plan", sinks / "checkpoint", *more)
        assert done.code == 0, done.err
    out.write_bytes(kept.read_bytes())
    return out


def region_of(plan: Path) -> str:
    proposals = json.loads(plan.read_text())["evidence"]["proposals"]
    (found,) = [one["id"] for one in proposals if one["id"].startswith("proposed-region:")]
    return str(found)


def policy_file(folder: Path, text: str = ALLOWED) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_kernel_is_written_judged_kept_and_approved(cli, sinks: Path, planned: Path, tmp_path: Path) -> None:
    region, out = region_of(planned), tmp_path / "written"
    base = ("kernels", "write", planned, "--region", region, "--checkpoint", sinks / "checkpoint", "--out", out)
    wrong = HONEST.replace("scaled + mask", "scaled - mask")
    assert wrong != HONEST
    with serve(in_turn([message(json.dumps({"source": one})) for one in (wrong, HONEST)])) as served:
        llm = ("--llm-url", served.base_url, "--llm-model", "scripted", "--llm-limit", "calls=9")
        done = cli(*base, "--policy", policy_file(tmp_path), *llm)
    assert done.code == 0, done.err
    assert "torch.compile on cpu" in done.err and "attempt 2" in done.out and "of 9 calls" in done.out
    (record,) = out.glob("[0-9a-f]*[0-9a-f].json")
    candidate, source = load(record)
    assert source == HONEST and candidate.compile_ms is not None and candidate.ms is None
    with pytest.raises(LlmError, match="not-approved"):
        usable(record)

    done = cli("kernels", "approve", record, "--sha256", "0" * 64)
    assert done.code == 1 and "other-hash" in done.err
    done = cli("kernels", "approve", record, "--sha256", candidate.source_sha256, "--actor", "ada")
    assert done.code == 0 and "approved by ada" in done.out
    assert usable(record) == HONEST

    (recording,) = out.glob("*.llm.jsonl")
    again = ("--llm-url", "http://127.0.0.1:9/v1", "--llm-model", "scripted", "--llm-limit", "calls=9")
    done = cli(*base, "--policy", policy_file(tmp_path), *again, "--llm-replay", recording, "--offline")
    assert done.code == 0 and candidate.source_sha256 in done.out, done.err


@pytest.mark.slow
def test_no_attempt_that_fails_is_kept(cli, sinks: Path, planned: Path, tmp_path: Path) -> None:
    out = tmp_path / "written"
    with serve(in_turn([message(json.dumps({"source": "import os\n"}))])) as served:
        done = cli(
            *("kernels", "write", planned, "--region", region_of(planned), "--checkpoint", sinks / "checkpoint"),
            *("--policy", policy_file(tmp_path), "--out", out, "--llm-url", served.base_url, "--llm-model", "scripted"),
        )
    assert done.code == 9 and "3 attempts, none passed" in done.err and "screen" in done.err
    assert not list(out.glob("*.py"))


def test_what_may_not_be_written_is_refused_before_anything_is_asked(
    cli, built: Path, sinks: Path, planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDWRIGHT_LLM_URL", raising=False)
    region, checkpoint = region_of(planned), ("--checkpoint", sinks / "checkpoint")

    def write(policy: str, wanted: str, *more: object) -> Any:
        return cli("kernels", "write", planned, "--region", wanted, "--policy", policy_file(tmp_path, policy), *more)

    done = write("approve: true\n", region, *checkpoint)
    assert done.code == 4 and "allow_written_kernels" in done.err
    done = write(ALLOWED, "proposed-region:none", *checkpoint)
    assert done.code == 2 and "no-proposal" in done.err and region in done.err
    done = write(ALLOWED, "rms_norm:final:model.norm", *checkpoint)
    assert done.code == 2 and "rms_norm computes it already" in done.err
    done = write(ALLOWED, region)
    assert done.code == 2 and "no-checkpoint" in done.err
    done = write(ALLOWED, region, *checkpoint)
    assert done.code == 8 and "no language model is named" in done.err
    done = write(ALLOWED, region, *checkpoint, "--offline", "--llm-url", "http://127.0.0.1:9/v1", "--llm-model", "m")
    assert done.code == 8 and "--offline" in done.err
    tiny = tmp_path / "tiny.json"
    more = ("-c", "cpu-2", "-r", built / "recipe.yaml", "-o", tiny, "--trials", "2")
    assert cli("plan", built / "checkpoint", *more).code == 0
    shapes = cli(
        *("kernels", "write", tiny, "--region", "swiglu:attention+moe/experts:experts"),
        *("--policy", policy_file(tmp_path), "--checkpoint", built / "checkpoint"),
        *("--llm-url", "http://127.0.0.1:9/v1", "--llm-model", "m"),
    )
    assert shapes.code == 6 and "one-shape" in shapes.err


def test_another_checkpoint_is_refused(cli, tiny: Path, planned: Path, tmp_path: Path) -> None:
    config = tiny / "checkpoint" / "config.json"
    config.write_text(config.read_text().replace("10000", "20000"))
    done = cli(
        *("kernels", "write", planned, "--region", region_of(planned), "--policy", policy_file(tmp_path)),
        *("--checkpoint", tiny / "checkpoint"),
    )
    assert done.code == 5 and "fingerprint" in done.err
