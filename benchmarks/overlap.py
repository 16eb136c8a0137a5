"""How much of the experts' exchange is hidden under computation, over gloo on this machine's cores.

``python benchmarks/overlap.py [--tokens N] [--chunks C] [--shared] [--self-test] [--append] [--trace FOLDER]``

Two processes, ep 2, one layer's experts with adapters, forward and backward; once whole and once in chunks, or with
``--shared`` a block with a shared expert, once after the routed ones and once under their dispatch, which with
``--chunks`` is in pieces too. ``--self-test`` runs both kinds small and fails unless the whole exchange is exposed and
the other is less so. Time is read from
the profiler's timeline: exchanges are gloo's own events, from their start to their end; computation is what the experts
run meanwhile, without its waits. ``exposed share`` = time of exchanges in which the process did not compute ÷ time of
exchanges; whole exchanges are waited for where they start, so theirs is 1. ``--trace`` keeps the timelines for chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lines import append, line
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardwright.checkpoints.layouts import STANDARD
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.overlap import COMPUTE
from shardwright.runtime.experts.shared import SHARED_COMPUTE, put_shared_under_dispatch
from shardwright.schemas.bench import BenchLine

E, H, I, K, RANK, RANKS = 8, 256, 512, 2, 16, 2
BESIDE = ("", "after", "under")
"""No shared expert, one after the routed experts, one under their dispatch."""
Spans = list[tuple[float, float]]


class Family(nn.Module):
    """Stacks and activation of a family with merged gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, I))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> None:
        """Only its signature is read."""


class Block(nn.Module):
    """Routed experts, then a shared one on the same tokens."""

    def __init__(self, rank: int, chunks: int, beside: str) -> None:
        super().__init__()
        self.experts = experts(rank, chunks)
        widths = (H, 2 * I, H)
        layers = [nn.Linear(into, out, bias=False) for into, out in pairwise(widths)]
        self.shared_experts = nn.Sequential(layers[0], nn.SiLU(), layers[1]).requires_grad_(False)
        if beside == "under":
            put_shared_under_dispatch(nn.ModuleDict({"block": self}))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, H], [T, K], [T, K] → [T, H]."""
        routed: torch.Tensor = self.experts(hidden, index, weights)
        return routed + self.shared_experts(hidden)


def experts(rank: int, chunks: int) -> LoraExperts:
    """Local experts with random values and adapters on both stacks."""
    made = LoraExperts(Family(), "experts", STANDARD, RANKS, rank, dist.group.WORLD, LoadMeter(), chunks=chunks)
    generator = torch.Generator().manual_seed(rank)
    for stack, into, out in (("gate_up_proj", H, 2 * I), ("down_proj", I, H)):
        getattr(made, stack).data.normal_(0.0, into**-0.5, generator=generator)
        a = nn.Parameter(torch.randn(E // RANKS, RANK, into, generator=generator) * into**-0.5)
        made.add_adapter(stack, a, nn.Parameter(torch.randn(E // RANKS, out, RANK, generator=generator)), 2.0)
    return made


def union(spans: Spans) -> Spans:
    """Disjoint spans that cover the same time, ascending."""
    out: Spans = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def common(left: Spans, right: Spans) -> float:
    """Time that lies in both of two disjoint lists."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in left for c, d in right)


def shares(trace: Path) -> tuple[float, float]:
    """(exposed share, milliseconds of exchanges) of a timeline."""
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one.get("ph") == "X"]
    moving = union([(one["ts"], one["ts"] + one["dur"]) for one in events if one["name"].startswith("gloo:all_to_all")])
    names = (
        "aten::mm",
        "aten::addmm_",
        "aten::silu",
        "aten::mul",
        "aten::index",
        COMPUTE,
        SHARED_COMPUTE,
        "GroupedLoraLinearBackward",
    )
    work = union([(one["ts"], one["ts"] + one["dur"]) for one in events if one["name"].startswith(names)])
    total = sum(stop - start for start, stop in moving)
    return 1 - common(moving, work) / total, total / 1e3


