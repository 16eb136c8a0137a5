"""What is on disk, from config.json and safetensors headers alone.

Legend: H hidden, I expert width, E experts, K experts per token, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import Literal

from shardwright.schemas.base import CountInt, Model, PositiveInt, Sha256, added

Component = Literal[
    "routed_experts",
    "shared_experts",
    "router",
    "attention",
    "linear_attention",
    "indexer",
    "latent_projections",
    "dense_mlp",
    "embedding",
    "head",
    "norms",
    "mtp",
    "vision",
    "projector",
    "other",
]


class CheckpointFingerprint(Model):
    """Hashes of everything that decides how a checkpoint is read.

    ``digest`` covers the others. Headers carry every tensor's name, dtype, shape and offsets;
    what the values are is pinned beside it (``WeightsPin``).
    """

    config_sha256: Sha256
    headers_sha256: Sha256
    tokenizer_sha256: Sha256 | None = None
    total_file_bytes: CountInt
    digest: Sha256


class WeightsPin(Model):
    """What the weights' values were when a plan was made, as far as they were read.

    Small checkpoints are read whole, of large ones a bounded number of pieces (``checkpoints.sampled``).
    """

    scheme: Literal["pieces-1"] = "pieces-1"
    """Which bytes are read."""
    files: dict[str, Sha256] = {}
    """Weight file → hash of its pieces; empty where the plan was made from headers alone."""
    read_bytes: CountInt = 0
    """How many bytes the pieces are, over all files."""


class ActiveCounts(Model):
    """Parameters used for one token, in the three conventions vendors publish."""

    all: CountInt
    without_input_embedding: CountInt
    without_embeddings: CountInt


class ParameterCounts(Model):
    """Logical parameters (packing undone, scales not counted)."""

    total: CountInt
    """Weights without MTP layers and without buffers."""
    mtp: CountInt = 0
    buffers: CountInt = 0
    """Values in the files that are not weights (router biases of the bias-update kind, pads)."""
    active: ActiveCounts
    by_component: dict[Component, CountInt]
    kept_float32: CountInt = added(0)
    """Weights that files and the model's class keep in fp32 whatever the base runs in."""


class Packing(Model):
    """One storage format found among the tensors."""

    format: Literal["plain", "fp8-block", "mxfp4", "gpt-oss-mxfp4", "int4-group"]
    tensors: CountInt
    stored_bytes: CountInt
    logical_parameters: CountInt
    block: tuple[PositiveInt, ...] = ()


class LayerKind(Model):
    """Layers that are built alike."""

    name: str
    """For example ``attention+moe``."""
    attention: Literal["full", "sliding", "mla", "linear", "dsa", "none"]
    mlp: Literal["moe", "dense", "none"]
    layer_indices: tuple[CountInt, ...]
    parameters: CountInt
    """Logical parameters of one layer of this kind."""
    expert_parameters: CountInt = 0
    """Routed-expert parameters of one layer of this kind."""


class ModelShape(Model):
    """The sizes that costs and legality need, from config.json."""

    hidden_size: PositiveInt
    num_layers: PositiveInt
    vocab_size: PositiveInt
    num_attention_heads: CountInt
    num_key_value_heads: CountInt
    head_dim: CountInt
    dense_intermediate_size: CountInt = 0
    expert_intermediate_size: CountInt = 0
    num_experts: CountInt = 0
    experts_per_token: CountInt = 0
    num_shared_experts: CountInt = 0
    tie_word_embeddings: bool = False
    max_position_tokens: CountInt = 0
    gated_mlp: bool = True
    expert_hidden_size: CountInt = added(0)
    """Width of the rows that routed experts read and write (latent MoE); 0: ``hidden_size``."""
    q_lora_rank: CountInt = added(0)
    """Latent attention: width of the compressed query; 0: queries come from the hidden state."""
    kv_lora_rank: CountInt = added(0)
    """Latent attention: width of the compressed keys and values; 0: no latent attention."""
    qk_nope_head_dim: CountInt = added(0)
    qk_rope_head_dim: CountInt = added(0)
    v_head_dim: CountInt = added(0)
    linear_num_heads: CountInt = added(0)
    """Linear attention (KDA, GDN): heads; 0: ``num_attention_heads``."""
    linear_head_dim: CountInt = added(0)
    """Linear attention: width of one head; 0: ``head_dim``."""
    index_num_heads: CountInt = added(0)
    """Sparse attention: heads of the indexer."""
    index_head_dim: CountInt = added(0)
    index_topk: CountInt = added(0)
    """Sparse attention: keys that one query attends to."""
    residual_streams: PositiveInt = added(1)
    """Hyper-connections: rows of ``hidden_size`` that a layer takes and returns for a token."""
    expert_stacks: bool = added(True)
    """Whether routed experts lie in stacks ``[E, …]`` that ranks can share out; else each rank holds all of them."""


class CheckpointProfile(Model):
    """A checkpoint as its headers tell it."""

    schema_version: Literal[1] = 1
    model_type: str
    architecture: str
    transformers_class: bool
    """Whether the installed transformers can build it without the checkpoint's code."""
    tensors: CountInt
    files: CountInt
    stored_bytes: CountInt
    dtypes: dict[str, CountInt]
    """safetensors dtype → number of tensors."""
    parameters: ParameterCounts
    packing: tuple[Packing, ...]
    shape: ModelShape
    layer_kinds: tuple[LayerKind, ...]
    tied_weights: tuple[tuple[str, str], ...] = ()
    fingerprint: CheckpointFingerprint
    licence: str = added("")
    """Licence that the checkpoint's README states in its front matter (``apache-2.0``); empty where it states none."""
    warnings: tuple[str, ...] = ()
