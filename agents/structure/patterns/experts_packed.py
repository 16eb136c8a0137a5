"""The experts block on stacks that stay packed in device memory, and the proof that the packed operator computes it.

One variant for each packing: it reads received rows at any ep, adapters and biases included. It is open where all of
the block's stacks are stored in that packing, the plan keeps the base so, and the operator's contract takes sizes,
activation and column order.
Legend: R rows (each token once per expert), E experts, H hidden, I expert width, F = 2I with a gate (else I).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.agents.structure.capture import EXPERT_VALUES
from shardwright.agents.structure.differential import TOLERANCE, compare
from shardwright.agents.structure.patterns.base import Match, Tensors, VariantSpec
from shardwright.agents.structure.patterns.experts_kernels import (
    DOWN,
    GATED,
    PLAIN,
    block_sizes,
    choice_of,
    has_activation,
    no_activation,
    stack_of,
)
from shardwright.kernels.packed_experts import contract
from shardwright.schemas.errors import KernelError
from shardwright.schemas.fusion import VariantPredicate

OP = contract.NAME
BITS: dict[str, int] = {"mxfp4": 4, "fp8": 8}
"""How the operator packs a stack, which is also the plan's base format → bits of a stored value."""
STORED: dict[str, tuple[str, ...]] = {"mxfp4": ("plain", "mxfp4", "gpt-oss-mxfp4"), "fp8": ("plain", "fp8-block")}
"""→ formats of the block's parameters in files: biases are plain, stacks are not."""
TOKENS, EXPERTS = 9, 5
"""Of the differential test: at most so many experts, of which some get no row."""


def packed_variants() -> tuple[VariantSpec, ...]:
    """The operator on each packing."""
    return tuple(
        VariantSpec(
            _name(kind),
            "shardwright",
            OP,
            VariantPredicate(tp_max=1, device_types=("cuda",), packing=STORED[kind], base_formats=(kind,)),
            packed=(GATED, PLAIN, DOWN),
        )
        for kind in BITS
    )


def _name(kind: str) -> str:
    return f"kernel-{kind}"


def kind_of(spec: VariantSpec) -> str:
    """How a packed variant's stacks are packed."""
    return next(kind for kind in BITS if spec.name == _name(kind))


def refuses_packed(match: Match, kind: str) -> str:
    """Why the operator cannot take a block packed in one way; empty where it can."""
    if refused := no_activation(match, OP):
        return refused
    sizes, (activation, layout) = block_sizes(match, 1), choice_of(match.constants)
    E, H, I = (sizes[name] for name in "EHI")
    x = torch.empty((sizes["R"], H), dtype=torch.bfloat16, device="meta")
    try:
        gate_up, down = _meta(kind, E, (2 if activation.gated else 1) * I, H), _meta(kind, E, H, I)
        contract.check_inputs(OP, x, gate_up, down, activation, layout.interleaved)
    except KernelError as error:
        return error.what
    return ""


def _meta(kind: str, E: int, N: int, K: int) -> Any:
    from shardwright.kernels.packed_experts.storage import PackedStack

    values, scales = (
        torch.empty(size, dtype=getattr(torch, dtypes[kind]), device="meta")
        for size, dtypes in zip(contract.shapes(kind, E, N, K), (contract.VALUES, contract.SCALES), strict=True)
    )
    return PackedStack(values, scales, "mxfp4" if kind == "mxfp4" else "fp8")


def check_packed(dtype: torch.dtype) -> None:
    """The format of rows that the operator takes.

    Raises:
        KernelError: ``dtype-unsupported``.
    """
    from shardwright.kernels import guards

    guards.one_dtype(OP, {"x": torch.empty(0, dtype=dtype, device="meta")}, contract.DTYPES)


def counted_packed(match: Match, kind: str, tokens: int) -> dict[str, int]:
    """The sizes that the operator is counted by."""
    sizes = block_sizes(match, tokens)
    # Measured times are filed under sizes alone for the packing that the operator was made for.
    return {name: sizes[name] for name in "REHI"} | ({} if kind == "mxfp4" else {"bits": BITS[kind]})


