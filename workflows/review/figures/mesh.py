"""Ranks as a grid of nodes and devices, with mesh coordinates and the experts that each rank holds."""

from __future__ import annotations

from html import escape

from shardwright.schemas.strategy import Mesh
from shardwright.schemas.words import plural

MOST = 64
"""Ranks drawn; the rest repeat the pattern, and a line says so."""
WIDTH = 760


def coordinates(mesh: Mesh, rank: int) -> tuple[int, int, int, int]:
    """(replicate, shard, ep, further) of a rank: ``rank = ((r · shard + s) · ep + e) · cp · tp · pp + further``."""
    group, further = divmod(rank, mesh.cp * mesh.tp * mesh.pp)
    return group // (mesh.shard * mesh.ep), group // mesh.ep % mesh.shard, group % mesh.ep, further


def experts_of(mesh: Mesh, num_experts: int, rank: int) -> tuple[int, int]:
    """First and one past the last expert of a rank, of the stacks cut over ``ep``; each is then sharded."""
    each = -(-num_experts // mesh.ep)
    first = coordinates(mesh, rank)[2] * each
    return first, min(first + each, num_experts)


def mesh_grid(mesh: Mesh, devices_per_node: int, num_experts: int) -> str:
    """One row of cells for each node; cells of one replica and shard share a band."""
    world = min(mesh.world_size, MOST)
    shares = mesh.cp > 1 and mesh.tp * mesh.pp == 1
    columns = max(min(devices_per_node, world), 1)
    rows = -(-world // columns)
    label = 62
    wide = (WIDTH - label) / columns
    dense = wide < 96
    tall = 46 if not dense else 40
    more = mesh.world_size - world
    height = rows * (tall + 6) + 4 + (20 if more else 0)
    ranks, experts = plural(mesh.world_size, "rank"), plural(num_experts, "expert")
    words = f"{mesh.text()}: {ranks} on nodes of {devices_per_node}, {experts} over ep"
    parts = [
        f'<svg class="mesh" viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(words)}</title>"
    ]
    for row in range(rows):
        parts.append(f'<text class="tick" x="0" y="{row * (tall + 6) + tall / 2 + 6:.0f}">node {row}</text>')
    for rank in range(world):
        r, s, e, further = coordinates(mesh, rank)
        where = f"replicate {r}, shard {s}, ep {e}" + (f", cp {further}" if shares else "")
        x, y = label + rank % columns * wide, 2 + rank // columns * (tall + 6)
        band = (r * mesh.shard + s) % 2
        parts.append(
            f"<g><title>rank {rank}: {where}{_experts(mesh, num_experts, rank, ', experts ')}"
            f'</title><rect class="rank band{band}" x="{x:.1f}" y="{y}" width="{wide - 5:.1f}" height="{tall}" rx="5"/>'
            f'<text class="cell" x="{x + 8:.1f}" y="{y + (15 if dense else 18)}">{rank}</text>'
        )
        if not dense:
            place = f"r{r} s{s} e{e}" + (f" c{further}" if shares else "")
            parts.append(f'<text class="tick" x="{x + wide - 13:.1f}" y="{y + 18}" text-anchor="end">{place}</text>')
        span = _experts(mesh, num_experts, rank, "" if dense else "experts ")
        if span and mesh.shard > 1 and not dense:
            span += f", part {s + 1} of {mesh.shard}"
        parts.append(f'<text class="tick" x="{x + 8:.1f}" y="{y + tall - 8}">{span}</text></g>')
    if more:
        words = f"and {plural(more, 'more rank')} in the same pattern"
        parts.append(f'<text class="tick" x="{label}" y="{height - 6}">{words}</text>')
    return "".join([*parts, "</svg>"])


def _experts(mesh: Mesh, num_experts: int, rank: int, before: str) -> str:
    if not num_experts:
        return ""
    first, last = experts_of(mesh, num_experts, rank)
    if first >= last:
        return f"{before}none"
    return f"{before}{first}" if last - first == 1 else f"{before}{first}–{last - 1}"
