"""File names to parameters: equal to what transformers itself loads, whole or in part, and refused when unsound."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardwright.checkpoints.build import build_on_meta, state_shapes
from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.names import NameMap, natural_key
from shardwright.checkpoints.reader import ShardReader, read_parameter
from shardwright.schemas.errors import CheckpointError

Loaded = tuple[NameMap, ShardReader, dict[str, tuple[int, ...]]]


def load(folder: Path) -> Loaded:
    shapes = state_shapes(build_on_meta(folder, torch.float32))
    headers = read_headers(folder)
    return NameMap.for_checkpoint(read_config(folder), headers, shapes), ShardReader(folder, headers), shapes


def rewrite(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The same checkpoint as one file, with its tensors changed."""
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


CASES = ("mixtral", "t-lora", "t-qw", "t-dsv3", "granitemoe", "gpt_oss", "kimi_linear", "deepseek_v4")
"""``deepseek_v4`` is saved with ``model.norm.weight``, which a rule for the norm of an inner module also fits."""


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_the_one_transformers_loads(save_tiny: Any, case: str) -> None:
    folder, model = save_tiny(case)
    names, reader, shapes = load(folder)
    state = type(model).from_pretrained(folder).state_dict()
    assert (names.missing(), names.unused(), names.redundant()) == ((), (), ())
    assert set(shapes) == set(state)
    for name, shape in shapes.items():
        assert torch.equal(read_parameter(reader, names.reads(name), shape), state[name]), name
    assert reader.bytes_read == reader.headers.stored_bytes


def test_a8_per_expert_files_become_two_stacks_gate_first(t_lora: tuple[Path, Any]) -> None:
    folder, model = t_lora
    names, reader, shapes = load(folder)
    stem = "model.layers.0.mlp.experts"
    expected = [f"{stem}.{e}.{part}_proj.weight" for e in range(4) for part in ("gate", "up")]
    assert list(names.hub_names(f"{stem}.gate_up_proj")) == expected
    assert len(names.hub_names(f"{stem}.down_proj")) == 4
    gate = reader.read(f"{stem}.3.gate_proj.weight")
    stack = read_parameter(reader, names.reads(f"{stem}.gate_up_proj"), shapes[f"{stem}.gate_up_proj"])
    assert torch.equal(stack[3, :16], gate)
    assert torch.equal(stack, model.get_parameter(f"{stem}.gate_up_proj"))
    experts = [name for name in reader.headers.tensors if ".experts." in name]
    assert len(experts) == 24


def test_an_expert_rank_reads_its_experts_only(mixtral: tuple[Path, Any]) -> None:
    folder, model = mixtral
    names, reader, shapes = load(folder)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    part = read_parameter(reader, names.reads(name), shapes[name], ((2, 4),))
    assert torch.equal(part, model.get_parameter(name)[2:4])
    assert reader.bytes_read == part.numel() * 4


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_of_a_stack(mixtral: tuple[Path, Any], data: st.DataObject) -> None:
    folder, model = mixtral
    name = "model.layers.0.mlp.experts.gate_up_proj"
    names, reader, shapes = _loaded(folder)
    box = []
    for size in shapes[name]:
        low = data.draw(st.integers(0, size))
        box.append((low, data.draw(st.integers(low, size))))
    part = read_parameter(reader, names.reads(name), shapes[name], tuple(box))
    assert torch.equal(part, model.get_parameter(name)[tuple(slice(*pair) for pair in box)])


_CACHE: dict[Path, Loaded] = {}


def _loaded(folder: Path) -> Loaded:
    if folder not in _CACHE:
        _CACHE[folder] = load(folder)
    return _CACHE[folder]


def code_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return caught.value.code.removeprefix("checkpoint/")