def packed_agrees(match: Match, oracle: Callable[[Tensors], Tensors]) -> str:
    """The operator's plain reference, reading packed stacks, against the pattern's formula on the decoded ones; fp64.

    Stacks are drawn packed, random codes and scales, so the decoded ones are exact. Forward and the gradients of
    tokens and routing weights, with experts that get no row and one that gets most.

    Returns:
        What was compared; empty for a block that the operator does not take in any packing.

    Raises:
        ArithmeticError: they differ, or bytes do not come back from the operator's own order.
    """
    kinds = [kind for kind in BITS if not refuses_packed(match, kind)] if has_activation(match) else []
    words = []
    for kind in kinds:
        stacks, cases = _drawn(match, kind)
        seen = compare(_kernel(match, stacks), oracle, cases, ("hidden_states", "top_k_weights"))
        if seen.error > TOLERANCE:
            raise ArithmeticError(f"{OP} on {kind} differs by {seen.error:.1e} at {seen.where}")
        words.append(f"{kind} ({seen.values} numbers, {seen.error:.0e})")
    return f"; {OP} on decoded weights too: {', '.join(words)}" if words else ""


def _drawn(match: Match, kind: str) -> tuple[tuple[Any, Any], dict[str, Tensors]]:
    """Packed stacks, and cases that hold them decoded, in the block's own layout."""
    from shardwright.kernels.packed_experts.reference import dequantise_reference

    activation, _ = choice_of(match.constants)
    whole, up = contract.WHOLE[kind], stack_of(match)
    E, H, I = min(match.constants["experts"], EXPERTS), 2 * whole, whole
    F = (2 if activation.gated else 1) * I
    generator = torch.Generator().manual_seed(17)
    stacks = _random(kind, E, F, H, generator), _random(kind, E, H, I, generator)
    flip = match.constants["transposed"]
    values: Tensors = {}
    for role, stack in zip((up, DOWN), stacks, strict=True):
        wide = dequantise_reference(stack).double()
        values[role] = wide.mT.contiguous() if flip else wide
    if match.constants["biased"]:
        for role, width in ((up, F), (DOWN, H)):
            values[f"{role}_bias"] = torch.randn((E, width), dtype=torch.float64, generator=generator)
    top = min(match.region.spec("top_k_index").shape[-1], E)
    values["hidden_states"] = torch.randn((TOKENS, H), dtype=torch.float64, generator=generator)
    values["top_k_weights"] = torch.rand((TOKENS, top), dtype=torch.float64, generator=generator)
    values["top_k_index"] = torch.rand((TOKENS, E), generator=generator).topk(top, -1).indices
    hot = values | {"top_k_index": torch.arange(top).expand(TOKENS, top).contiguous()}
    return stacks, {"normal": values, "hot-and-empty-experts": hot}


def _random(kind: str, E: int, N: int, K: int, generator: torch.Generator) -> Any:
    """A stack of random codes with rows of about norm one, whose bytes come back from the operator's order."""
    from shardwright.kernels.packed_experts import storage

    if kind == "fp8":
        values = (20 * torch.randn((E, N, K), generator=generator)).to(torch.float8_e4m3fn)
        return storage.fp8_stack(values, torch.rand((E, N // 128, K // 128), generator=generator) / (20 * K**0.5))
    packed = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=generator)
    middle = 126 - K.bit_length() // 2
    scale = torch.randint(middle - 2, middle + 1, (E, N, K // 32), dtype=torch.uint8, generator=generator)
    stack = storage.mxfp4_stack(packed, scale)
    back = storage.mxfp4_bytes(stack)
    if not (torch.equal(back[0], packed) and torch.equal(back[1], scale)):
        raise ArithmeticError(f"{OP}: a stack's bytes do not come back from the operator's order")
    return stack


def _kernel(match: Match, stacks: tuple[Any, Any]) -> Callable[[Tensors], Tensors]:
    """The operator's reference between a dispatch and a combine written out: rows sorted by expert, and back."""
    from shardwright.kernels.packed_experts.reference import packed_experts_reference

    activation, layout = choice_of(match.constants)
    up = stack_of(match)

    def run(values: Tensors) -> Tensors:
        x, ids, weights = (values[v] for v in EXPERT_VALUES)
        chosen, top = ids.reshape(-1), ids.shape[-1]
        order = chosen.argsort(stable=True)
        token = order // top
        counts = torch.bincount(chosen, minlength=stacks[0].shape[0])
        biases: list[Tensor | None] = [values.get(f"{name}_bias") for name in (up, DOWN)]
        rows = packed_experts_reference(x[token], counts, *stacks, None, None, activation, layout.interleaved, *biases)
        weighted = rows * weights.reshape(-1)[order, None]
        return {"y": torch.zeros_like(x).index_add(0, token, weighted)}

    return run
