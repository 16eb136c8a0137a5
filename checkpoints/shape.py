"""The sizes that costs and legality need, from config.json: one meaning, many spellings.

Spellings follow the model families' published configurations (four for the number of experts, six for top-k).
"""

from __future__ import annotations

from pydantic import ValidationError

from shardwright.checkpoints.config import CONFIG_FILE, ModelConfig
from shardwright.checkpoints.layouts import LAYOUTS
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.profile import ModelShape
from shardwright.schemas.validation import explain

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
)
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
DENSE_WIDTH = ("dense_intermediate_size", "intermediate_size_mlp")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
LAYER_LISTS = ("layers_block_type", "layer_types")
"""One entry for each layer; some families give no other count."""
FIXED_TOP_K = {"switch_transformers": 1, "nllb-moe": 2}
"""Families whose class has the number of experts for one token built in."""
SINGLE_NEURONS = frozenset({"doge"})
"""Families whose routed experts are one neuron each, beside a dense MLP; ``is_moe`` says whether there are any."""
WITHOUT_STACKS = frozenset({"dbrx", "jetmoe", "longcat_flash", "nllb-moe", "switch_transformers"}) | SINGLE_NEURONS
"""Families whose experts are no stacks that ranks can share out: one matrix for all of them, a module each, a stack in
each linear, stacks of different numbers, or tables of neurons."""
HIDDEN = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")


def model_shape(config: ModelConfig) -> ModelShape:
    """Sizes of the language model.

    Raises:
        CheckpointError: ``config-contradiction`` when a size is missing, or not a size, or two contradict.
    """
    heads = config.count(*HEADS)
    hidden = config.count(*HIDDEN)
    neurons = config.text_model_type in SINGLE_NEURONS
    experts = _first(config, EXPERTS) if not neurons or config.get("is_moe") else 0
    top_k = _first(config, TOP_K) or (FIXED_TOP_K.get(config.text_model_type, 0) if experts else 0)
    if experts and not 0 < top_k <= experts:
        raise CheckpointError(
            "config-contradiction",
            f"{experts} experts of which {top_k} are used for one token",
            where=str(config.folder / CONFIG_FILE),
            next_action="correct config.json or fetch it again",
        )
    width = config.count("intermediate_size", "ffn_hidden_size", "d_ff", "decoder_ffn_dim")
    expert_width = _first(config, EXPERT_WIDTH)
    dense_width = _first(config, DENSE_WIDTH)
    layout = LAYOUTS.get(config.text_model_type)
    try:
        return ModelShape(
            hidden_size=hidden,
            num_layers=_layers(config),
            vocab_size=config.count("vocab_size"),
            num_attention_heads=heads,
            num_key_value_heads=config.count("num_key_value_heads", "num_kv_heads", "kv_n_heads", default=heads),
            head_dim=_head_dim(config, hidden, heads),
            dense_intermediate_size=dense_width or (width if expert_width or neurons or not experts else 0),
            expert_intermediate_size=(1 if neurons else expert_width or width) if experts else 0,
            num_experts=experts,
            experts_per_token=top_k if experts else 0,
            num_shared_experts=_first(config, SHARED) or int(_first(config, SHARED_WIDTH) > 0),
            tie_word_embeddings=config.tie_word_embeddings,
            max_position_tokens=config.count("max_position_embeddings", "max_seq_len"),
            gated_mlp=layout.gated if layout else True,
            expert_hidden_size=config.count("routed_expert_hidden_size", "moe_latent_size") if experts else 0,
            residual_streams=config.count("hc_mult", "hc_count", default=1),
            expert_stacks=not experts or config.text_model_type not in WITHOUT_STACKS,
            **_attention_sizes(config),
        )
    except ValidationError as error:
        raise CheckpointError(
            "config-contradiction",
            explain(error),
            where=str(config.folder / CONFIG_FILE),
            next_action="correct config.json or fetch it again",
        ) from error


def _attention_sizes(config: ModelConfig) -> dict[str, int]:
    """Widths of latent, linear and sparse attention; a model without one has none of its keys, or null."""
    linear = config.get("linear_attn_config")
    linear = linear if isinstance(linear, dict) else {}
    plain = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk")
    named = {"index_num_heads": "index_n_heads", "index_head_dim": "index_head_dim"} | {name: name for name in plain}
    sizes = {field: config.count(key) if config.get(key) else 0 for field, key in named.items()}
    for field, key in (("linear_num_heads", "num_heads"), ("linear_head_dim", "head_dim")):
        value = linear.get(key, 0)
        sizes[field] = value if isinstance(value, int) and value > 0 else 0
    return sizes


def _first(config: ModelConfig, names: tuple[str, ...]) -> int:
    """A count whose value may be a list (one for each expert pool); its first entry is the text pool's."""
    value = config.get(*names)
    if isinstance(value, list) and value and all(isinstance(item, int) and item >= 0 for item in value):
        return int(value[0])
    return config.count(*names)


def _layers(config: ModelConfig) -> int:
    """Number of decoder layers: given, or the length of the list that describes each."""
    given = config.count(*LAYERS)
    if given:
        return given
    lists = [config.get(name) for name in LAYER_LISTS]
    return next((len(one) for one in lists if isinstance(one, list)), 0)


def _head_dim(config: ModelConfig, hidden: int, heads: int) -> int:
    """Width of one head's query: given, or the two parts of latent attention, or hidden / heads."""
    latent = config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim")
    if config.get("kv_lora_rank") is not None and latent:
        return latent
    return config.count("head_dim", default=hidden // heads if heads else 0)
