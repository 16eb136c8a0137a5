"""The experts block as the captured graph spells it: two batched products, and what stands between them.

Legend: E experts, I expert width.
"""

from __future__ import annotations

from typing import Any

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.patterns.base import View
from shardwright.agents.structure.patterns.experts_kernels import GATED, KERNEL_GATES
from shardwright.agents.structure.patterns.gates import GATES, find_gates
from shardwright.schemas.graph import OpNode


def readings(graph: CanonicalGraph, named: dict[str, OpNode], up: str, down: str, biased: bool) -> list[dict[str, Any]]:
    """Constants that fit the two products and what stands between them.

    Args:
        named: role → its node.
        up: role of the first product's stack.
        down: role of the second's.
    """
    view = View(graph)
    products = tuple(view.ops("bmm"))
    first_stack, second_stack = named[up].output, named[down].output
    if len(products) != 2 or first_stack is None or second_stack is None or len(first_stack.shape) != 3:
        return []
    first, second = products
    left = [view.through(view.operand(second, i), "reshape") for i in (0, 1)]
    found = []
    for inner in left:
        for gate in find_gates(view, inner):
            made = _split(view, gate.gate, gate.up, GATES[gate.form].gated)
            if made is None or (up == GATED) != GATES[gate.form].gated:
                continue
            found.append(
                {
                    "form": "batched",
                    "gate": gate.form,
                    **gate.constants,
                    "split": made,
                    "biased": biased,
                    "transposed": _transposed(view, first, named[up].id),
                    "clamp": _clamps_ids(view, named["top_k_index"].id),
                    "experts": second_stack.shape[0],
                    **(KERNEL_GATES[gate.form](gate.constants) if gate.form in KERNEL_GATES else {}),
                }
            )
    return found


def _split(view: View, gate: OpNode, up: OpNode, gated: bool) -> str | None:
    """How the product is cut into gate and up: ``halves``, ``columns``, ``none``."""
    if not gated:
        return "none"
    if not (view.is_op(gate, "slice", 1) and view.is_op(up, "slice", 1)) or gate.inputs != up.inputs:
        return None
    width = view.operand(gate).output
    if width is None:
        return None
    double = width.shape[-1]
    halves = [{"dim": -1, "start": s, "stop": s + double // 2} for s in (0, double // 2)]
    columns = [{"dim": -1, "start": s, "stop": double, "step": 2} for s in (0, 1)]
    pieces = [gate.arguments, up.arguments]
    return "halves" if pieces == halves else "columns" if pieces == columns else None


def _transposed(view: View, product: OpNode, stack: str) -> bool:
    """Whether the stack is the right operand of the first product."""
    right = view.operand(product, 1)
    return bool(right.inputs) and stack in right.inputs


def _clamps_ids(view: View, index: str) -> bool:
    return any(view.through(node, "clamp", "reshape").id == index for node in view.ops("clamp"))
