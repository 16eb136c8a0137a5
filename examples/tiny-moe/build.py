"""Build examples/tiny-moe: a random tiny Mixtral, a byte-level tokenizer and sentences of a small grammar.

Needs numpy only. Every byte is the same on every machine: numbers come from the raw bits of PCG64, which numpy
keeps stable, by exact steps, and the writers are ours.
Legend: E experts, H hidden size, F inner width of an expert, V vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.building import main
from common.grammar import documents
from common.shards import write_json, write_sharded
from common.tokenizer import byte_alphabet, write_tokenizer

SOURCE = Path(__file__).resolve().parent
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(4)))
H, F, E, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 4, 2, 16, 2
V = len(SPECIAL) + 256
MAX_SHARD_BYTES = 256 * 1024
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "float32",
    "eos_token_id": 0,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": F,
    "max_position_embeddings": 256,
    "model_type": "mixtral",
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": E,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "router_aux_loss_coef": 0.0,
    "router_jitter_noise": 0.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": V,
}


def tensors() -> Iterator[tuple[str, str, np.ndarray]]:
    """All tensors under their hub names, float32; standard deviation 1/√fan-in, norms near one."""
    bits = np.random.PCG64(20260101)

    def uniform(*shape: int, deviation: float) -> tuple[str, np.ndarray]:
        upper = (bits.random_raw(math.prod(shape)) >> np.uint64(40)).astype(np.float32).reshape(shape)
        return "F32", (upper * np.float32(2**-23) - np.float32(1)) * np.float32(deviation * math.sqrt(3))

    def linear(out_features: int, in_features: int) -> tuple[str, np.ndarray]:
        return uniform(out_features, in_features, deviation=1 / math.sqrt(in_features))

    def norm() -> tuple[str, np.ndarray]:
        return "F32", np.float32(1) + uniform(H, deviation=0.1)[1]

    yield "model.embed_tokens.weight", *uniform(V, H, deviation=1.0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", *norm()
        yield f"{prefix}.self_attn.q_proj.weight", *linear(HEADS * HEAD_DIM, H)
        yield f"{prefix}.self_attn.k_proj.weight", *linear(KV_HEADS * HEAD_DIM, H)
        yield f"{prefix}.self_attn.v_proj.weight", *linear(KV_HEADS * HEAD_DIM, H)
        yield f"{prefix}.self_attn.o_proj.weight", *linear(H, HEADS * HEAD_DIM)
        yield f"{prefix}.post_attention_layernorm.weight", *norm()
        yield f"{prefix}.block_sparse_moe.gate.weight", *linear(E, H)
        for expert in range(E):
            yield f"{prefix}.block_sparse_moe.experts.{expert}.w1.weight", *linear(F, H)
            yield f"{prefix}.block_sparse_moe.experts.{expert}.w2.weight", *linear(H, F)
            yield f"{prefix}.block_sparse_moe.experts.{expert}.w3.weight", *linear(F, H)
    yield "model.norm.weight", *norm()
    yield "lm_head.weight", *linear(V, H)


def make(folder: Path) -> None:
    """Fill an empty folder with the checkpoint and the data."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    write_json(checkpoint / "config.json", CONFIG)
    write_json(checkpoint / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1})
    write_tokenizer(
        checkpoint,
        vocabulary=[*SPECIAL, *sorted(byte_alphabet())],
        merges=[],
        special=SPECIAL,
        split_digits=False,
        options={"eos_token": SPECIAL[0], "bos_token": SPECIAL[0], "pad_token": SPECIAL[1], "model_max_length": 256},
    )
    write_sharded(checkpoint, tensors(), MAX_SHARD_BYTES)
    for name, seed, count in (("train", 1, 256), ("held_out", 2, 48)):
        lines = (json.dumps({"text": text}) + "\n" for text in documents(seed, count))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(SOURCE, make, identity={}))
