"""Time the MoE operators beside their rivals, on this machine's device, from source.

``PYTHONPATH=src python3 -m shardwright.kernels.moe_layer.measure [--cases PREFIX ...] [--out DIR]``. Uses the
shared clock, passes and environment of ``kernels.bench``; adds what a MoE line must state: the floor of the
products, the distribution of rows, launches, and with LoRA our own time without it.

Legend: T tokens, K experts a token, E experts, R rows.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from shardwright.kernels import bench
from shardwright.kernels.cases import BenchCase, OpSuite
from shardwright.kernels.grouped_lora_mlp import cases as grouped
from shardwright.kernels.moe_layer import cases as layer
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.files import write_atomic

FLOPS_PER_S, BYTES_PER_S = 790e12, 4.3e12
"""Ceilings behind the floors: bf16 products and copies measured on one H200."""

ROOM = Path(__file__).resolve().parent.parent
SUITES = (layer.SUITE, grouped.SUITE, layer.LORA_SUITE, grouped.LORA_SUITE)


def sources() -> str:
    """Hash of everything that the timed operators run through."""
    digest = hashlib.sha256()
    for folder in ("grouped_lora_mlp", "moe_layer", "permute"):
        for path in sorted((ROOM / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def floor_ms(suite: OpSuite, case: BenchCase, name: str) -> float:
    """The larger of products and bytes, over the ceilings."""
    cost = suite.cost(**case.shape, dtype="bfloat16")
    parts = [cost.forward] + ([cost.backward] if name != "fwd" and cost.backward else [])
    flops, moved = sum(p.floor_flops for p in parts), sum(p.floor_bytes for p in parts)
    return 1e3 * max(flops / FLOPS_PER_S, moved / BYTES_PER_S)


def launches(run: Callable[[], object]) -> int:
    """Kernels and copies that one call starts on the device."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sum(1 for event in trace.events() if event.device_type == DeviceType.CUDA)


def rows_of(suite: OpSuite, case: BenchCase) -> Tensor:
    """Rows of each expert."""
    s = case.shape
    if suite.op == "moe_layer":
        return torch.bincount(layer.routing(s["T"], s["K"], s["E"], "cuda").flatten(), minlength=s["E"])
    return grouped.counts(s["R"], s["E"], "cuda")


def measure(suite: OpSuite, case: BenchCase, name: str, when: str, sha: str) -> BenchLine:
    """One line: ours and every rival in this process, and ours without LoRA where the case has it."""
    functions = {"ours": suite.fused, **{who: make() for who, make in suite.rivals.items()}}
    refused: dict[str, float] = {}
    try:
        times, busy, peak = bench.bench_pass(suite, case, name, functions)
    except torch.OutOfMemoryError:
        functions.pop("peft", None)  # it forms the base's difference, and its gradient, for every expert
        refused = {"peft_out_of_memory": 1.0}
        torch.cuda.empty_cache()
        times, busy, peak = bench.bench_pass(suite, case, name, functions)
    metrics = refused | {f"{who}_ms": round(ms, 4) for who, ms in times.items() if who != "ours"}
    metrics |= {f"{who}_device_ms": round(ms, 4) for who, ms in busy.items()}
    count = rows_of(suite, case).float()
    metrics |= {"rows_mean": round(count.mean().item(), 1), "rows_max": count.max().item()}
    metrics |= {"rows_min": count.min().item(), "experts_empty": float((count == 0).sum().item())}
    metrics["launches"] = float(launches(bench.timed_pass(suite, case, suite.fused, name)))
    floor, rival = floor_ms(suite, case, name), min((w for w in times if w != "ours"), key=lambda w: times[w])
    metrics["floor_fraction"] = round(floor / times["ours"], 4)
    if case.shape.get("r"):
        plain = layer.SUITE if suite.op == "moe_layer" else grouped.SUITE
        bare = BenchCase(case.case, {k: v for k, v in case.shape.items() if k != "r"}, case.dtype, case.passes)
        alone, _, _ = bench.bench_pass(plain, bare, name, {"ours": plain.fused})
        metrics["without_lora_ms"] = round(alone["ours"], 4)
        metrics["lora_factor"] = round(times["ours"] / alone["ours"], 4)
    return BenchLine(
        bench="kernels",
        case=case.case,
        passes=name,
        ours=round(times["ours"], 4),
        rival=rival,
        rival_value=round(times[rival], 4),
        ratio=round(times[rival] / times["ours"], 4),
        floor=round(floor, 4),
        peak_bytes=peak,
        device=torch.cuda.get_device_name(),
        versions={**bench.environment(), "source": sha[:16]},
        commit=bench.commit(sha),
        date=when,
        metrics=metrics,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the MoE operators beside their rivals.")
    parser.add_argument("--cases", nargs="*", default=[""], help="prefixes of case names")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    chosen = parser.parse_args(arguments)
    when, sha = bench.today(), sources()
    path = chosen.out / f"kernels-moe-{torch.cuda.get_device_name().lower().replace(' ', '-')}-{when}.jsonl"
    lines: list[str] = []
    for suite in SUITES:
        for case in suite.bench:
            if not any(case.case.startswith(prefix) for prefix in chosen.cases):
                continue
            for name in case.passes:
                lines.append(measure(suite, case, name, when, sha).model_dump_json() + "\n")
                sys.stdout.write(lines[-1])
                sys.stdout.flush()
                torch.cuda.empty_cache()
                write_atomic(path, "".join(lines).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
