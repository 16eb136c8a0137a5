"""examples/tiny-k3: the published layout in small, read, planned, trained on two ranks, exported and reloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.profile import profile_checkpoint

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-k3"
PROGRAM = [sys.executable, "-m", "shardwright.workflows.cli.main"]


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("k3")
    subprocess.run([sys.executable, str(EXAMPLE / "build.py"), "--out", str(out)], check=True, capture_output=True)
    return out


def test_the_layout_is_the_published_one(k3: Path) -> None:
    """Names, packing, fp32 side tensors, 1-indexed lists and padding as in the files of the 2.8T model."""
    headers = read_headers(k3 / "checkpoint").tensors
    expert = "language_model.model.layers.1.block_sparse_moe.experts.15"
    shapes = {name: (headers[name].dtype, tuple(headers[name].shape)) for name in headers}
    assert shapes[f"{expert}.w1.weight_packed"] == ("U8", (32, 16))
    assert shapes[f"{expert}.w2.weight_scale"] == ("U8", (32, 1))
    assert shapes["language_model.model.layers.0.self_attn.A_log"] == ("F32", (128,))
    assert "language_model.model.layers.3.self_attn.q_a_proj.weight" in shapes, "layer 4 of the list is layers.3"
    profile = profile_checkpoint(k3 / "checkpoint")
    assert {one.format for one in profile.packing} == {"plain", "mxfp4"}
    assert [(kind.name, kind.layer_indices) for kind in profile.layer_kinds] == [
        ("linear-attention+dense", (0,)),
        ("linear-attention+moe", (1, 2)),
        ("dsa+moe", (3,)),
        ("mla+moe", (4,)),
    ]
    assert shapes["language_model.model.layers.3.self_attn.indexer.weights_proj.weight"] == ("F32", (8, 64))
    assert shapes["vision_tower.encoder.blocks.1.wqkv.weight"] == ("F32", (48, 16))
    assert {"vision", "projector", "indexer"} <= set(profile.parameters.by_component)


@pytest.mark.slow
def test_it_is_adapted_end_to_end(k3: Path, tmp_path: Path) -> None:
    """From packed files, texts and pictures to an adapter that a fresh model loads; the held-out loss falls."""
    words = ["adapt", k3 / "checkpoint", "-c", "cpu-2", "-r", k3 / "recipe.yaml", "--run-dir", tmp_path / "run"]
    policy = ["--headless", "--policy", EXAMPLE / "policy.yaml"]
    done = subprocess.run([*PROGRAM, *map(str, words + policy)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(run["checks"]) == 12 and all(one["passed"] for one in run["checks"])
    losses = [one["loss"] for one in run["evaluations"]]
    assert losses[-1] < 0.8 * losses[0]
    targets = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert any("self_attn" in name for name in targets["target_modules"])
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    patterns = {one["pattern"] for one in plan["evidence"]["proposals"]}
    assert {"rms_norm", "swiglu", "experts", "router", "latent_norm", "gated_rms_norm"} <= patterns


@pytest.mark.slow
def test_a_gpu_plan_finds_the_family_and_its_operators_equal_none(k3: Path, tmp_path: Path) -> None:
    """The interpreter is chosen when kernels are imported, so it needs its own process."""
    pytest.importorskip("triton", reason="kernels need triton")
    file = Path(__file__).parent / "interpreted" / "checks_tiny_k3.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TINY_K3": str(k3)}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", f"--basetemp={tmp_path / 'inner'}"]
    command = ["timeout", "-k", "5", "400", sys.executable, "-m", "pytest", str(file), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
