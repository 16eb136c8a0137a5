"""examples/smol-moe: the upcycled model equals the dense original; text is split by file.

Uses the build that ``make adapt`` uses, and makes it if it is absent. The reference is the dense model as
Transformers itself reads it from the GGUF file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from common.smollm2 import find_gguf
from common.stdlib_text import is_held_out
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from shardwright.schemas.policy import Policy
from shardwright.schemas.recipe import Recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples" / "smol-moe"
PROSE = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; "
    "and darkness was upon the face of the deep."
)
CODE = "def fibonacci(n):\n    if n <= 1:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
EXPERTS, LAYERS = 4, 30


@pytest.fixture(scope="module")
def built() -> Path:
    out = ROOT / ".cache" / "examples" / "smol-moe"
    command = [sys.executable, str(SOURCE / "build.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def moe(built: Path) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(
        built / "checkpoint", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.fixture(scope="module")
def dense() -> PreTrainedModel:
    path = find_gguf(ROOT / ".cache" / "downloads")
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def loss(model: PreTrainedModel, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


def test_the_upcycled_model_equals_the_dense_original(
    built: Path, moe: PreTrainedModel, dense: PreTrainedModel
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built / "checkpoint")
    texts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in (PROSE, CODE)]
    original = [loss(dense, ids) for ids in texts]
    assert original == pytest.approx([2.598, 0.769], abs=1e-3)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.copy_(parameter.bfloat16())  # the one change that storage makes
    for ids, exact in zip(texts, original, strict=True):
        torch.testing.assert_close(logits(moe, ids), logits(dense, ids), rtol=1e-3, atol=1e-3)
        assert loss(moe, ids) == pytest.approx(loss(dense, ids), abs=1e-4)
        assert loss(moe, ids) == pytest.approx(exact, abs=1e-2)


def test_routing_is_uneven_and_its_choice_does_not_change_the_output(built: Path, moe: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built / "checkpoint")
    ids = tokenizer(PROSE + CODE, return_tensors="pt")["input_ids"]
    gates = [layer.mlp.gate for layer in moe.model.layers]
    chosen: list[torch.Tensor] = []
    hooks = [gate.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for gate in gates]
    before = logits(moe, ids)
    for hook in hooks:
        hook.remove()
    loads = torch.stack([torch.bincount(index.flatten(), minlength=EXPERTS) for index in chosen])
    assert loads.shape == (LAYERS, EXPERTS) and (loads.sum(1) == 2 * ids.numel()).all()
    assert (loads.sum(0) > 0).all()
    assert (loads.max(1).values >= 2 * loads.min(1).values).float().mean() > 0.5
    saved = [gate.weight.clone() for gate in gates]
    with torch.no_grad():
        for gate in gates:
            gate.weight.neg_()
    try:
        torch.testing.assert_close(logits(moe, ids), before, rtol=1e-3, atol=1e-3)
    finally:
        for gate, weight in zip(gates, saved, strict=True):
            gate.weight.data.copy_(weight)


def test_counts_shape_and_storage(built: Path, moe: PreTrainedModel) -> None:
    hidden, inner, vocabulary = 576, 1536, 49152
    attention = 2 * hidden * hidden + 2 * hidden * 192
    layer = attention + EXPERTS * 3 * hidden * inner + EXPERTS * hidden + 2 * hidden
    expected = vocabulary * hidden + LAYERS * layer + hidden  # the head is the embedding
    assert sum(parameter.numel() for parameter in moe.parameters()) == expected == 373_462_848
    index = json.loads((built / "checkpoint" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_parameters": expected, "total_size": 2 * expected}
    assert len(set(index["weight_map"].values())) == 4
    assert "model.layers.29.block_sparse_moe.experts.3.w2.weight" in index["weight_map"]


def test_the_tokenizer_is_the_original_one(built: Path) -> None:
    path = find_gguf(ROOT / ".cache" / "downloads")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = AutoTokenizer.from_pretrained(built / "checkpoint")
    for text in (PROSE, CODE, "In 1987, 12345\tÜnïcode ✓\n\n", "<|im_start|>user\nHi<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert (ours.eos_token_id, ours.pad_token_id, ours.bos_token_id) == (2, 2, 1)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


def test_no_file_gives_text_to_both_sets(built: Path) -> None:
    sets = {
        kind: [json.loads(line) for line in (built / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()]
        for kind in ("train", "held_out")
    }
    files = {kind: {row["file"] for row in rows} for kind, rows in sets.items()}
    listed = json.loads((built / "files.json").read_bytes())
    assert all(sorted(files[kind]) == listed[kind] for kind in files)
    assert all(is_held_out(name) for name in files["held_out"]) and not any(map(is_held_out, files["train"]))
    assert len(files["train"]) > 100 and len(files["held_out"]) > 15
    assert len({row["file"] for row in sets["held_out"][:8]}) >= 5
    assert not {row["text"] for row in sets["train"]} & {row["text"] for row in sets["held_out"]}
    library = Path(sysconfig.get_path("stdlib"))
    assert all(row["text"] in (library / row["file"]).read_text(encoding="utf-8") for row in sets["held_out"])


def test_recipe_policy_and_prompt(built: Path) -> None:
    recipe = Recipe.model_validate(yaml.safe_load((built / "recipe.yaml").read_text()))
    assert recipe.precision.base == "float32" and set(recipe.lora.targets) == {"attention", "experts"}
    assert Policy.model_validate(yaml.safe_load((SOURCE / "policy.yaml").read_text())).approve
    assert is_held_out("glob.py")
    assert recipe.prompt in (Path(sysconfig.get_path("stdlib")) / "glob.py").read_text(encoding="utf-8")
