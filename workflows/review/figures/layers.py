"""Layered drawing of a small directed acyclic graph: rows by longest path, lanes kept free for long edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SWEEPS = 4
"""Passes of ordering by the mean place of neighbours; more changes nothing on graphs of a fused region's size."""


@dataclass(frozen=True)
class Drawing:
    """Places of nodes, and each edge as the points it passes."""

    centres: dict[str, tuple[float, float]]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def layered(
    inputs: Mapping[str, Sequence[str]], widths: Mapping[str, float], *, row: float, gap: float = 16, lane: float = 12
) -> Drawing:
    """Place nodes top to bottom.

    Args:
        inputs: node → nodes it reads, in an order where each is listed before it is read; unknown names are left out.
        widths: node → width of its box.
        row: distance of two rows' centres.
        gap: free space between two boxes of a row.
        lane: width kept for an edge that passes a row.
    """
    depth = _depths(inputs)
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for node, level in depth.items():
        rows[level].append(node)
    size = dict(widths)
    chains = []
    parents: dict[str, list[str]] = {node: [] for node in depth}
    for node in depth:
        for source in dict.fromkeys(name for name in inputs[node] if name in depth):
            chain = [source]
            for level in range(depth[source] + 1, depth[node]):
                bend = f"{source}\0{node}\0{level}"
                rows[level].append(bend)
                size[bend], parents[bend] = lane, [chain[-1]]
                chain.append(bend)
            parents[node].append(chain[-1])
            chains.append([*chain, node])
    _order(rows, parents)
    return _placed(rows, size, chains, row, gap)


def _depths(inputs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Longest path from a source; sources that are read late stand just above their first reader."""
    depth: dict[str, int] = {}
    for node, sources in inputs.items():
        depth[node] = max((depth[name] + 1 for name in sources if name in depth), default=0)
    first_reader: dict[str, int] = {}
    for node, sources in inputs.items():
        for name in sources:
            if name in depth:
                first_reader[name] = min(first_reader.get(name, depth[node]), depth[node])
    for node, sources in inputs.items():
        if not any(name in depth for name in sources) and node in first_reader:
            depth[node] = first_reader[node] - 1
    return depth


def _order(rows: list[list[str]], parents: dict[str, list[str]]) -> None:
    children: dict[str, list[str]] = {}
    for node, above in parents.items():
        for name in above:
            children.setdefault(name, []).append(node)
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        place = {node: index for line in rows for index, node in enumerate(line)}
        near = parents if downwards else children
        for line in rows if downwards else reversed(rows):
            key = {
                node: sum(place[n] for n in near[node]) / len(near[node]) if near.get(node) else place[node]
                for node in line
            }
            line.sort(key=key.__getitem__)
            place.update((node, index) for index, node in enumerate(line))


def _placed(rows: list[list[str]], size: dict[str, float], chains: list[list[str]], row: float, gap: float) -> Drawing:
    lengths = [sum(size[node] for node in line) + gap * max(len(line) - 1, 0) for line in rows]
    width = max(lengths, default=0.0)
    centres: dict[str, tuple[float, float]] = {}
    for level, (line, length) in enumerate(zip(rows, lengths, strict=True)):
        x = (width - length) / 2
        for node in line:
            centres[node] = (x + size[node] / 2, (level + 0.5) * row)
            x += size[node] + gap
    edges = tuple(tuple(centres[node] for node in chain) for chain in chains)
    return Drawing({n: c for n, c in centres.items() if "\0" not in n}, edges, width, len(rows) * row)
