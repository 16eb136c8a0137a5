"""Build examples/smol-moe: SmolLM2-135M-Instruct upcycled to a mixture of experts, and real text to adapt it to.

Each dense MLP is copied into E experts behind a new router that picks two and normalises their weights to one, so
the model's output is the dense original's, whatever the router says; all layers stay. Weights are stored in
bfloat16: the source has 4 and 8 bits a weight, so half the disk and load time costs no information that matters,
and the upcycled model still equals the dense one with the same rounding.

The checkpoint's bytes are the same on every machine; the text depends on the Python in use and is recorded.
Legend: E experts, H hidden size.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.building import ROOT, main
from common.shards import to_bfloat16_bits, write_json, write_sharded
from common.smollm2 import DenseModel, find_gguf
from common.stdlib_text import write_sets
from common.tokenizer import write_tokenizer

SOURCE = Path(__file__).resolve().parent
E, TOP_K = 4, 2
ROUTER_DEVIATION = 0.02
CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""
MAX_SHARD_BYTES = 200 * 10**6
RECORDED = ("files.json", "held_out.jsonl", "train.jsonl")
EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's hub name of an expert's matrix → its name in the dense MLP."""


def config(dense: DenseModel) -> dict[str, Any]:
    """``config.json`` of the upcycled model."""
    hidden, heads = dense.integer("llama.embedding_length"), dense.integer("llama.attention.head_count")
    return {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": dense.integer("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": dense.integer("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": dense.integer("llama.feed_forward_length"),
        "max_position_embeddings": dense.integer("llama.context_length"),
        "model_type": "mixtral",
        "num_attention_heads": heads,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": dense.integer("llama.block_count"),
        "num_key_value_heads": dense.integer("llama.attention.head_count_kv"),
        "num_local_experts": E,
        "output_router_logits": False,
        "pad_token_id": dense.integer("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": float(dense.field("llama.rope.freq_base")), "rope_type": "default"},
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": dense.integer("llama.vocab_size"),
    }


def tensors(dense: DenseModel) -> Iterator[tuple[str, str, np.ndarray]]:
    """All tensors under their hub names, bfloat16; the output head is the embedding, as in the original."""
    bits = np.random.PCG64(20260102)

    def stored(name: str) -> tuple[str, np.ndarray]:
        return "BF16", to_bfloat16_bits(dense.weight(name))

    def router(hidden: int) -> tuple[str, np.ndarray]:
        upper = (bits.random_raw(E * hidden) >> np.uint64(40)).astype(np.float32).reshape(E, hidden)
        unit = upper * np.float32(2**-23) - np.float32(1)
        return "BF16", to_bfloat16_bits(unit * np.float32(ROUTER_DEVIATION * math.sqrt(3)))

    yield "model.embed_tokens.weight", *stored("embed_tokens")
    for layer in range(dense.integer("llama.block_count")):
        prefix = f"layers.{layer}"
        for part in ("input_layernorm", *(f"self_attn.{p}_proj" for p in "qkvo"), "post_attention_layernorm"):
            yield f"model.{prefix}.{part}.weight", *stored(f"{prefix}.{part}")
        moe = f"model.{prefix}.block_sparse_moe"
        yield f"{moe}.gate.weight", *router(dense.integer("llama.embedding_length"))
        matrices = {hub: stored(f"{prefix}.mlp.{part}") for hub, part in EXPERT_PARTS.items()}
        for expert in range(E):
            for hub, matrix in matrices.items():
                yield f"{moe}.experts.{expert}.{hub}.weight", *matrix
    yield "model.norm.weight", *stored("norm")


def write_text_files(checkpoint: Path, dense: DenseModel) -> None:
    """The configuration, the generation defaults and the tokenizer."""
    values = config(dense)
    write_json(checkpoint / "config.json", values)
    defaults = {key: values[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(checkpoint / "generation_config.json", defaults)
    vocabulary = dense.field("tokenizer.ggml.tokens")
    kinds = dense.field("tokenizer.ggml.token_type")
    write_tokenizer(
        checkpoint,
        vocabulary=vocabulary,
        merges=dense.field("tokenizer.ggml.merges"),
        special=[token for token, kind in zip(vocabulary, kinds, strict=True) if kind == CONTROL_TOKEN],
        split_digits=True,
        options={
            **{key.replace("_id", ""): vocabulary[number] for key, number in defaults.items()},
            "unk_token": vocabulary[dense.integer("tokenizer.ggml.unknown_token_id")],
            "model_max_length": dense.integer("llama.context_length"),
            "chat_template": dense.field("tokenizer.chat_template"),
        },
    )


def make(folder: Path) -> None:
    """Fill an empty folder with the checkpoint and the data."""
    dense = DenseModel.open(find_gguf(ROOT / ".cache" / "downloads"))
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    write_text_files(checkpoint, dense)
    write_sharded(checkpoint, tensors(dense), MAX_SHARD_BYTES)
    write_sets(folder)


if __name__ == "__main__":
    sys.exit(main(SOURCE, make, identity={"python": platform.python_version()}, recorded=RECORDED))
