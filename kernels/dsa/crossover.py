"""Where sparse attention with its indexer becomes faster than dense attention: the times that ``choose`` reads.

``python3 -m shardwright.kernels.dsa.crossover RESULTS.jsonl`` takes the ``dsa-layer/…`` lines of a suite's result file,
writes ``attention/times.json`` anew for their device and says where the times cross. No torch.

Legend: T tokens of one document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardwright.kernels.dsa.attention.choose import TIMES, crossover, read_times
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.errors import KernelError
from shardwright.schemas.files import write_atomic

PREFIX = "dsa-layer/"
DENSE, INDEXER = "dense_cudnn_ms", "indexer_ms"
BOTH = "fwd+bwd"
PLACES = 4


def entry_of(lines: Iterable[BenchLine]) -> tuple[str, dict[str, Any]]:
    """(device, its entry): every T that has both a forward line and one of both passes.

    Raises:
        KernelError: ``no-layer-lines`` where no T has both, or lines of several devices are mixed.
    """
    found: dict[int, dict[str, BenchLine]] = {}
    for line in lines:
        if line.case.startswith(PREFIX) and {DENSE, INDEXER} <= {*line.metrics}:
            found.setdefault(tokens_of(line.case), {})[line.passes] = line
    whole = {T: pair for T, pair in sorted(found.items()) if {"fwd", BOTH} <= {*pair}}
    devices = {line.device for pair in whole.values() for line in pair.values()}
    if len(devices) != 1:
        raise KernelError(
            "no-layer-lines",
            f"{len(whole)} lengths have a forward and both passes, of {len(devices)} devices",
            where="kernels.dsa.crossover",
            next_action="run kernels.suite --ops dsa on one device and pass its result file",
        )
    entry: dict[str, Any] = {"dense": {}, "sparse": {}, "indexer": {}}
    for T, pair in whole.items():
        forward, both = pair["fwd"], pair[BOTH]
        assert forward.ours is not None and both.ours is not None
        dense, indexer = forward.metrics[DENSE], forward.metrics[INDEXER]
        entry["dense"][str(T)] = [round(dense, PLACES), round(both.metrics[DENSE] - dense, PLACES)]
        entry["sparse"][str(T)] = [round(forward.ours - indexer, PLACES), round(both.ours - forward.ours, PLACES)]
        entry["indexer"][str(T)] = round(indexer, PLACES)
    (device,) = devices
    newest = max(line.date for pair in whole.values() for line in pair.values())
    entry["basis"] = f"{PREFIX}* of a suite's run on {newest}, commit {next(iter(whole.values()))['fwd'].commit}"
    return device, entry


def tokens_of(case: str) -> int:
    """``dsa-layer/T32k-H64`` → 32768."""
    return int(case.removeprefix(PREFIX).partition("k")[0].removeprefix("T")) * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Renew the times that choose dense or sparse attention.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--into", type=Path, default=TIMES)
    chosen = parser.parse_args(arguments)
    texts = chosen.results.read_text("utf-8").splitlines()
    try:
        device, entry = entry_of(BenchLine.model_validate_json(text) for text in texts if text.strip())
    except KernelError as error:
        sys.stderr.write(error.text() + "\n")
        return int(error.exit_code)
    kept = json.loads(chosen.into.read_bytes()) if chosen.into.exists() else {}
    write_atomic(chosen.into, (json.dumps({**kept, device: entry}, indent=2, sort_keys=True) + "\n").encode())
    measured = read_times(chosen.into)
    for training in (True, False):
        T = crossover(device, training=training, measured=measured)
        passes = "forward and backward" if training else "forward"
        where = f"from T {T} on" if T else "nowhere up to T 1048576"
        sys.stdout.write(f"{device}: sparse is faster {where} ({passes})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
