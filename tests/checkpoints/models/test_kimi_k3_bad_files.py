"""Files of Kimi K3's layout with one thing wrong: typed errors that name it, before any weight is used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.runtime.files import open_files
from shardwright.schemas.errors import CheckpointError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny-k3"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"
RATES = "language_model.model.layers.0.self_attn.A_log"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("k3") / "built"
    subprocess.run([sys.executable, str(EXAMPLE / "build.py"), "--out", str(out)], check=True, capture_output=True)
    return out / "checkpoint"


@pytest.fixture
def checkpoint(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "checkpoint"))


def change(folder: Path, name: str, edit: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Replace one tensor, or leave it out of file and index."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    path = folder / index["weight_map"][name]
    held = load_file(path)
    edited = edit(held.pop(name))
    if edited is None:
        del index["weight_map"][name]
    else:
        held[name] = edited
    save_file(held, path)
    index["metadata"] = {}
    index_path.write_text(json.dumps(index))


def test_missing_scales_are_an_unknown_packing(checkpoint: Path) -> None:
    change(checkpoint, f"{EXPERT}_scale", lambda _: None)
    for read in (profile_checkpoint, lambda folder: open_files(folder, torch.float32)):
        with pytest.raises(CheckpointError, match=EXPERT.replace(".", r"\.")) as caught:
            read(checkpoint)
        assert caught.value.code == "checkpoint/unknown-quantization"


def test_scales_of_the_wrong_size_are_refused(checkpoint: Path) -> None:
    change(checkpoint, f"{EXPERT}_scale", lambda scale: scale[:-1])
    with pytest.raises(CheckpointError) as caught:
        profile_checkpoint(checkpoint)
    assert caught.value.code == "checkpoint/unknown-quantization"


@pytest.mark.parametrize("length", [3, 96, 127, 256])
def test_rates_of_another_length_are_refused(checkpoint: Path, length: int) -> None:
    """The published files pad A_log to 128; any other length belongs to another file or another model."""
    change(checkpoint, RATES, lambda _: np.zeros(length, np.float32))
    with pytest.raises(CheckpointError, match=f"A_log.*{length}|{length}.*A_log") as caught:
        open_files(checkpoint, torch.float32)
    assert caught.value.code == "checkpoint/shape-mismatch"


def test_a_missing_part_of_the_tower_is_named(checkpoint: Path) -> None:
    name = "vision_tower.encoder.blocks.1.wo.weight"
    change(checkpoint, name, lambda _: None)
    assert open_files(checkpoint, torch.float32)[1].names.missing() == (name,)
