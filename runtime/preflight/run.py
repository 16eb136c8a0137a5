"""The whole preflight on all ranks: hard faults end the run before weights are read, soft ones are told."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from shardwright.runtime.device import Device
from shardwright.runtime.preflight import facts, network
from shardwright.schemas.errors import CheckFailed
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import PreflightResult

SOFT = frozenset({"clocks", "pair-bandwidth"})
"""They make a run slow or its logs confusing, never wrong."""
ADAPTER_STATES = 3
"""A save holds the adapters and two moments, fp32."""


def preflight(plan: AdaptationPlan, device: Device, run_dir: Path) -> tuple[PreflightResult, ...]:
    """Test everything; every rank calls this and gets the same results."""
    run_dir.mkdir(parents=True, exist_ok=True)
    found = facts.gather(plan, device, run_dir)
    save_bytes = ADAPTER_STATES * 4 * sum(target.adapter_parameters for target in plan.decision.lora_targets)
    results = facts.judge(plan, found, save_bytes)
    if dist.get_world_size() > 1:
        mine = network.checksums(device)
        wrong: list[list[str]] = [mine] * dist.get_world_size()
        dist.all_gather_object(wrong, mine)
        pairs = network.measure_pairs(device)
        reduced = network.all_reduce_bytes_per_s(device)
        hosts = [one.host for one in found]
        links = [link.bandwidth_bytes_per_s for link in plan.evidence.cluster.links]
        flat = [line for lines in wrong for line in lines]
        results += network.judge(pairs, reduced, flat, hosts, min(links, default=None))
        box = [results]
        dist.broadcast_object_list(box, src=0)  # times differ from rank to rank; what is judged must not
        results = box[0]
    return tuple(results)


def warnings(results: tuple[PreflightResult, ...]) -> tuple[str, ...]:
    """A line for each soft fault."""
    return tuple(
        f"preflight {one.name}: {one.where}: {one.evidence}" for one in results if not one.passed and one.name in SOFT
    )


def require(results: tuple[PreflightResult, ...]) -> None:
    """End on a hard fault.

    Raises:
        CheckFailed: ``preflight-NAME``, naming rank and host.
    """
    for one in results:
        if not one.passed and one.name not in SOFT:
            raise CheckFailed(
                f"preflight-{one.name}",
                one.evidence,
                where=one.where,
                next_action="mend or leave out this machine; nothing was loaded",
            )
