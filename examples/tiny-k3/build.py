"""Build examples/tiny-k3: Kimi K3 in small, in its own layout: delta-rule, sparse and dense gated latent attention,
packed experts, a vision tower; and data of texts and pictures.

Names, 1-indexed layer lists, padded A_log, fp32 side tensors and MXFP4 experts are those of the published files; sizes
are not, and the first of the two latent attentions is the sparse form. Needs numpy only; every byte is the same on
every machine.
Legend: E experts, H hidden, L latent width of routed experts, F expert width, V vocabulary.
"""

from __future__ import annotations

import base64
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
SPECIAL = (
    "<|endoftext|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|media_pad|>",
    *(f"<|reserved_{i}|>" for i in range(3)),
)
H, L, F, E, LAYERS, DENSE = 64, 32, 32, 16, 5, 96
HEADS, NOPE, EXTRA, VALUE, Q_RANK, KV_RANK = 4, 16, 8, 16, 24, 16
LINEAR_HEADS, LINEAR_DIM, A_LOG = 3, 16, 128
FULL_ATTENTION, SPARSE_ATTENTION = (4, 5), (4,)
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 8, 8, 16
PATCH, TOWER, TOWER_HEADS, TOWER_MLP, TOWER_LAYERS, TABLE = 4, 16, 2, 32, 2, 8
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "grey": (128, 128, 128)}
V = len(SPECIAL) + 256
GROUP, SCALE = 32, 122
"""Columns that share a scale, and that scale: 2^(122 − 127) times 0 to 6 gives a deviation near 1/√32."""

MAX_SHARD_BYTES = 256 * 1024
TEXT = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "hidden_size": H,
    "intermediate_size": DENSE,
    "moe_intermediate_size": F,
    "routed_expert_hidden_size": L,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": EXTRA,
    "v_head_dim": VALUE,
    "num_experts": E,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "moe_router_activation_func": "sigmoid",
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "full_attn_layers": list(FULL_ATTENTION),
        "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in FULL_ATTENTION],
        "sparse_attn_layers": list(SPARSE_ATTENTION),
        "num_heads": LINEAR_HEADS,
        "head_dim": LINEAR_DIM,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM,
    "index_topk": INDEX_TOPK,
    "vocab_size": V,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
VISION = {
    "patch_size": PATCH,
    "init_pos_emb_height": TABLE,
    "init_pos_emb_width": TABLE,
    "init_pos_emb_time": 4,
    "vt_hidden_size": TOWER,
    "vt_intermediate_size": TOWER_MLP,
    "vt_num_hidden_layers": TOWER_LAYERS,
    "vt_num_attention_heads": TOWER_HEADS,
    "qkv_hidden_size": TOWER,
    "mm_hidden_size": TOWER,
    "text_hidden_size": H,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
}
CONFIG = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "auto_map": {"AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration"},
    "text_config": TEXT,
    "vision_config": VISION,
    "media_placeholder_token_id": SPECIAL.index("<|media_pad|>"),
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}


