"""One rank of ``multi_gpu.py``: started by torchrun, prints results of rank 0 as lines that begin with ``RESULT``."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from multi_gpu_cases import (
    COUNTED,
    FUSED_PARITY,
    Setting,
    families,
    meshes,
    overlap_settings,
    parity_ids,
    scaling_settings,
    step_settings,
)
from multi_gpu_lines import COMPLETE
from multi_gpu_model import build
from multi_gpu_run import BEGUN, RESULT
from multi_gpu_timeline import exposed_share
from points_shapes import SHAPES, TINY

from shardwright.runtime.device import Device, open_device
from shardwright.runtime.garbage import collected_between_steps
from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.cluster import CurvePoint
from shardwright.schemas.files import write_atomic
from shardwright.schemas.recipe import PrecisionSpec
from shardwright.schemas.strategy import Mesh, ParallelStrategy

WARMUP, STEPS = 2, 4


def out(kind: str, case: str, more: dict[str, Any] | None = None, **metrics: float) -> None:
    """A result of the first rank; ``more``: what a line of results has no place for."""
    if dist.get_rank() == 0:
        sys.stdout.write(RESULT + json.dumps({"kind": kind, "case": case, "metrics": metrics, **(more or {})}) + "\n")
        sys.stdout.flush()


def goes_on(given: argparse.Namespace, device: Device, case: str) -> bool | None:
    """Whether a case is run now: ``None`` where an earlier start did it, ``False`` for want of time.

    The first rank's clock decides for all: a rank that went on alone would wait for the others for ever.
    """
    if case in given.done:
        return None
    late = torch.tensor(int(time.monotonic() - given.began > given.limit_seconds), device=device.torch_device)
    dist.broadcast(late, 0)
    if late:
        say(f"{case}: not begun, {given.limit_seconds:.0f} s are over")
        return False
    if dist.get_rank() == 0:
        sys.stdout.write(f"{BEGUN}{case}\n")
        sys.stdout.flush()
    return True


def say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def fresh(device: Device) -> None:
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def calibrate(given: argparse.Namespace, device: Device) -> None:
    """Curves of this machine as ``shardwright calibrate`` makes them, and of all-reduce and a skewed exchange."""
    from shardwright.workflows.calibration import COLLECTIVE_BYTES, measure

    quiet = (lambda text: None) if dist.get_rank() else say
    found = measure(quick=given.rehearse, progress=quiet)
    ranks, more = dist.get_world_size(), {}
    sizes = COLLECTIVE_BYTES[device.kind][: 2 if given.rehearse else None]
    for name in ("all_reduce", "all_to_all_skewed"):
        points = []
        for count in sizes:
            seconds, moved = _collective(name, count, ranks, device)
            points.append(CurvePoint(size=count, rate=moved / seconds))
            say(f"{name}, {count >> 10} KiB a rank: {moved / seconds / 1e9:,.2f} GB/s")
        more[name] = tuple(points)
    found = found.model_copy(update={"collectives": {**found.collectives, **more}})
    if dist.get_rank() == 0:
        write_atomic(Path(given.calibration), pretty_bytes(found))
    for name, curve in found.collectives.items():
        out("calibrate", name, **{f"gb_per_s_at_{int(p.size)}": round(p.rate / 1e9, 3) for p in curve})
    kept = {"calibration": json.loads(pretty_bytes(found))}
    out("calibrate", COMPLETE, kept, seconds=time.monotonic() - given.began)


def _collective(name: str, count: int, ranks: int, device: Device) -> tuple[float, float]:
    """(median seconds, bytes that the busiest rank sends). Skewed: half of all rows go to rank 0."""
    part = torch.ones(count, dtype=torch.uint8, device=device.torch_device)
    if name == "all_reduce":
        whole = torch.ones(count // 4, device=device.torch_device)
        return _median(lambda: dist.all_reduce(whole), device), 8.0 * (count // 4) * (ranks - 1) / ranks
    first, other = count // 2, count // 2 // max(ranks - 1, 1)
    send = [first] + [other] * (ranks - 1)
    receive = [first] * ranks if dist.get_rank() == 0 else [other] * ranks
    got = torch.empty(sum(receive), dtype=torch.uint8, device=device.torch_device)
    sent = part[: sum(send)]
    work = lambda: dist.all_to_all_single(got, sent, receive, send)  # noqa: E731
    return _median(work, device), float(first * (ranks - 1))


def _median(work: Any, device: Device) -> float:
    times = []
    for _ in range(9):
        dist.barrier()
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def parity(given: argparse.Namespace, device: Device) -> None:
    """Loss, norm and every adapter's gradient of a batch; one rank writes the reference, more compare with it."""
    world = dist.get_world_size()
    for family, config, operators in (*families(), *FUSED_PARITY(device.kind)):
        for base in ("float32", "bfloat16") if device.kind == "cuda" else ("float32",):
            name = f"{family}-{base}-{'fused' if operators else 'eager'}"
            reference = Path(given.work) / f"{name}.pt"
            if world > 1 and not reference.is_file():
                say(f"{name}: no reference was made")
                continue
            for mesh in meshes(world):
                case = f"{mesh_name(mesh)}/{name}"
                going = goes_on(given, device, case)
                if going is False:
                    return
                if going:
                    fresh(device)
                    _one_parity(case, config(), mesh, base, operators, reference, device)
    out("parity", COMPLETE, seconds=time.monotonic() - given.began)


