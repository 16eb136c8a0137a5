"""Packed stacks from files: some experts at a time, in any order of places, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.checkpoints.layouts import LAYOUTS
from shardwright.checkpoints.reader import ShardReader
from shardwright.kernels.packed_experts.reference import dequantise_reference
from shardwright.kernels.packed_experts.storage import PackedStack
from shardwright.runtime.experts import packed_load
from shardwright.runtime.experts.packed import register_stack, stack_of
from shardwright.runtime.experts.packed_load import experts_at_once, stack_fills
from shardwright.runtime.files import open_files
from shardwright.runtime.load.decode import read_base

NAME = "model.layers.1.mlp.experts.down_proj"


def _loaded(files: Any, model: Any, kind: Any, experts: tuple[int, ...]) -> PackedStack:
    _, o, i = model.get_parameter(NAME).shape
    module: Any = torch.nn.Module()
    module.packing = kind
    register_stack(module, "down_proj", (len(experts), o, i), kind)
    module.to_empty(device="cpu")
    held = stack_of(module, "down_proj")
    assert isinstance(held, PackedStack)
    layout = LAYOUTS[files.config.text_model_type]
    with ShardReader(files.folder, files.headers) as reader, torch.no_grad():
        for fill in stack_fills(held, experts, (0, o), NAME, reader, files.names, layout):
            assert bool(fill.place([reader.read(part.tensor, part.box) for part in fill.parts]))
    return held


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
@pytest.mark.parametrize("experts", [(0, 1, 2, 3), (3, 0, 2), (1, 1, 2)])
def test_a_stack_read_expert_by_expert_is_the_stack(
    packed: Any, monkeypatch: pytest.MonkeyPatch, kind: str, experts: tuple[int, ...]
) -> None:
    """The values that it decodes to are those of decoding at load, whatever fits at once."""
    model, files = open_files(packed(kind).checkpoint, torch.float32)
    with ShardReader(files.folder, files.headers) as reader:
        whole = read_base(reader, files.names, NAME, tuple(model.get_parameter(NAME).shape))
    for most in (1, packed_load.FILL_BYTES):
        monkeypatch.setattr(packed_load, "FILL_BYTES", most)
        held = _loaded(files, model, kind, experts)
        assert torch.equal(dequantise_reference(held).float(), whole[list(experts)].float())


@pytest.mark.parametrize(("kind", "each"), [("mxfp4", 6144 * 3584 // 2), ("fp8", 2048 * 3584)])
def test_experts_of_a_fill_are_bounded(kind: Any, each: int) -> None:
    """Kimi K3's 896 experts: as many as the bound holds, one at least."""
    held = PackedStack(
        torch.empty(
            (896, 6144 if kind == "mxfp4" else 2048, 3584 // (2 if kind == "mxfp4" else 1)),
            dtype=torch.uint8,
            device="meta",
        ),
        torch.empty((896, 1, 1), device="meta"),
        kind,
    )
    count = experts_at_once(held)
    assert count >= 1 and count * each <= packed_load.FILL_BYTES < (count + 1) * each
