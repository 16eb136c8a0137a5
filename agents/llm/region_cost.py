"""What a proposed region costs eagerly and compiled: counted bytes and launches, time from the device's rates.

Legend: T tokens of one micro-batch; a capture has fewer, and activations are scaled to T. Compiled, a region reads its
inputs once and writes its outputs once; backward moves twice the bytes of forward in both (gradients beside values).
"""

from __future__ import annotations

from shardwright.agents.llm.open_regions import OpenRegion, size_bytes
from shardwright.agents.structure.patterns.base import Match
from shardwright.agents.structure.rank import Target
from shardwright.agents.structure.skeleton import BATCH, SEQUENCE
from shardwright.schemas.fusion import Gain, Variant
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.cost.compute import op_time_ms

OP = "proposed-region"
COMPILED_LAUNCHES = 1


def region_cost(region: OpenRegion, provider: str, tokens: int, dtype: str) -> OpCost:
    """Counted work of one occurrence.

    Args:
        provider: ``eager`` or ``compile``.
    """
    fixed = {i for i in region.inputs if region.canonical.by_id[i].kind in ("parameter", "buffer")}
    constant = sum(size_bytes(region.canonical.by_id[i].output) for i in fixed)
    scale = tokens / (BATCH * SEQUENCE)
    floor = constant + round((region.floor_bytes - constant) * scale)
    moved = floor if provider == "compile" else max(floor, round(region.eager_bytes * scale))
    launches = COMPILED_LAUNCHES if provider == "compile" else region.launches
    forward = PassCost(flops=0, bytes_read=moved, bytes_written=0, launches=launches, floor_flops=0, floor_bytes=floor)
    backward = PassCost(
        flops=0, bytes_read=2 * moved, bytes_written=0, launches=2 * launches, floor_flops=0, floor_bytes=2 * floor
    )
    return OpCost(op=OP, provider=provider, dtype=dtype, shape={"T": tokens}, forward=forward, backward=backward)


def gain(region: OpenRegion, provider: str, target: Target) -> Gain:
    """Modelled time beside eager's, forward and backward."""
    device = target.cluster.device
    times = {
        name: op_time_ms(region_cost(region, name, target.tokens, target.dtype), device, "fwd+bwd")
        for name in ("eager", provider)
    }
    cost = region_cost(region, provider, target.tokens, target.dtype)
    floor = cost.forward.floor_bytes + (cost.backward.floor_bytes if cost.backward else 0)
    return Gain(
        provider=provider,
        time_ms=times[provider],
        eager_ms=times["eager"],
        floor_ms=1e3 * floor / device.memory_bandwidth_bytes_per_s,
        speedup=times["eager"] / times[provider],
        origin="modelled",
        basis=f"counted bytes and {region.launches} launches of the captured operations, scaled to T {target.tokens}, "
        f"over the rates of {device.name}",
    )


def region_variants(match: Match, region: OpenRegion, target: Target, *, adapted: bool) -> tuple[Variant, ...]:
    """Eager and compiled, the fastest usable first."""
    made = []
    for spec in match.pattern.variants():
        because = spec.not_installable if spec.provider != "eager" else ""
        if not because and adapted and spec.provider != "eager":
            because = "a LoRA target lies inside the region"
        made.append(
            Variant(
                name=spec.name,
                provider=spec.provider,
                op=spec.op,
                predicate=spec.predicate,
                gain=gain(region, spec.provider, target),
                available=not because,
                unavailable_because=because,
            )
        )
    return tuple(sorted(made, key=lambda v: (not v.available, v.gain.time_ms if v.gain else 0.0, v.name)))
