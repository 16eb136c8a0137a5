"""A fused region before and after: the matched operations, and the one operator that takes their place."""

from __future__ import annotations

from html import escape

from shardwright.schemas.fusion import FusionProposal, RegionNode
from shardwright.schemas.words import plural
from shardwright.workflows.review.figures.layers import layered

ROW, BOX = 40.0, 24.0
CHARACTER = 6.4
"""Width of one character of the 11 px monospaced labels."""
MOST = 60
"""Nodes drawn; a larger region is cut, and says so."""


def before(proposal: FusionProposal) -> str:
    """The matched operations with what they read; empty without a recorded subgraph."""
    nodes = proposal.subgraph[:MOST]
    if not nodes:
        return ""
    cut = len(proposal.subgraph) - len(nodes)
    words = f"{plural(len(proposal.subgraph), 'node')} of {proposal.title} before fusion"
    return _drawn(nodes, words, f"{cut} more nodes are not drawn" if cut else "")


def after(proposal: FusionProposal, label: str) -> str:
    """The same inputs and parameters around one operator.

    Args:
        label: operator and provider.
    """
    outside = tuple(node for node in proposal.subgraph if node.kind != "op")[:12]
    operations = [node for node in proposal.subgraph if node.kind == "op"]
    if not operations:
        return ""
    fused = RegionNode(
        id="\1fused",
        kind="op",
        label=label,
        inputs=tuple(node.id for node in outside),
        output=operations[-1].output,
    )
    return _drawn((*outside, fused), f"{proposal.title} after fusion: {label}", "", strong="\1fused")


def _drawn(nodes: tuple[RegionNode, ...], title: str, note: str, strong: str = "") -> str:
    labels = {node.id: _label(node) for node in nodes}
    widths = {node.id: max(len(labels[node.id]) * CHARACTER + 18, 46.0) for node in nodes}
    drawing = layered({node.id: node.inputs for node in nodes}, widths, row=ROW)
    extra = 18 if note else 0
    width, height = drawing.width + 8, drawing.height + extra
    parts = [
        f'<svg class="region" width="{width:.0f}" height="{height:.0f}" viewBox="-4 0 {width:.0f} {height:.0f}" '
        f'role="img" xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
    ]
    parts += [f'<path class="edge" d="{_curve(points)}"/>' for points in drawing.edges]
    for node in nodes:
        x, y = drawing.centres[node.id]
        kind = "fused" if node.id == strong else node.kind
        left, top = x - widths[node.id] / 2, y - BOX / 2
        radius = BOX / 2 if node.kind == "input" else 3
        parts.append(
            f'<g class="node {kind}"><title>{escape(_hover(node))}</title>'
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{widths[node.id]:.1f}" height="{BOX:.0f}" rx="{radius:.0f}"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}">{escape(labels[node.id])}</text></g>'
        )
    if note:
        parts.append(f'<text class="tick" x="0" y="{height - 5:.0f}">{escape(note)}</text>')
    return "".join([*parts, "</svg>"])


def _label(node: RegionNode) -> str:
    """The operator, or the last two parts of a parameter's name."""
    text = ".".join(node.label.split(".")[-2:]) if node.kind == "parameter" else node.label
    return text if len(text) <= 30 else f"{text[:29]}…"


def _hover(node: RegionNode) -> str:
    return " · ".join(part for part in (node.label, node.output, node.source) if part)


def _curve(points: tuple[tuple[float, float], ...]) -> str:
    (x, y), steps = points[0], []
    y += BOX / 2
    for index, (to_x, centre) in enumerate(points[1:], start=1):
        last = index == len(points) - 1
        to_y = centre - BOX / 2
        middle = (y + to_y) / 2
        steps.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
        if not last:
            steps.append(f"V{centre + BOX / 2:.1f}")
        x, y = to_x, centre + BOX / 2
    return f"M{points[0][0]:.1f} {points[0][1] + BOX / 2:.1f}{''.join(steps)}"