class Draws:
    """Numbers of one stream of raw bits."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.PCG64(seed)

    def raw(self, *shape: int) -> np.ndarray:
        return self.bits.random_raw(math.prod(shape)).reshape(shape)

    def uniform(self, *shape: int, deviation: float) -> tuple[str, np.ndarray]:
        """Around zero."""
        upper = (self.raw(*shape) >> np.uint64(40)).astype(np.float32)
        return "F32", (upper * np.float32(2**-23) - np.float32(1)) * np.float32(deviation * math.sqrt(3))

    def linear(self, rows: int, columns: int) -> tuple[str, np.ndarray]:
        """Deviation 1/√fan-in."""
        return self.uniform(rows, columns, deviation=1 / math.sqrt(columns))

    def norm(self, size: int) -> tuple[str, np.ndarray]:
        """Near one."""
        return "F32", np.float32(1) + self.uniform(size, deviation=0.1)[1]

    def packed(self, name: str, rows: int, columns: int) -> Iterator[tuple[str, str, np.ndarray]]:
        """MXFP4: two codes a byte, one scale for ``GROUP`` columns."""
        codes = (self.raw(rows, columns // 2) >> np.uint64(56)).astype(np.uint8)
        yield f"{name}_packed", "U8", codes
        yield f"{name}_scale", "U8", np.full((rows, columns // GROUP), SCALE, np.uint8)


def tensors() -> Iterator[tuple[str, str, np.ndarray]]:
    """All tensors under their hub names."""
    draw = Draws(20260727)
    for name, dtype, values in language(draw):
        yield f"language_model.{name}", dtype, values
    yield from vision(Draws(20260728))


def vision(draw: Draws) -> Iterator[tuple[str, str, np.ndarray]]:
    """Vision tower and projector."""
    tower, merged = "vision_tower", 4 * TOWER
    flat = 3 * PATCH * PATCH
    yield f"{tower}.patch_embed.proj.weight", "F32", draw.linear(TOWER, flat)[1].reshape(TOWER, 3, PATCH, PATCH)
    yield f"{tower}.patch_embed.pos_emb.weight", *draw.uniform(TABLE, TABLE, TOWER, deviation=0.1)
    for index in range(TOWER_LAYERS):
        block = f"{tower}.encoder.blocks.{index}"
        yield f"{block}.norm0.weight", *draw.norm(TOWER)
        yield f"{block}.norm1.weight", *draw.norm(TOWER)
        yield f"{block}.wqkv.weight", *draw.linear(3 * TOWER, TOWER)
        yield f"{block}.wo.weight", *draw.linear(TOWER, TOWER)
        yield f"{block}.mlp.fc0.weight", *draw.linear(TOWER_MLP, TOWER)
        yield f"{block}.mlp.fc1.weight", *draw.linear(TOWER, TOWER_MLP)
    yield f"{tower}.encoder.final_layernorm.weight", *draw.norm(TOWER)
    yield "mm_projector.proj.0.weight", *draw.linear(merged, merged)
    yield "mm_projector.proj.2.weight", *draw.linear(H, merged)
    yield "mm_projector.post_norm.weight", *draw.norm(H)


def language(draw: Draws) -> Iterator[tuple[str, str, np.ndarray]]:
    """Embedding, layers, final mix and head."""
    yield "model.embed_tokens.weight", *draw.uniform(V, H, deviation=1.0)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield f"{layer}.{name}.weight", *draw.norm(H)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            yield f"{layer}.{name}.weight", *draw.uniform(1, H, deviation=0.1)
        yield from (latent if index + 1 in FULL_ATTENTION else delta)(draw, f"{layer}.self_attn")
        if index + 1 in SPARSE_ATTENTION:
            yield from indexer(draw, f"{layer}.self_attn.indexer")
        yield from (dense(draw, f"{layer}.mlp", DENSE) if index == 0 else experts(draw, f"{layer}.block_sparse_moe"))
    yield "model.output_attn_res_norm.weight", *draw.norm(H)
    yield "model.output_attn_res_proj.weight", *draw.uniform(1, H, deviation=0.1)
    yield "model.norm.weight", *draw.norm(H)
    yield "lm_head.weight", *draw.linear(V, H)


def delta(draw: Draws, name: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """Delta-rule attention; A_log is padded with zeros."""
    inner = LINEAR_HEADS * LINEAR_DIM
    for part in "qkv":
        yield f"{name}.{part}_proj.weight", *draw.linear(inner, H)
        yield f"{name}.{part}_conv1d.weight", *draw.uniform(inner, 1, 4, deviation=0.5)
    yield f"{name}.f_a_proj.weight", *draw.linear(LINEAR_DIM, H)
    yield f"{name}.f_b_proj.weight", *draw.linear(inner, LINEAR_DIM)
    yield f"{name}.b_proj.weight", *draw.linear(LINEAR_HEADS, H)
    rates = np.zeros(A_LOG, np.float32)
    rates[:LINEAR_HEADS] = draw.uniform(LINEAR_HEADS, deviation=0.5)[1]
    yield f"{name}.A_log", "F32", rates
    yield f"{name}.dt_bias", *draw.uniform(inner, deviation=1.0)
    yield f"{name}.g_proj.weight", *draw.linear(inner, H)
    yield f"{name}.o_norm.weight", *draw.norm(LINEAR_DIM)
    yield f"{name}.o_proj.weight", *draw.linear(H, inner)


def latent(draw: Draws, name: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """Gated latent attention."""
    yield f"{name}.q_a_proj.weight", *draw.linear(Q_RANK, H)
    yield f"{name}.q_a_layernorm.weight", *draw.norm(Q_RANK)
    yield f"{name}.q_b_proj.weight", *draw.linear(HEADS * (NOPE + EXTRA), Q_RANK)
    yield f"{name}.kv_a_proj_with_mqa.weight", *draw.linear(KV_RANK + EXTRA, H)
    yield f"{name}.kv_a_layernorm.weight", *draw.norm(KV_RANK)
    yield f"{name}.kv_b_proj.weight", *draw.linear(HEADS * (NOPE + VALUE), KV_RANK)
    yield f"{name}.g_proj.weight", *draw.linear(HEADS * VALUE, H)
    yield f"{name}.o_proj.weight", *draw.linear(H, HEADS * VALUE)


def indexer(draw: Draws, name: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """What scores the tokens that sparse attention looks at."""
    yield f"{name}.wq_b.weight", *draw.linear(INDEX_HEADS * INDEX_DIM, Q_RANK)
    yield f"{name}.wk.weight", *draw.linear(INDEX_DIM, H)
    yield f"{name}.k_norm.weight", *draw.norm(INDEX_DIM)
    yield f"{name}.k_norm.bias", *draw.uniform(INDEX_DIM, deviation=0.1)
    yield f"{name}.weights_proj.weight", *draw.linear(INDEX_HEADS, H)


def dense(draw: Draws, name: str, width: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """A feed-forward at full width."""
    yield f"{name}.gate_proj.weight", *draw.linear(width, H)
    yield f"{name}.up_proj.weight", *draw.linear(width, H)
    yield f"{name}.down_proj.weight", *draw.linear(H, width)


def experts(draw: Draws, name: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """Router, latent projections, packed experts, shared experts."""
    yield f"{name}.gate.weight", *draw.linear(E, H)
    yield f"{name}.gate.e_score_correction_bias", *draw.uniform(E, deviation=0.05)
    yield f"{name}.routed_expert_down_proj.weight", *draw.linear(L, H)
    yield f"{name}.routed_expert_norm.weight", *draw.norm(L)
    yield f"{name}.routed_expert_up_proj.weight", *draw.linear(H, L)
    yield from dense(draw, f"{name}.shared_experts", 2 * F)
    for expert in range(E):
        for part, rows, columns in (("w1", F, L), ("w2", L, F), ("w3", F, L)):
            yield from draw.packed(f"{name}.experts.{expert}.{part}.weight", rows, columns)


def records(seed: int, count: int) -> Iterator[dict[str, object]]:
    """Texts of two sentences, and every second one a picture with its colour and form in words."""
    bits = np.random.PCG64(seed)
    for number, text in enumerate(documents(seed, count)):
        if number % 2:
            yield picture(bits)
        else:
            yield {"text": ". ".join(text.rstrip(".\n").split(". ")[:2]) + ".\n"}


def picture(bits: np.random.PCG64) -> dict[str, object]:
    """A noisy picture of one colour, as a portable pixmap."""
    name = sorted(COLOURS)[bits.random_raw() % len(COLOURS)]
    rows, columns = ((16, 8), (8, 16), (16, 16))[bits.random_raw() % 3]
    form = "square" if rows == columns else "tall" if rows > columns else "wide"
    noise = (bits.random_raw(rows * columns * 3) >> np.uint64(59)).astype(np.int64).reshape(rows, columns, 3)
    pixels = (np.asarray(COLOURS[name]) + noise - 16).clip(0, 255).astype(np.uint8)
    pixmap = f"P6\n{columns} {rows}\n255\n".encode() + pixels.tobytes()
    text = f"<|media_pad|>the picture is {form} and {name}.\n"
    return {"text": text, "images": [{"base64": base64.b64encode(pixmap).decode()}]}


def make(folder: Path) -> None:
    """Fill an empty folder with the checkpoint and the data."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    write_json(checkpoint / "config.json", CONFIG)
    write_json(checkpoint / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1})
    options = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[0], "pad_token": SPECIAL[1], "model_max_length": 256}
    vocabulary = [*SPECIAL, *sorted(byte_alphabet())]
    write_tokenizer(checkpoint, vocabulary=vocabulary, merges=[], special=SPECIAL, split_digits=False, options=options)
    write_sharded(checkpoint, tensors(), MAX_SHARD_BYTES)
    for name, seed, count in (("train", 1, 256), ("held_out", 2, 48)):
        lines = (json.dumps(record) + "\n" for record in records(seed, count))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(SOURCE, make, identity={}))
