"""Dense or sparse attention for a layer with an indexer: by what is exact, then by measured times. No torch.

Where no document is longer than the selection, every query selects all it sees: dense attention is the same function
and needs no indexer. Longer ones differ, so dense is taken there only where the caller says that attending to all keys
is meant too (a dense warm-up, or data on which both were shown to agree), and then by time.

Legend: T tokens of the longest document, K selected keys.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Path = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Measured:
    """Milliseconds on one device by T: (forward, backward). 64 heads, bf16."""

    dense: Mapping[int, tuple[float, float]]
    """The library's causal attention, widths 192 and 128; projections not counted."""
    sparse: Mapping[int, tuple[float, float]]
    """This operator, latent 512 and 64, K 2048."""
    indexer: Mapping[int, float]
    """Scores of 64 index heads and the exact top-2048; forward, for the indexer is frozen."""


TIMES = pathlib.Path(__file__).with_name("times.json")
"""Device → times, as ``kernels.dsa.crossover`` makes them of result lines."""


def read_times(path: pathlib.Path = TIMES) -> dict[str, Measured]:
    """The times of every device in a file."""
    found: dict[str, Measured] = {}
    for device, entry in json.loads(path.read_bytes()).items():
        both = {kind: {int(T): (ms[0], ms[1]) for T, ms in entry[kind].items()} for kind in ("dense", "sparse")}
        indexer = {int(T): float(ms) for T, ms in entry["indexer"].items()}
        found[device] = Measured(both["dense"], both["sparse"], indexer)
    return found


MEASURED: Mapping[str, Measured] = read_times()


@dataclass(frozen=True)
class Choice:
    """What to run, and why in words with the numbers it rests on."""

    path: Path
    reason: str
    dense_ms: float | None = None
    sparse_ms: float | None = None


def between(times: Mapping[int, float], T: int) -> float:
    """Time at T by the power law through the two nearest measured lengths, also beyond the ends."""
    known = sorted(times)
    if len(known) == 1:
        return times[known[0]] * T / known[0]
    above = next((at for at in range(1, len(known)) if known[at] >= T), len(known) - 1)
    low, high = known[above - 1], known[above]
    power = math.log(times[high] / times[low]) / math.log(high / low)
    return float(times[low] * (T / low) ** power)


def times(found: Measured, T: int, training: bool) -> tuple[float, float]:
    """Dense and sparse milliseconds of one document; sparse with its indexer."""
    passes = (0, 1) if training else (0,)
    dense = sum(between({t: ms[at] for t, ms in found.dense.items()}, T) for at in passes)
    sparse = sum(between({t: ms[at] for t, ms in found.sparse.items()}, T) for at in passes)
    return dense, sparse + between(found.indexer, T)


def choose(
    T: int,
    K: int,
    device: str,
    *,
    training: bool,
    dense_is_meant: bool = False,
    measured: Mapping[str, Measured] = MEASURED,
) -> Choice:
    """Which attention a layer runs for documents of up to T tokens.

    Args:
        device: the device's name, as torch gives it.
        training: backward included.
        dense_is_meant: attending to all keys is as right as attending to the selected ones.
    """
    if T <= K:
        why = f"no document is longer than the {K} selected keys: dense attention is the same function, no indexer runs"
        return Choice("dense", why)
    if not dense_is_meant:
        why = f"documents of {T} tokens are longer than the {K} selected keys: dense attention is another function"
        return Choice("sparse", why)
    if device not in measured:
        why = f"no times were measured on {device}: the model's own sparse attention stays"
        return Choice("sparse", why)
    dense, sparse = times(measured[device], T, training)
    path: Path = "dense" if dense < sparse else "sparse"
    passes = "forward and backward" if training else "forward"
    why = f"at T {T} {passes} take {dense:.1f} ms dense and {sparse:.1f} ms sparse with its indexer on {device}"
    return Choice(path, why, round(dense, 3), round(sparse, 3))


def crossover(device: str, *, training: bool, measured: Mapping[str, Measured] = MEASURED) -> int:
    """The shortest document, in steps of 1,024 tokens up to 1 M, for which sparse attention is faster; 0 for none."""
    lengths = range(1024, (1 << 20) + 1, 1024)
    both = ((T, times(measured[device], T, training)) for T in lengths)
    return next((T for T, (dense, sparse) in both if sparse < dense), 0)