def test_a_missing_expert_is_refused(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    gone = "model.layers.0.block_sparse_moe.experts.2.w2.weight"

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[gone]

    def renumber(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.block_sparse_moe.experts.7.w2.weight"] = tensors.pop(gone)

    for place, change in enumerate((drop, renumber)):
        assert code_of(rewrite(mixtral[0], tmp_path / str(place), change)) == "shape-mismatch"


def test_half_a_gated_pair_is_refused(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".w3." in name]:
            del tensors[name]

    assert code_of(rewrite(mixtral[0], tmp_path / "a", drop)) == "shape-mismatch"


def test_experts_of_unequal_shape_are_refused(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    def turn(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
        tensors[name] = tensors[name].T.contiguous()

    assert code_of(rewrite(mixtral[0], tmp_path / "a", turn)) == "unsupported-layout"


def test_missing_and_unused_are_listed(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_projection.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")

    names, _, _ = load(rewrite(mixtral[0], tmp_path / "a", change))
    assert names.missing() == ("model.layers.0.self_attn.q_proj.weight",)
    assert names.unused() == ("model.layers.0.self_attn.q_projection.weight",)
    with pytest.raises(CheckpointError) as caught:
        names.reads("model.layers.0.self_attn.q_proj.weight")
    assert caught.value.code == "checkpoint/missing-tensor"


def test_tied_heads_prediction_layers_and_old_rotary_buffers_are_left_out(save_tiny: Any, tmp_path: Path) -> None:
    folder, _ = save_tiny("mixtral", tie_word_embeddings=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(32, 32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    names, _, shapes = load(rewrite(folder, tmp_path / "a", add))
    assert "lm_head.weight" not in shapes
    assert len(names.redundant()) == 3
    assert (names.missing(), names.unused()) == ((), ())


def test_a_base_models_files_load_into_the_model_with_a_head(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    names, _, _ = load(rewrite(mixtral[0], tmp_path / "a", strip))
    assert (names.missing(), names.unused()) == ((), ())


def test_deepseek_v4s_published_names_are_read_too(save_tiny: Any, tmp_path: Path) -> None:
    """``embed.weight``, ``norm.weight``, ``layers.0.attn…``: without the prefix that transformers saves."""
    folder, model = save_tiny("deepseek_v4")
    other = {f"hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}

    def publish(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            bare = name.removeprefix("model.").replace("embed_tokens.weight", "embed.weight")
            tensors[other.get(bare, bare)] = tensors.pop(name)

    names, reader, shapes = load(rewrite(folder, tmp_path / "a", publish))
    assert (names.missing(), names.unused()) == ((), ())
    state = model.state_dict()
    assert all(torch.equal(read_parameter(reader, names.reads(name), shapes[name]), state[name]) for name in shapes)


def test_packed_weights_are_never_read_as_plain_ones(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)

    names, _, _ = load(rewrite(mixtral[0], tmp_path / "a", pack))
    assert (names.missing(), names.unused()) == ((), ())
    with pytest.raises(CheckpointError) as caught:
        names.reads(name)
    assert caught.value.code == "checkpoint/packed-weights"


def test_mixed_dtypes_of_one_parameter_are_refused(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
        tensors[name] = tensors[name].to(torch.bfloat16)

    names, reader, shapes = load(rewrite(mixtral[0], tmp_path / "a", cast))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError) as caught:
        read_parameter(reader, names.reads(name), shapes[name])
    assert caught.value.code == "checkpoint/mixed-dtypes"


def test_natural_order() -> None:
    names = [f"experts.{i}.w" for i in (10, 9, 2, 0, 1)]
    assert sorted(names, key=natural_key) == [f"experts.{i}.w" for i in (0, 1, 2, 9, 10)]


def test_transposed_stacks_are_turned(save_tiny: Any, tmp_path: Path) -> None:
    """Families whose files keep [E, in, out] (Qwen3-VL) go through transformers' Transpose."""
    from transformers.core_model_loading import Transpose

    from shardwright.checkpoints.conversion import Symbolic, run_chain

    source = {"p": [Symbolic.of_file("t", (4, 32, 96))]}
    done = run_chain([Transpose(1, 2)], source, ["p"], ["q"], {})["q"]
    assert done.shape == (4, 96, 32)
    assert done.pieces[0].axes == (0, 2, 1)
    folder = tmp_path / "a"
    folder.mkdir()
    value = torch.randn(4, 32, 96)
    save_file({"t": value}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    from shardwright.checkpoints.names import TensorRead

    piece = done.pieces[0]
    read = TensorRead("t", "model.safetensors", piece.target, piece.source, piece.axes)
    reader = ShardReader(folder, read_headers(folder))
    box = ((1, 3), (10, 20), (5, 32))
    assert torch.equal(read_parameter(reader, (read,), done.shape, box), value.transpose(1, 2)[1:3, 10:20, 5:32])