def _one_parity(
    case: str, config: Any, mesh: Mesh, base: str, operators: tuple[str, ...], reference: Path, device: Device
) -> None:
    world = dist.get_world_size()
    precision = PrecisionSpec(base=base, adapter="float32")
    strategy = ParallelStrategy(mesh=mesh, checkpointing="full" if operators else "none")
    live = build(config, strategy, precision, ("attention", "experts"), operators, device, exact=True)
    share = parity_ids(config.vocab_size).split(1)
    mine = share[dist.get_rank() * len(share) // world : (dist.get_rank() + 1) * len(share) // world]
    loss, _ = live.gradient(mine, COUNTED)
    norm, gradients = live.norm(), live.whole_gradients()
    if world == 1:
        torch.save({"loss": loss, "norm": norm, "gradients": gradients}, reference)
        out("parity", case, loss=loss)
        return
    kept = torch.load(reference, weights_only=True)
    out(
        "parity",
        case,
        loss_error=abs(loss - kept["loss"]),
        norm_error=abs(norm - kept["norm"]) / max(kept["norm"], 1e-12),
        gradient_error=_worst(gradients, kept["gradients"]),
        loss=loss,
    )


def _worst(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Largest over adapters of ‖ours − theirs‖ ÷ ‖theirs‖, of those that learn at all."""
    if set(ours) != set(theirs):
        raise SystemExit(f"adapters differ: {sorted(set(ours) ^ set(theirs))[:4]}")
    largest = max(float(theirs[name].norm()) for name in theirs)
    worst = 0.0
    for name, value in theirs.items():
        size = max(float(value.norm()), 1e-6 * largest)
        worst = max(worst, float((ours[name] - value).norm()) / size)
    return worst


def mesh_name(mesh: Mesh) -> str:
    found = [(mesh.replicate, "replicate"), (mesh.shard, "fsdp"), (mesh.ep, "ep")]
    return "x".join(f"{word}{size}" for size, word in found if size > 1) or "one"


def steps(given: argparse.Namespace, device: Device) -> None:
    """Real-size steps: time of the slowest rank, peak of the fullest."""
    models = tuple(given.models.split(","))
    _every("steps", step_settings(dist.get_world_size(), models, given.rehearse), given, device)


def scaling(given: argparse.Namespace, device: Device) -> None:
    """The same of a step with as many rows a rank on every number of ranks."""
    model = given.models.split(",")[0]
    _every("scaling", scaling_settings(dist.get_world_size(), model, given.rehearse), given, device)


def _every(kind: str, settings: list[Setting], given: argparse.Namespace, device: Device) -> None:
    for setting in settings:
        going = goes_on(given, device, setting.case)
        if going is False:
            return
        if going:
            _measure(kind, setting, given.rehearse, device)
            fresh(device)
    out(kind, COMPLETE, seconds=time.monotonic() - given.began)


def _measure(kind: str, setting: Setting, rehearse: bool, device: Device) -> None:
    """Steps of one setting: the median's time, peaks, the experts' loads."""
    live, rows = _live(setting, rehearse, device)
    weights = torch.cuda.memory_allocated() if device.kind == "cuda" else 0
    times, hottest, seen = [], 0.0, []
    for number in range(WARMUP + (1 if rehearse else STEPS)):
        if number == WARMUP and device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        device.synchronize()
        began = time.perf_counter()
        _, loads = live.gradient([rows], rows.numel() * dist.get_world_size())
        live.apply()
        device.synchronize()
        times.append(_largest(time.perf_counter() - began, device))
        if number >= WARMUP:
            seen.append(torch.stack([n.double() for n in loads.values()]))
        hottest = max([hottest, *(float(n.max()) * n.numel() / max(float(n.sum()), 1.0) for n in loads.values())])
    peak = torch.cuda.max_memory_allocated() if device.kind == "cuda" else 0
    reserved = torch.cuda.max_memory_reserved() if device.kind == "cuda" else 0
    seconds = statistics.median(times[WARMUP:])
    rows_seen = torch.stack(seen).sum(0)
    shares = (rows_seen / rows_seen.sum(1, keepdim=True)).tolist()
    out(
        kind,
        setting.case,
        {"loads": [[round(share, 6) for share in layer] for layer in shares]},
        step_ms=1e3 * seconds,
        tokens_per_s=rows.numel() * dist.get_world_size() / seconds,
        peak_bytes=_largest(float(peak), device),
        reserved_bytes=_largest(float(reserved), device),
        weights_bytes=_largest(float(weights), device),
        hottest_expert=hottest,
        ranks=float(dist.get_world_size()),
    )


def _live(setting: Setting, rehearse: bool, device: Device) -> tuple[Any, torch.Tensor]:
    fresh(device)
    shape = SHAPES[setting.model]
    config = shape.hf_config(setting.layers, TINY[setting.model] if rehearse else None)
    precision = PrecisionSpec(base="float32" if device.kind == "cpu" else "bfloat16", adapter="float32")
    began = time.perf_counter()
    live = build(config, setting.strategy, precision, setting.targets, setting.operators, device, exact=False)
    say(f"{setting.case}: built in {time.perf_counter() - began:.1f} s")
    micro = setting.strategy.micro_batch_sequences
    generator = torch.Generator().manual_seed(dist.get_rank())
    return live, torch.randint(0, config.vocab_size, (micro, setting.tokens), generator=generator)


def _largest(value: float, device: Device) -> float:
    found = torch.tensor(value, dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def overlap(given: argparse.Namespace, device: Device) -> None:
    """Share of the experts' exchanges that no computation covers, from a profiler's timeline of one step."""
    for setting in overlap_settings(dist.get_world_size(), given.models.split(",")[0], given.rehearse):
        going = goes_on(given, device, setting.case)
        if going is False:
            return
        if going:
            _overlapped(setting, given.rehearse, device)
            fresh(device)
    out("overlap", COMPLETE, seconds=time.monotonic() - given.began)


def _overlapped(setting: Setting, rehearse: bool, device: Device) -> None:
    from torch.profiler import ProfilerActivity, profile

    live, rows = _live(setting, rehearse, device)
    times = []
    for _ in range(WARMUP + 1):
        device.synchronize()
        began = time.perf_counter()
        live.gradient([rows], rows.numel())
        device.synchronize()
        times.append(_largest(time.perf_counter() - began, device))
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.kind == "cuda" else [])
    with profile(activities=kinds) as timeline:
        live.gradient([rows], rows.numel())
        device.synchronize()
    exchange_ms, exposed_ms = exposed_share(timeline.events(), device.kind)
    share = exposed_ms / exchange_ms if exchange_ms else 0.0
    out("overlap", setting.case, step_ms=1e3 * times[-1], exchange_ms=exchange_ms, exposed_share=share)


PARTS = {"calibrate": calibrate, "parity": parity, "steps": steps, "overlap": overlap, "scaling": scaling}


def main() -> None:
    """One part, on this rank. A rank that fails leaves at once: the others wait for it in a collective."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=tuple(PARTS))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--models", default="qwen3-30b")
    parser.add_argument("--work", default="")
    parser.add_argument("--calibration", default="")
    parser.add_argument("--limit-seconds", type=float, default=480.0)
    given = parser.parse_args()
    given.began = time.monotonic()
    given.done = set(json.loads((Path(given.work) / "done.json").read_text()))
    kind = "cuda" if torch.cuda.is_available() and not given.rehearse else "cpu"
    if kind == "cpu":
        torch.set_num_threads(1)
    device = open_device(kind, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(device.backend, timeout=datetime.timedelta(seconds=90))
    code = 1
    try:
        with collected_between_steps():
            PARTS[given.what](given, device)
        dist.barrier()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