def worker(rank: int, tokens: int, chunks: int, beside: str, repeats: int, store: str, out: Path) -> None:
    """One rank: warm up, profile, write its timelines' shares and step times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    generator = torch.Generator().manual_seed(10 + rank)
    index = torch.randint(0, E, (tokens, K), generator=generator)
    weights = torch.rand(tokens, K, generator=generator)
    found: dict[str, list[float]] = {"exposed": [], "exposed_ms": [], "exchange_ms": [], "step_ms": []}
    torch.manual_seed(rank)
    module = Block(rank, chunks, beside) if beside else experts(rank, chunks)
    for repeat in range(repeats + 1):
        hidden = torch.randn(tokens, H, generator=generator, requires_grad=True)
        dist.barrier()
        trace = out / f"rank{rank}-chunks{chunks}{beside}.json"
        with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.profiler.record_function("step"):
            module(hidden, index, weights).square().mean().backward()
        profiler.export_chrome_trace(str(trace))
        if repeat == 0:
            continue
        exposed, exchange = shares(trace)
        step = next(one for one in profiler.key_averages() if one.key == "step").cpu_time_total / 1e3
        for key, value in zip(found, (exposed, exposed * exchange, exchange, step), strict=True):
            found[key].append(value)
    medians = {key: statistics.median(values) for key, values in found.items()}
    (out / f"rank{rank}-chunks{chunks}{beside}.result").write_text(json.dumps(medians))
    dist.barrier()


def measure(tokens: int, chunks: int, beside: str, repeats: int, out: Path) -> dict[str, float]:
    """Both ranks' medians, averaged.

    Raises:
        subprocess.CalledProcessError: where a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = [sys.executable, __file__, "--tokens", str(tokens), "--chunks", str(chunks), "--trace", str(out)]
        here += ["--repeats", str(repeats), *(["--beside", beside] if beside else [])]
        ranks = [subprocess.Popen([*here, "--rank", str(rank), "--store", f"{folder}/store"]) for rank in range(RANKS)]
        codes = [one.wait(timeout=300) for one in ranks]
    if any(codes):
        raise subprocess.CalledProcessError(max(codes), here)
    results = [json.loads((out / f"rank{rank}-chunks{chunks}{beside}.result").read_text()) for rank in range(RANKS)]
    return {key: sum(one[key] for one in results) / RANKS for key in results[0]}


def compare(tokens: int, chunks: int, shared: bool, repeats: int, out: Path) -> BenchLine:
    """A whole exchange, waited for, beside one in chunks, under the shared expert, or both: one result line."""
    cases = ((1, "after"), (chunks, "under")) if shared else ((1, ""), (chunks, ""))
    whole, cut = (measure(tokens, pieces, beside, repeats, out) for pieces, beside in cases)
    how = "under" if shared else "chunked"
    name = "overlap" if not shared else "shared-expert" if chunks == 1 else "chunks-and-shared-expert"
    return line(
        {
            "bench": "overlap",
            "case": f"{name}/ep2-{tokens}x{H}",
            "passes": "fwd+bwd",
            "unit": "share",
            "ours": round(cut["exposed"], 4),
            "rival": "one exchange, waited for",
            "rival_value": round(whole["exposed"], 4),
            "metrics": {
                "chunks": float(chunks),
                **{f"{how}_{key}": round(cut[key], 3) for key in ("exposed_ms", "exchange_ms", "step_ms")},
                **{f"whole_{key}": round(whole[key], 3) for key in ("exposed_ms", "exchange_ms", "step_ms")},
            },
        }
    )


def self_test(out: Path) -> list[BenchLine]:
    """Chunks, a shared expert, and both, small.

    Raises:
        SystemExit: where an overlapped exchange is as exposed as a whole one.
    """
    found = [compare(512, chunks, shared, 1, out) for chunks, shared in ((4, False), (1, True), (3, True))]
    for one in found:
        if one.rival_value is None or not one.ours < one.rival_value > 0.99:
            raise SystemExit(f"{one.case}: exposed {one.ours} overlapped, {one.rival_value} whole")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """One result line a case."""
    parser = argparse.ArgumentParser(prog="overlap.py")
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--chunks", type=int, help="[default: 4, and 1 with --shared]")
    parser.add_argument("--shared", action="store_true", help="a shared expert after and under the dispatch")
    parser.add_argument("--repeats", type=int, default=5, help="after one of warm-up; medians count")
    parser.add_argument("--self-test", action="store_true", help="all three kinds on a small size")
    parser.add_argument("--append", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--trace", type=Path, help="where to keep the timelines")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--beside", default="", choices=BESIDE, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        worked = (options.rank, options.tokens, options.chunks, options.beside, options.repeats)
        worker(*worked, options.store, options.trace)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = options.trace or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        chunks = options.chunks or (1 if options.shared else 4)
        if options.self_test:
            found = self_test(out)
        else:
            found = [compare(options.tokens, chunks, options.shared, options.repeats, out)]
    for one in found:
        sys.stdout.write(one.model_dump_json() + "\n")
    if options.append:
        append(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
