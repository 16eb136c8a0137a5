"""The network between the ranks: collectives with known answers, bandwidth of every pair, the slow rank by name.

Legend: W ranks, N bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from shardwright.runtime.device import Device
from shardwright.schemas.run import PreflightResult

BYTES = 8 << 20
"""Of one message: large enough that latency and a shaper's burst do not count."""
REPEATS = 3
SLOW_SHARE = 0.5
"""A rank is slow when its fastest pair has less than this share of the median pair's bandwidth."""


@dataclass(frozen=True)
class Pair:
    """Bandwidth between two ranks, bytes/s: the message goes one way, then back."""

    first: int
    second: int
    bytes_per_s: float


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """A round-robin tournament: every pair once, every rank at most once a round (the circle method)."""
    players = [*range(world), *([-1] if world % 2 else [])]
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a >= 0 and b >= 0])
        players = [players[0], players[-1], *players[1:-1]]
    return found


def measure_pairs(device: Device, message_bytes: int = BYTES, most_rounds: int = 16) -> list[Pair]:
    """Send a message there and back in every pair (at most so many rounds); the same list on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.full((message_bytes,), rank % 251, dtype=torch.uint8, device=device.torch_device)
    into = torch.empty_like(out)
    mine: list[Pair] = []
    for pairs in rounds(world)[:most_rounds]:
        partner = next((a + b - rank for a, b in pairs if rank in (a, b)), None)
        dist.barrier()
        if partner is None:
            continue
        seconds = min(_there_and_back(out, into, partner, device) for _ in range(REPEATS))
        if rank < partner:
            mine.append(Pair(rank, partner, 2 * message_bytes / seconds))
    everyone: list[list[Pair]] = [mine] * world
    dist.all_gather_object(everyone, mine)
    return [pair for pairs in everyone for pair in pairs]


def _there_and_back(out: torch.Tensor, into: torch.Tensor, partner: int, device: Device) -> float:
    """Seconds for the message in one direction, then in the other."""
    device.synchronize()
    began = time.perf_counter()
    if dist.get_rank() < partner:
        dist.send(out, partner)
        dist.recv(into, partner)
    else:
        dist.recv(into, partner)
        dist.send(out, partner)
    device.synchronize()
    return time.perf_counter() - began


def checksums(device: Device, elements: int = 1 << 16) -> list[str]:
    """All-reduce and all-to-all of integers whose results are known; what is wrong on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = torch.arange(elements, device=device.torch_device)
    summed = place * (rank + 1)
    dist.all_reduce(summed)
    wrong = []
    if not torch.equal(summed, place * (world * (world + 1) // 2)):
        wrong.append(f"rank {rank}: all-reduce gave another sum")
    share = elements // world
    sent = (torch.arange(share * world, device=device.torch_device) // share) + 1000 * rank
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    expected = (torch.arange(share * world, device=device.torch_device) // share) * 1000 + rank
    if not torch.equal(got, expected):
        wrong.append(f"rank {rank}: all-to-all gave other values")
    return wrong


def all_reduce_bytes_per_s(device: Device, message_bytes: int = BYTES) -> float:
    """Bus bandwidth 2 (W - 1) / W · N / t of the best repeat: what each rank's link carries in each direction."""
    world = dist.get_world_size()
    value = torch.ones(message_bytes // 4, dtype=torch.float32, device=device.torch_device)
    best = float("inf")
    for _ in range(REPEATS):
        dist.barrier()
        device.synchronize()
        began = time.perf_counter()
        dist.all_reduce(value)
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * (world - 1) / world * message_bytes / best


def slow_ranks(pairs: list[Pair]) -> list[tuple[int, float]]:
    """(rank, its fastest pair's bandwidth) of ranks that are slow with everyone. With one pair nobody can be told."""
    if len(pairs) < 2:
        return []
    usual = median(pair.bytes_per_s for pair in pairs)
    best: dict[int, float] = {}
    for pair in pairs:
        for rank in (pair.first, pair.second):
            best[rank] = max(best.get(rank, 0.0), pair.bytes_per_s)
    return [(rank, rate) for rank, rate in sorted(best.items()) if rate < SLOW_SHARE * usual]


def judge(
    pairs: list[Pair], reduced: float, wrong: list[str], hosts: list[str], planned: float | None
) -> list[PreflightResult]:
    """Results for the record; ``planned`` is the slowest planned link, bytes/s."""
    slow = slow_ranks(pairs)
    worst = min(pairs, key=lambda pair: pair.bytes_per_s)
    where = ", ".join(f"rank {rank} on {hosts[rank]}" for rank, _ in slow) or "all ranks"
    told = f"slowest pair {worst.first}-{worst.second} ({hosts[worst.first]}, {hosts[worst.second]}): "
    enough = planned is None or worst.bytes_per_s >= SLOW_SHARE * planned
    against = "" if planned is None else f", planned {planned / 1e6:.1f} MB/s"
    return [
        PreflightResult(
            name="collectives-correct",
            passed=not wrong,
            where=wrong[0].partition(":")[0] if wrong else "all ranks",
            evidence="; ".join(wrong) or "all-reduce and all-to-all of known integers are exact",
        ),
        PreflightResult(
            name="pair-bandwidth",
            passed=not slow and enough,
            where=where if slow else f"ranks {worst.first} and {worst.second}",
            evidence=f"{told}{worst.bytes_per_s / 1e6:.1f} MB/s, median of {len(pairs)} pairs "
            f"{median(pair.bytes_per_s for pair in pairs) / 1e6:.1f} MB/s{against}",
            value=worst.bytes_per_s,
            unit="bytes/s",
        ),
        PreflightResult(
            name="all-reduce-bandwidth",
            passed=True,
            where="all ranks",
            evidence=f"{reduced / 1e6:.1f} MB/s a rank and direction with {BYTES >> 20} MiB",
            value=reduced,
            unit="bytes/s",
        ),
    ]
