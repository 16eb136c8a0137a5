"""Which of our operators take the experts block, in what the block's constants say, and how each is counted.

The base as the plan keeps it decides: decoded at load, the whole layer at ep = 1 and received rows beyond; kept
packed, received rows at any ep (:mod:`experts_packed`).
Legend: R received rows, T tokens, K experts per token, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.agents.structure.capture import EXPERT_VALUES
from shardwright.agents.structure.patterns.base import Match, Tensors, VariantSpec
from shardwright.agents.structure.patterns.gates import GATES
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.schemas.fusion import VariantPredicate
from shardwright.search_spaces.executable import BASE_PACKINGS

GATED, PLAIN, DOWN = "gate_up_proj", "up_proj", "down_proj"
KERNEL_GATES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "silu": lambda c: {"activation": "swiglu"},
    "silu-wide": lambda c: {"activation": "swiglu"},
    "silu-clamped": lambda c: {"activation": "clamped_swiglu", "limit": c["limit"], "alpha": 1.0, "offset": 0.0},
    "swiglu-sloped": lambda c: {
        "activation": "clamped_swiglu",
        "limit": c["limit"],
        "alpha": c["alpha"],
        "offset": 1.0,
    },
    "situ": lambda c: {"activation": "situ", "limit": c["beta"], "alpha": c["lambda"], "offset": 0.0},
    "relu2": lambda c: {"activation": "relu2"},
}
"""Gate → the expert kernels' own activation with its numbers (``grouped_lora_mlp.contract``)."""
NUMBERS = ("limit", "alpha", "offset")
KERNELS = {"moe_layer": ("T", "K", "E", "H", "I"), "grouped_lora_mlp": ("R", "E", "H", "I")}
"""Operators on decoded stacks, and the sizes that each is counted by."""
LOADED = tuple(BASE_PACKINGS)
"""Formats of files that the runtime decodes at load."""
OWN_FORM = "workers run experts in their own grouped form with adapters, which is not compiled"


def decoded_variants() -> tuple[VariantSpec, ...]:
    """The ways to run stacks that are decoded at load; the class's own forms also where they stay packed."""
    both, gpu = ("cuda", "cpu"), ("cuda",)
    whole = VariantPredicate(ep_max=1, tp_max=1, device_types=both, packing=LOADED)
    cut = VariantPredicate(ep_min=2, tp_max=1, device_types=both, packing=LOADED)
    kernel: dict[str, Any] = {"device_types": gpu, "base_formats": ("compute",)}
    return (
        VariantSpec("kernel-whole", "shardwright", "moe_layer", whole.model_copy(update=kernel)),
        VariantSpec("kernel-cut-at-dispatch", "shardwright", "grouped_lora_mlp", cut.model_copy(update=kernel)),
        VariantSpec("compile-whole", "compile", "-", whole, not_installable=OWN_FORM),
        VariantSpec("eager-whole", "eager", "-", whole),
        VariantSpec("compile-cut-at-dispatch", "compile", "-", cut, not_installable=OWN_FORM),
        VariantSpec("eager-cut-at-dispatch", "eager", "-", cut),
    )


def stack_of(match: Match) -> str:
    """The role of the first product's stack."""
    return GATED if GATED in match.region.inputs else PLAIN


def has_activation(match: Match) -> bool:
    return "activation" in match.constants


def no_activation(match: Match, op: str) -> str:
    """Why an expert kernel cannot compute a block's gate; empty where it can."""
    return "" if has_activation(match) else f"{op} has no {GATES[match.constants['gate']].title}"


def choice_of(constants: dict[str, Any]) -> tuple[Activation, Layout]:
    """The expert kernels' compile-time choice for one match."""
    numbers = [float(constants.get(name, default)) for name, default in zip(NUMBERS, (1.0, 1.0, 0.0), strict=True)]
    activation = Activation(constants["activation"], (numbers[0], numbers[1], numbers[2]))
    return activation, Layout("in_out" if constants["transposed"] else "out_in", constants["split"] == "columns")


def check_decoded(match: Match, op: str, dtype: torch.dtype) -> None:
    """The contract of the operators on decoded stacks.

    Raises:
        KernelError: what the contract refuses.
    """
    from shardwright.kernels.grouped_lora_mlp import contract

    up, sizes = stack_of(match), {}
    for role in (up, DOWN):
        sizes[role] = torch.empty(match.region.spec(role).shape, dtype=dtype, device="meta")
    activation, layout = choice_of(match.constants)
    contract.check_choice(op, activation, layout)
    x = torch.empty(match.region.spec("hidden_states").shape, dtype=dtype, device="meta")
    contract.check_weights(op, x.flatten(0, -2), sizes[up], sizes[DOWN], activation.gated, layout)


def layer_reference(match: Match) -> Callable[[Tensors], Tensors] | None:
    """The plain reference of ``moe_layer`` by role; ``None`` for a gate that no kernel has."""
    if not has_activation(match):
        return None
    from shardwright.kernels.moe_layer.reference import moe_layer_reference

    up, (activation, layout) = stack_of(match), choice_of(match.constants)

    def run(values: Tensors) -> Tensors:
        x, ids, weights = (values[v] for v in EXPERT_VALUES)
        stacks, biases = (values[up], values[DOWN]), [values.get(f"{name}_bias") for name in (up, DOWN)]
        return {"y": moe_layer_reference(x, ids, weights, *stacks, None, None, activation, layout, *biases)}

    return run


def block_sizes(match: Match, tokens: int) -> dict[str, int]:
    """R, H, I and E for a rank's tokens."""
    experts, one, other = match.region.spec(DOWN).shape
    hidden, width = (other, one) if match.constants["transposed"] else (one, other)
    top = match.region.spec("top_k_index").shape[-1]
    return {"R": tokens * top, "H": hidden, "I": width, "E": experts}


def counted_by(match: Match, op: str, tokens: int) -> dict[str, int]:
    """The sizes that an operator on decoded stacks is counted by."""
    sizes = block_sizes(match, tokens) | {"T": tokens, "K": match.region.spec("top_k_index").shape[-1]}
    return {name: sizes[name] for name in KERNELS[op]}
