"""Packed parameters by the names of one expert, beside the whole map of every tensor."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shardwright.checkpoints.build import build_on_meta, state_shapes
from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.packed_names import packed_parameters


def published() -> ModuleType:
    path = Path(__file__).with_name("published.py")
    if "published" not in sys.modules:
        spec = importlib.util.spec_from_file_location("published", path)
        assert spec is not None and spec.loader is not None
        sys.modules["published"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["published"])
    return sys.modules["published"]


@pytest.fixture(scope="module", params=["gpt-oss", "deepseek", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    layouts, path = published(), tmp_path_factory.mktemp(request.param)
    few = replace(layouts.DEEPSEEK_V3, layers=4, experts=8, mtp=False)
    made = {
        "gpt-oss": lambda: layouts.gpt_oss(2, 4),
        "deepseek": lambda: layouts.latent(few),
        "plain": lambda: layouts.latent(replace(few, packed=False)),
    }
    layouts.write(path, made[request.param]())
    return request.param, path


def test_it_is_what_the_whole_map_says(folder: tuple[str, Path]) -> None:
    name, path = folder
    model = build_on_meta(path, torch.bfloat16)
    found = packed_parameters(path, model)
    names = NameMap.for_checkpoint(read_config(path), read_headers(path), state_shapes(model), model)
    expected = {}
    for parameter, _ in model.named_parameters():
        formats = {names.logical(piece.tensor).format for piece in names.pieces(parameter)} - {"plain"}
        assert len(formats) <= 1
        expected |= dict.fromkeys([parameter] if formats else [], *formats)
    assert found == expected
    assert {"gpt-oss": {"gpt-oss-mxfp4"}, "deepseek": {"fp8-block"}, "plain": set()}[name] == set(found.values())
    assert not any("norm" in parameter or parameter.endswith("gate.weight") for parameter in found)
