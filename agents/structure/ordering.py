"""Canonical order: identifiers that depend on structure, not on names or on the order of the trace.

Each node gets a hash of what it is made from and a hash of how it is used; commutative operands are sorted by both,
and nodes are numbered depth first from the outputs.
"""

from __future__ import annotations

from shardwright.agents.structure.builder import COMMUTATIVE, Draft
from shardwright.schemas.canonical import sha256_of


def live(drafts: list[Draft], outputs: list[int]) -> list[int]:
    """Indices that the outputs depend on, in trace order."""
    seen: set[int] = set()
    stack = list(outputs)
    while stack:
        index = stack.pop()
        if index not in seen:
            seen.add(index)
            stack.extend(drafts[index].inputs)
    return sorted(seen)


def _made_from(drafts: list[Draft], alive: list[int], labels: dict[int, str]) -> dict[int, str]:
    made: dict[int, str] = {}
    for index in alive:
        draft = drafts[index]
        operands = [made[i] for i in draft.inputs]
        if draft.target in COMMUTATIVE and draft.kind == "op":
            operands = sorted(operands)
        name = draft.target if draft.kind == "op" else labels.get(index, "")
        size = [list(draft.spec.shape), draft.spec.dtype] if draft.spec else None
        made[index] = sha256_of([draft.kind, name, draft.arguments, size, operands])
    return made


def _used_by(drafts: list[Draft], alive: list[int], outputs: list[int], made: dict[int, str]) -> dict[int, str]:
    uses: dict[int, list[list[object]]] = {index: [] for index in alive}
    for position, index in enumerate(outputs):
        uses[index].append(["output", position])
    used: dict[int, str] = {}
    for index in reversed(alive):
        used[index] = sha256_of(sorted(uses[index], key=str))
        draft = drafts[index]
        for position, operand in enumerate(draft.inputs):
            slot = "any" if draft.kind == "op" and draft.target in COMMUTATIVE else position
            uses[operand].append([made[index], used[index], slot])
    return used


def canonical_order(
    drafts: list[Draft], outputs: list[int], labels: dict[int, str] | None = None
) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """Order the live nodes.

    Args:
        drafts: nodes in an order where operands come first.
        outputs: indices of the results, in order.
        labels: names that leaves are told apart by; without, only kind, shape and dtype count.

    Returns:
        Indices in canonical order, and each one's operands with commutative ones sorted.
    """
    alive = live(drafts, outputs)
    made = _made_from(drafts, alive, labels or {})
    used = _used_by(drafts, alive, outputs, made)
    key = {index: (made[index], used[index]) for index in alive}
    operands = {
        index: tuple(sorted(drafts[index].inputs, key=lambda i: key[i]))
        if drafts[index].kind == "op" and drafts[index].target in COMMUTATIVE
        else drafts[index].inputs
        for index in alive
    }
    order: list[int] = []
    done: set[int] = set()
    for output in outputs:
        stack: list[tuple[int, bool]] = [(output, False)]
        while stack:
            index, ready = stack.pop()
            if index in done:
                continue
            if ready:
                done.add(index)
                order.append(index)
                continue
            stack.append((index, True))
            stack.extend((operand, False) for operand in reversed(operands[index]) if operand not in done)
    return order, operands
