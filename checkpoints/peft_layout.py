"""Adapter tensors in PEFT's file layout and back, and the keys that PEFT gives them.

Ours: a dense target has A [r, in] and B [out, r]; a stack of experts has A [E, r, in] and B [E, out, r].
PEFT keeps a stack in two matrices, lora_A [E·r, in] with the expert as the slow index of the rows, and
lora_B [out, r·E] with the expert as the **fast** index of the columns. Reading lora_B expert-slowest gives tensors of
the right shape and norm with scrambled values.

PEFT adapts a parameter by wrapping its module; several parameters of one module are nested wrappers. The first
parameter of the module is wrapped first, so it lies deepest: its key has one ``base_layer`` for each later one.
Legend: E experts, r rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.lora import LoraTarget

PREFIX = "base_model.model."


def to_peft(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lora_A.weight, lora_B.weight) as PEFT stores them.

    Args:
        a: [r, in], or [E, r, in] for a stack.
        b: [out, r], or [E, out, r].

    Returns:
        [r, in] and [out, r], or [E·r, in] and [out, r·E]; contiguous.

    Raises:
        CheckpointError: ``adapter-shape`` when the two do not belong together.
    """
    if a.dim() == 2 and b.dim() == 2 and a.shape[0] == b.shape[1]:
        return a.contiguous(), b.contiguous()
    if a.dim() == 3 and b.dim() == 3 and a.shape[0] == b.shape[0] and a.shape[1] == b.shape[2]:
        experts, rank, width = a.shape
        return a.reshape(experts * rank, width).contiguous(), b.permute(1, 2, 0).reshape(b.shape[1], rank * experts)
    raise _bad_shape(a, b)


def from_peft(lora_a: torch.Tensor, lora_b: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, B) in our layout.

    Args:
        lora_a: [r, in], or [E·r, in].
        lora_b: [out, r], or [out, r·E].
        num_experts: E, or 0 for a dense target.

    Raises:
        CheckpointError: ``adapter-shape``.
    """
    columns = lora_b.shape[1] if lora_b.dim() == 2 else -1
    if lora_a.dim() != 2 or lora_a.shape[0] != columns or (num_experts and columns % num_experts):
        raise _bad_shape(lora_a, lora_b)
    if not num_experts:
        return lora_a.contiguous(), lora_b.contiguous()
    rank = columns // num_experts
    a = lora_a.reshape(num_experts, rank, lora_a.shape[1]).contiguous()
    b = lora_b.reshape(lora_b.shape[0], rank, num_experts).permute(2, 0, 1).contiguous()
    return a, b


def _bad_shape(a: torch.Tensor, b: torch.Tensor) -> CheckpointError:
    return CheckpointError(
        "adapter-shape",
        f"A {list(a.shape)} and B {list(b.shape)} are not the two halves of one adapter",
        where="adapter tensors",
        next_action="export again from the run's checkpoint",
    )


def peft_keys(targets: Sequence[LoraTarget], parameter_order: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The keys of each target in ``adapter_model.safetensors``.

    Args:
        targets: all targets of the adapter. The set matters: a key depends on which other parameters of its module
            are adapted.
        parameter_order: the model's parameter names in module order (the order PEFT wraps in).

    Returns:
        Parameter → (key of lora_A, key of lora_B).

    Raises:
        CheckpointError: ``unknown-parameter`` for a target that the model does not have.
    """
    place = {name: index for index, name in enumerate(parameter_order)}
    stacked: dict[str, list[str]] = defaultdict(list)
    for target in targets:
        if target.parameter not in place:
            raise CheckpointError(
                "unknown-parameter",
                "the model has no such parameter",
                where=target.parameter,
                next_action="resolve the targets against this model",
            )
        if target.kind == "experts":
            stacked[target.module].append(target.parameter)
    keys = {}
    for target in targets:
        nested = ""
        if target.kind == "experts":
            order = sorted(stacked[target.module], key=place.__getitem__)
            nested = ".base_layer" * (len(order) - 1 - order.index(target.parameter))
        stem = f"{PREFIX}{target.module}{nested}"
        keys[target.parameter] = (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight")
    return keys


def peft_selection(targets: Sequence[LoraTarget]) -> dict[str, list[str]]:
    """``target_modules`` and ``target_parameters`` of ``adapter_config.json``.

    Full names: a fresh PEFT matches whole paths as well as suffixes, and a full path cannot match a layer that was
    not trained. Routers are named by their matrix: their modules choose experts too, and PEFT takes only linears whole.
    """
    by_weight = {target.parameter for target in targets if target.kind == "experts" or target.role == "router"}
    return {
        "target_modules": sorted(target.module for target in targets if target.parameter not in by_weight),
        "target_parameters": sorted(by_weight),
    }
