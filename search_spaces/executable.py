"""Which axis values the runtime really runs, each with the test that proves it.

A value that is not here may be shown by ``--explore``; ``apply`` refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass

Value = int | bool | str

PARITY = "tests/runtime/test_parity.py"
PLACEMENT = "tests/runtime/test_placement.py"
SCHEDULE = "tests/runtime/test_schedule_axes.py"
CONTEXT = "tests/runtime/test_context.py"
CONTEXT_DSA = "tests/runtime/test_context_dsa.py"


@dataclass(frozen=True)
class ExecutableAxis:
    """The runnable values of one axis.

    ``proof`` maps a value to a pytest id. ``any_degree`` marks integer axes whose code path does
    not depend on the value beyond what the listed values exercise.
    """

    proof: dict[Value, str]
    any_degree: bool = False

    def runs(self, value: Value) -> bool:
        if self.any_degree and isinstance(value, int) and not isinstance(value, bool):
            return value >= 1
        return value in self.proof

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(self.proof)


_BASE = f"{PARITY}::test_one_rank_equals_plain_training"
_FSDP = f"{PARITY}::test_fsdp2_equals_one_rank"
_EP = f"{PARITY}::test_ep2_equals_one_rank"
_PACKED = "tests/runtime/test_packed.py::test_kept_packed_trains_what_decoding_at_load_trains"
_CUT_PACKED = "tests/runtime/test_packed_shards.py::test_gradients_of_cut_packed_stacks_are_plain_transformers"
_COPIES = f"{SCHEDULE}::test_copies_of_experts_keep_gradients"
_REPLICATE = f"{PARITY}::test_replicate2_equals_one_rank"
_CUT = f"{CONTEXT}::test_cut_sequences_train_what_one_process_trains"
_CUT_DSA = f"{CONTEXT_DSA}::test_chosen_keys_of_all_ranks_train_what_one_process_trains"

EXECUTABLE: dict[str, ExecutableAxis] = {
    "pp": ExecutableAxis({1: _BASE}),
    "cp": ExecutableAxis({1: _BASE, 2: _CUT, 4: _CUT}, any_degree=True),
    "tp": ExecutableAxis({1: _BASE}),
    "replicate": ExecutableAxis({1: _BASE, 2: _REPLICATE}, any_degree=True),
    "ep": ExecutableAxis({1: _BASE, 2: _EP}, any_degree=True),
    "shard": ExecutableAxis({1: _BASE, 2: _FSDP}, any_degree=True),
    "micro_batch_sequences": ExecutableAxis({1: _BASE, 2: f"{PARITY}::test_micro_batch_keeps_losses"}, any_degree=True),
    "accumulation_steps": ExecutableAxis({1: _BASE, 2: f"{PARITY}::test_accumulation_keeps_losses"}, any_degree=True),
    "checkpointing": ExecutableAxis(
        {
            "none": _BASE,
            "full": f"{PARITY}::test_checkpointing_keeps_losses",
            "layers": f"{SCHEDULE}::test_some_recomputed_layers_keep_gradients",
        }
    ),
    "reshard_after_forward": ExecutableAxis({True: _FSDP, False: f"{PARITY}::test_no_reshard_keeps_losses"}),
    "prefetch_depth": ExecutableAxis({1: _FSDP, 2: f"{SCHEDULE}::test_prefetch_keeps_gradients"}, any_degree=True),
    "expert_padding_tokens": ExecutableAxis(
        {1: _EP, 16: f"{SCHEDULE}::test_padded_rows_keep_gradients"}, any_degree=True
    ),
    "overlap": ExecutableAxis(
        {
            "none": _EP,
            "chunked": f"{PARITY}::test_chunks_keep_losses",
            "shared": f"{SCHEDULE}::test_shared_under_dispatch_keeps_gradients",
        }
    ),
    "offload": ExecutableAxis(
        {
            "none": _BASE,
            "adapter_optimizer": f"{PLACEMENT}::test_an_optimizer_on_the_host_goes_on_as_one_on_the_device",
        }
    ),
    "expert_placement": ExecutableAxis(
        {"contiguous": _EP, "balanced": f"{SCHEDULE}::test_placed_experts_keep_gradients"}
    ),
    "expert_tp": ExecutableAxis({1: _BASE}),
    "reshard_scope": ExecutableAxis({"all": _FSDP, "node": f"{SCHEDULE}::test_node_scope_keeps_gradients"}),
    "overlap_chunks": ExecutableAxis(
        {
            1: _EP,
            2: f"{PARITY}::test_chunks_keep_losses",
            3: f"{SCHEDULE}::test_chunks_with_a_shared_expert_keep_gradients",
        },
        any_degree=True,
    ),
    "dispatch": ExecutableAxis({"all_to_all": _EP, "hierarchical": f"{SCHEDULE}::test_two_stages_keep_gradients"}),
    "base_format": ExecutableAxis({"compute": _BASE, "mxfp4": _CUT_PACKED, "fp8": _CUT_PACKED, "int4": _CUT_PACKED}),
    "redundant_experts": ExecutableAxis({0: _EP, 1: _COPIES, 2: _COPIES, 4: _COPIES}),
}
"""Axis name → what runs."""

BASE_PACKINGS: dict[str, str] = {
    "plain": _BASE,
    "mxfp4": _PACKED,
    "gpt-oss-mxfp4": _PACKED,
    "fp8-block": _PACKED,
    "int4-group": "tests/runtime/test_packed.py::test_int4_is_decoded_at_load",
}
"""Storage formats of the base weights that the runtime loads, with the proving test."""

CONTEXT_ATTENTION: dict[str, str] = {
    **dict.fromkeys(("full", "sliding", "mla", "linear", "none"), _CUT),
    "dsa": _CUT_DSA,
}
"""Kinds of attention that run on sequences cut over ranks (cp above 1), with the proving test."""

CONTEXT_FAMILIES: dict[str, str] = {
    **dict.fromkeys(("qwen3_moe", "mixtral", "deepseek_v3", "kimi_linear", "qwen3_next", "kimi_k3"), _CUT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _CUT_DSA),
}
"""Families whose layers were proved so; another one's are refused until they are."""

CONTEXT_OPERATORS = frozenset(
    {
        *("rms_norm", "add_rms_norm", "gated_rms_norm", "qk_norm_rope", "router", "linear_cross_entropy"),
        *("moe_layer", "grouped_lora_mlp", "packed_experts", "attention_residual", "dsa"),
    }
)
"""Operators that run on cut sequences: of all but the last each token's value needs no other token
(``tests/runtime/test_fused.py::test_fused_equals_eager_on_live_models`` runs most of them so,
``checks_attention_residual.py`` shows it of mixes of residual rows); sparse attention takes
the keys of all ranks (``tests/runtime/test_context_dsa.py``)."""

PRESERVED_ROUTING: str | None = f"{PARITY}::test_checkpointing_keeps_losses"
"""Proof that a checkpointed MoE layer routes alike in its recomputation; ``None`` would forbid it."""


def runs(axis: str, value: Value) -> bool:
    """Whether the runtime runs this value of this axis."""
    return EXECUTABLE[axis].runs(value)
