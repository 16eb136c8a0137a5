"""The patterns, one file each; these tables are the whole list."""

from __future__ import annotations

from shardwright.agents.structure.patterns.activation import Activation
from shardwright.agents.structure.patterns.add_rms_norm import AddRmsNorm
from shardwright.agents.structure.patterns.attention_residual import AttentionResidual
from shardwright.agents.structure.patterns.base import Match, Pattern
from shardwright.agents.structure.patterns.delta_rule import DeltaRule
from shardwright.agents.structure.patterns.delta_rule_layer import DeltaRuleLayer
from shardwright.agents.structure.patterns.dsa import SparseLatentAttention
from shardwright.agents.structure.patterns.dsa_pooled import PooledSparseAttention
from shardwright.agents.structure.patterns.experts import Experts
from shardwright.agents.structure.patterns.experts_embedding import ExpertsEmbedding
from shardwright.agents.structure.patterns.experts_loop import ExpertsLoop
from shardwright.agents.structure.patterns.gate_up_merge import GateUpMerge
from shardwright.agents.structure.patterns.gated_rms_norm import GatedRmsNorm
from shardwright.agents.structure.patterns.hyper_connection import HyperConnection
from shardwright.agents.structure.patterns.latent_moe import LatentMoe
from shardwright.agents.structure.patterns.latent_norm import LatentNorm
from shardwright.agents.structure.patterns.linear_cross_entropy import LinearCrossEntropy
from shardwright.agents.structure.patterns.lora_linear import LoraLinear
from shardwright.agents.structure.patterns.mla import Mla
from shardwright.agents.structure.patterns.mla_gated import GatedLatentAttention
from shardwright.agents.structure.patterns.qk_norm_rope import QkNormRope
from shardwright.agents.structure.patterns.qkv_merge import QkvMerge
from shardwright.agents.structure.patterns.rms_norm import RmsNorm
from shardwright.agents.structure.patterns.rope import Rope
from shardwright.agents.structure.patterns.router import Router
from shardwright.agents.structure.patterns.shared_expert import SharedExpert
from shardwright.agents.structure.patterns.swiglu import SwiGlu

PATTERNS: tuple[Pattern, ...] = (
    RmsNorm(),
    AddRmsNorm(),
    SwiGlu(),
    Experts(),
    ExpertsLoop(),
    ExpertsEmbedding(),
    Router(),
    LinearCrossEntropy(),
    QkNormRope(),
    Rope(),
    GatedRmsNorm(),
    LatentNorm(),
    DeltaRule(),
    DeltaRuleLayer(),
    SparseLatentAttention(),
    PooledSparseAttention(),
    QkvMerge(),
    GateUpMerge(),
    SharedExpert(),
    LatentMoe(),
    Mla(),
    GatedLatentAttention(),
    AttentionResidual(),
    HyperConnection(),
    Activation(),
    LoraLinear(),
)
"""Proposed, in the order in which proposals are shown."""

__all__ = ["PATTERNS", "Match", "Pattern"]
