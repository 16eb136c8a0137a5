"""Fuzz the checkpoint readers: ``python benchmarks/fuzz_readers.py [count]`` writes ``benchmarks/fuzz_readers.json``.

Each input is a sound tiny checkpoint with a few random changes to its configuration, its index or a weight file's
header. Readers may accept it or refuse it with the typed error; anything else is a defect and ends the run with the
input's number, from which the input can be made again. Same seed, same inputs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.schemas.errors import CheckpointError

OUT = Path(__file__).resolve().parent / "fuzz_readers.json"
SEED = 20261129
COUNT = 200_000

CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "vocab_size": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_LAYER = "model.layers.0."
SHAPES: dict[str, list[int]] = {
    "model.embed_tokens.weight": [8, 4],
    "lm_head.weight": [8, 4],
    "model.norm.weight": [4],
    f"{_LAYER}input_layernorm.weight": [4],
    f"{_LAYER}self_attn.q_proj.weight": [4, 4],
    f"{_LAYER}block_sparse_moe.gate.weight": [2, 4],
    **{f"{_LAYER}block_sparse_moe.experts.{e}.w{k}.weight": [6, 4] for e in (0, 1) for k in (1, 3)},
    **{f"{_LAYER}block_sparse_moe.experts.{e}.w2.weight": [4, 6] for e in (0, 1)},
}
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 1 << 31, 1 << 63, 10**30, 0.5, 1e308, "", "a", "../x", "\x00", "é" * 200, [], {}, [[]],
    [0], [-1, 4], [4, 0], [1 << 40, 1 << 40], {"a": 1}, {"model_type": "mixtral"}, "BF16", "F32", "F8_E4M3", "I4",
    {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "compressed-tensors"},
    {"quant_method": "mxfp4"}, [1] * 17, "model-00001-of-00001.safetensors", "/etc/passwd", "__metadata__",
)  # fmt: skip


def sound_header() -> dict[str, Any]:
    """A header whose tensors tile the data section."""
    table, place = {}, 0
    for name, shape in SHAPES.items():
        size = 2
        for dim in shape:
            size *= dim
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    return table


def change(value: Any, draw: random.Random) -> Any:
    """One random change somewhere in a JSON document."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        table = dict(value)
        key = draw.choice(list(table))
        action = draw.randrange(6)
        if action == 0:
            del table[key]
        elif action == 1:
            table[str(draw.choice(STRANGE))[:40]] = table[key]
        elif action == 2:
            table[key] = draw.choice(STRANGE)
        else:
            table[key] = change(table[key], draw)
        return table
    if isinstance(value, list) and value and draw.random() < 0.8:
        items = list(value)
        spot = draw.randrange(len(items))
        items[spot] = change(items[spot], draw)
        return items if draw.random() < 0.8 else items[:spot]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice((-2, -1, 1, 2, 1 << 20))
    return draw.choice(STRANGE)


def scramble(data: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut or repeated."""
    raw = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        spot = draw.randrange(len(raw)) if raw else 0
        action = draw.randrange(4)
        if action == 0 and raw:
            raw[spot] = draw.randrange(256)
        elif action == 1:
            raw = raw[:spot]
        elif action == 2:
            raw[spot:spot] = raw[max(0, spot - 9) : spot]
        else:
            raw[spot:spot] = draw.choice((b"[" * 3000, b"{", b'"', b"\xff", b"NaN", b"1e999", b"\\ud800"))
    return bytes(raw)


def write_input(folder: Path, number: int) -> None:
    """The ``number``-th checkpoint of the run."""
    draw = random.Random(SEED * 1_000_003 + number)
    documents: dict[str, Any] = {"config": CONFIG, "header": sound_header(), "index": None}
    if draw.random() < 0.4:
        documents["index"] = {"metadata": {}, "weight_map": dict.fromkeys(SHAPES, "model-00001-of-00001.safetensors")}
    for _ in range(draw.randrange(1, 4)):
        part = draw.choice([name for name, value in documents.items() if value is not None])
        documents[part] = change(documents[part], draw)
    texts = {name: json.dumps(value).encode("utf-8", "surrogatepass") for name, value in documents.items()}
    if draw.random() < 0.3:
        part = draw.choice(["config", "header"])
        texts[part] = scramble(texts[part], draw)
    for old in folder.iterdir():
        old.unlink()
    (folder / "config.json").write_bytes(texts["config"])
    length = len(texts["header"]) if draw.random() < 0.95 else draw.choice((0, 1, 7, 1 << 20, 1 << 62))
    data = length.to_bytes(8, "little") + texts["header"]
    size = 2 * sum(_product(shape) for shape in SHAPES.values()) + draw.choice((0, 0, 0, 0, -1, 1))
    name = "model.safetensors" if documents["index"] is None else "model-00001-of-00001.safetensors"
    (folder / name).write_bytes(data + b"\0" * max(0, size))
    if documents["index"] is not None:
        (folder / "model.safetensors.index.json").write_bytes(texts["index"])


def _product(shape: list[int]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total


def outcome(folder: Path) -> str:
    """``accepted``, or the code of the typed error; any other error is raised."""
    try:
        profile_checkpoint(folder)
    except CheckpointError as error:
        return error.code
    return "accepted"


def run(count: int, first: int = 0) -> dict[str, Any]:
    """Outcomes of ``count`` inputs.

    Raises:
        AssertionError: an input that gave another error, by number.
    """
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number in range(first, first + count):
            write_input(folder, number)
            try:
                seen[outcome(folder)] += 1
            except Exception as error:
                raise AssertionError(f"input {number}: {type(error).__name__}: {error}") from error
    return {"seed": SEED, "inputs": count, "outcomes": dict(sorted(seen.items()))}


if __name__ == "__main__":
    result = run(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
