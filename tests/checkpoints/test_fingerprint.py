"""The fingerprint changes with whatever decides how a checkpoint is read, and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoints.fingerprint import fingerprint


@pytest.fixture()
def folder(mixtral: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixtral[0], tmp_path / "copy"))


def test_same_files_elsewhere_have_the_same_fingerprint(mixtral: tuple[Path, Any], folder: Path) -> None:
    (folder / "README.md").write_text("not part of it")
    assert fingerprint(folder) == fingerprint(mixtral[0])


def test_config_headers_and_tokenizer_are_covered(folder: Path, published: Any) -> None:
    digests = {fingerprint(folder).digest}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    digests.add(fingerprint(folder).digest)
    (folder / "tokenizer.json").write_text("{}")
    digests.add(fingerprint(folder).digest)
    (folder / "tokenizer.json").write_text("{ }")
    digests.add(fingerprint(folder).digest)
    for path in folder.glob("model*"):
        path.unlink()
    for name in ("a", "b"):
        published.write_file(folder / "model.safetensors", [(name, "F32", (2, 3))])
        digests.add(fingerprint(folder).digest)
    published.write_file(folder / "model.safetensors", [("b", "F32", (3, 2))])
    digests.add(fingerprint(folder).digest)
    assert len(digests) == 7


def test_weight_values_are_not_read(folder: Path) -> None:
    before = fingerprint(folder)
    path = max(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprint(folder) == before
