"""Building on meta: nothing is loaded, nothing of the checkpoint runs, and buffers come back exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.checkpoints.buffers import non_persistent_buffers
from shardwright.checkpoints.build import build_on_meta, rebuild_buffers, state_shapes, tied_names
from shardwright.checkpoints.config import config_of, inert_config, read_config
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.schemas.errors import CheckpointError


def with_config(folder: Path, to: Path, **changes: Any) -> Path:
    to.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("case", ["mixtral", "t-dsv3", "gpt_oss", "granitemoe"])
def test_structure_is_the_models_and_all_is_on_meta(save_tiny: Any, case: str) -> None:
    folder, model = save_tiny(case)
    meta = build_on_meta(folder, torch.bfloat16)
    assert type(meta) is type(model)
    assert {n: p.shape for n, p in meta.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(p.is_meta for p in meta.parameters())
    wide = {name for name, value in meta.named_parameters() if value.dtype is not torch.bfloat16}
    assert all(name.endswith("mlp.gate.weight") for name in wide), "only routers may stay in fp32, as their class says"
    assert all(b.is_meta for b in meta.buffers())
    assert set(state_shapes(meta)) == set(model.state_dict())


@pytest.mark.parametrize("case", ["mixtral", "t-dsv3", "gpt_oss", "t-qw"])
@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5000.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0},
    ],
)
def test_rebuilt_buffers_equal_the_constructors(save_tiny: Any, case: str, rope: dict[str, Any] | None) -> None:
    """D22."""
    folder, model = save_tiny(case, **({"rope_parameters": rope} if rope else {}))
    meta = build_on_meta(folder, torch.bfloat16)
    names = rebuild_buffers(meta, "cpu")
    assert names == non_persistent_buffers(meta) and names
    expected = dict(model.named_buffers())
    for name in names:
        value = meta.get_buffer(name)
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
    assert all(p.is_meta for p in meta.parameters()), "parameters are left alone"


def test_a_buffer_that_cannot_be_recomputed_is_named(mixtral: tuple[Path, Any]) -> None:
    meta = build_on_meta(mixtral[0], torch.float32)
    meta.get_submodule("model.norm").register_buffer("stray", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match=r"model\.norm\.stray") as caught:
        rebuild_buffers(meta, "cpu")
    assert caught.value.code == "checkpoint/buffer-not-rebuilt"


def test_a_buffer_that_initialisation_leaves_unwritten_is_named(
    mixtral: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = build_on_meta(mixtral[0], torch.float32)
    monkeypatch.setattr(type(meta), "initialize_weights", lambda self: None)
    with pytest.raises(CheckpointError, match="inv_freq") as caught:
        rebuild_buffers(meta, "cpu")
    assert caught.value.code == "checkpoint/buffer-not-rebuilt"


def test_forward_of_a_materialised_model_equals_the_original(mixtral: tuple[Path, Any]) -> None:
    folder, model = mixtral
    meta = build_on_meta(folder, torch.float32)
    meta.load_state_dict(model.state_dict(), assign=True)
    rebuild_buffers(meta, "cpu")
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(meta(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-6)


def test_tied_weights_are_one_parameter(save_tiny: Any) -> None:
    folder, _ = save_tiny("mixtral", tie_word_embeddings=True)
    meta = build_on_meta(folder, torch.float32)
    assert tied_names(meta) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in state_shapes(meta)


def test_unknown_architecture(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    folder = with_config(mixtral[0], tmp_path, model_type="never_heard_of", architectures=["NeverHeardOf"])
    with pytest.raises(CheckpointError, match="never_heard_of") as caught:
        build_on_meta(folder, torch.float32)
    assert caught.value.code == "checkpoint/unknown-architecture"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_hidden_layers": -1},
        {"num_attention_heads": -4},
        {"hidden_act": "no_such_activation"},
        {"rope_scaling": {"rope_type": "no_such_rope", "factor": 2.0}},
        {"rope_parameters": 5},
    ],
)
def test_configs_that_the_class_refuses(mixtral: tuple[Path, Any], tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_on_meta(with_config(mixtral[0], tmp_path, **changes), torch.float32)
    assert caught.value.code == "checkpoint/config-contradiction"


def test_code_of_the_checkpoint_never_runs(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    """Every known door at once: remote code, custom attention, hub kernels, pickles."""
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w').write('x')\n"
    folder = with_config(
        mixtral[0],
        tmp_path / "checkpoint",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        trust_remote_code=True,
        custom_pipelines={"text-generation": {"impl": "evil.Pipeline"}},
        _attn_implementation="evil-org/evil-kernel",
        _attn_implementation_internal="evil-org/evil-kernel",
        attn_implementation="evil-org/evil-kernel:run",
        _experts_implementation="evil-org/evil-kernel",
        experts_implementation="evil-org/evil-kernel",
        quantization_config={"quant_method": "evil", "modules": "evil.py"},
        use_kernels=True,
        dtype="evil.Type",
        loader="evil-org/loader",
    )
    for name in ("evil.py", "modeling_mixtral.py", "configuration_mixtral.py", "__init__.py"):
        (folder / name).write_text(evil)
    model = build_on_meta(folder, torch.float32)
    assert not marker.exists()
    assert type(model).__module__ == "transformers.models.mixtral.modeling_mixtral"
    assert "evil" not in json.dumps(model.config.to_dict(), default=str)
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_executable_keys_are_dropped_at_every_depth() -> None:
    raw = {
        "hidden_size": 4,
        "_private": 1,
        "auto_map": {"a": "b.c"},
        "text_config": {"model_type": "x", "auto_map": {}, "quantization_config": {}, "num_heads": 2},
        "rope_scaling": {"rope_type": "yarn", "factor": 2, "_attn_implementation": "a/b"},
        "note": "org/name",
        "free_text": "a sentence with spaces",
        "flag": True,
        "known_text": "org/name",
        "limit": {"__float__": "Infinity"},
    }
    assert inert_config(raw, frozenset({"hidden_size", "rope_scaling", "known_text", "limit"})) == {
        "hidden_size": 4,
        "text_config": {"model_type": "x", "num_heads": 2},
        "rope_scaling": {"rope_type": "yarn", "factor": 2},
        "flag": True,
        "known_text": "org/name",
        "limit": float("inf"),
    }


BAD_CONFIGS = ["", "[]", "{", "3", "{}", '{"model_type": 3}', '{"model_type": ""}', "[" * 100_000, '{"a":1,"a":2}']


@pytest.mark.parametrize("text", [*BAD_CONFIGS, '{"model_type": "x", "architectures": 3}', "\ud800"])
def test_corrupt_configs(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert caught.value.code == "checkpoint/corrupt-config"


def test_missing_config_and_folder(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    for folder, code in ((tmp_path, "missing-config"), (tmp_path / "absent", "missing-folder")):
        with pytest.raises(CheckpointError) as caught:
            read_config(folder)
        assert caught.value.code == f"checkpoint/{code}"
    shutil.copy(mixtral[0] / "config.json", tmp_path / "file")
    with pytest.raises(CheckpointError):
        read_config(tmp_path / "file")


def test_nested_text_configs() -> None:
    nested = config_of({"model_type": "a", "text_config": {"model_type": "b", "hidden_size": 3}}, Path("."))
    assert (nested.model_type, nested.text_model_type, nested.count("hidden_size")) == ("a", "b", 3)
    flat = config_of({"model_type": "a", "hidden_size": 3}, Path("."))
    assert (flat.text_model_type, flat.count("n", "hidden_size")) == ("a", 3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
KEYS = st.sampled_from(["model_type", "architectures", "text_config", "num_experts", "hidden_size", "layer_types"])


@settings(max_examples=300, deadline=None)
@given(raw=st.dictionaries(KEYS | st.text(max_size=6), JSON, max_size=6) | JSON)
def test_random_configs_give_only_typed_errors(raw: Any) -> None:
    try:
        config = config_of(raw, Path("."))
        config.count("num_experts")
        inert_config(config.raw, frozenset({"hidden_size"}))
    except CheckpointError:
        return


def test_a10_a_checkpoint_with_code_of_its_own_is_counted_and_never_run(save_tiny: Any, tmp_path: Path) -> None:
    """Its constructor would read a tensor's value and leave a mark; headers give the counts without it."""
    folder = Path(save_tiny("mixtral")[0])
    counted = profile_checkpoint(folder).parameters
    mark, copy = tmp_path / "ran", tmp_path / "checkpoint"
    shutil.copytree(folder, copy)
    document = json.loads((copy / "config.json").read_text())
    document |= {
        "model_type": "house_made",
        "architectures": ["HouseMadeForCausalLM"],
        "auto_map": {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"},
    }
    (copy / "config.json").write_text(json.dumps(document))
    code = f"import pathlib, torch\npathlib.Path({str(mark)!r}).touch()\nclass Model(torch.nn.Module):\n"
    code += "    def __init__(self, config):\n        super().__init__()\n        self.size = torch.ones(()).item()\n"
    (copy / "modeling.py").write_text(code)
    profile = profile_checkpoint(copy)
    assert profile.parameters.total == counted.total and not profile.transformers_class
    with pytest.raises(CheckpointError, match="house_made") as caught:
        build_on_meta(copy, torch.float32)
    assert caught.value.code == "checkpoint/unknown-architecture" and caught.value.next_action
    assert not mark.exists()
