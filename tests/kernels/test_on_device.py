"""The operators on a real device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from shardwright.kernels.bench import bench_all
from shardwright.kernels.evidence import EvidenceStore
from shardwright.kernels.registry import OPERATORS
from shardwright.kernels.verify import verify_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_value_is_as_near_to_fp64_as_eagers(name: str) -> None:
    assert [r for r in verify_all([name], "cuda") if not r.ok] == []


def test_rms_norm_lines_and_evidence_are_written(tmp_path: Path) -> None:
    lines = bench_all(["rms_norm"], tmp_path, tmp_path / "evidence.jsonl")
    assert {line.passes for line in lines} >= {"fwd", "bwd"}
    assert all(line.ours and line.rival_value and line.floor for line in lines)
    assert len(EvidenceStore(tmp_path / "evidence.jsonl").read()) == 4 * len(lines)
