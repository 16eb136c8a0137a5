"""From a checkpoint folder to the first LoRA step of a full-width slice of Kimi K3, in one command.

``python benchmarks/k3_first_step.py [--layers N] [--tokens T] [--folder DIR] [--whole] [--append] [--self-test]``

The files are written first and are not part of the time: N layers in the published order of kinds, packed experts,
random contents (40.6 GB at three layers, the page cache emptied of them where the system does that; in ``/dev/shm``
they are in memory, and the line says so). Then one command runs as a user would run it:

    shardwright adapt CHECKPOINT -c h200-1 -r recipe.yaml --headless --policy policy.yaml --no-cache

profile, structure, search, approval by policy, load, the checks before a step, the first step. Case ``k3/first-step``,
seconds from its start to the line of step 1 in ``metrics.jsonl``, bar 3,600; by stage in the metrics. The run is ended
there unless ``--whole`` lets it check, export and report. ``--self-test`` takes tiny widths on a CPU and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from k3_files import write_slice, write_texts
from k3_slice import CASES
from lines import append, line

from shardwright.runtime.metrics import read_metrics
from shardwright.schemas.run import RunRecord, StepMetric

BAR_S = 3600.0
POLL_S = 0.2
END_S = 120.0
"""Longest wait for a run that was asked to end."""
RECIPE = """name: k3-first-step
lora:
  targets: [attention, experts{latent}]
  rank: {rank}
  alpha: {alpha}
data:
  train: train.jsonl
  held_out: held_out.jsonl
batch:
  sequence_tokens: {tokens}
  global_batch_sequences: 1
schedule:
  steps: 1
  held_out_sequences: 1
precision:
  base: {base}
"""
LATENT = ", '*.routed_expert_down_proj', '*.routed_expert_up_proj'"
POLICY = "max_memory_fraction: 0.95\nallow_providers: [eager, shardwright, compile]\nrequire_obligations: []\n"
STAGES = ("ingest", "structure", "propose", "search", "join", "review")
"""Nodes of the workflow before anything is executed."""


class FirstStepMissing(RuntimeError):
    """The command ended, or its time ran out, without a step."""


def prepare(folder: Path, layers: int, tokens: int, tiny: bool) -> int:
    """Checkpoint, texts, recipe and policy; the bytes of the checkpoint."""
    size = write_slice(folder / "checkpoint", CASES["k3-slice"].cut(layers, tiny))
    write_texts(folder, tokens)
    rank, base = (4, "float32") if tiny else (16, "bfloat16")
    recipe = RECIPE.format(latent=LATENT, rank=rank, alpha=2 * rank, tokens=tokens, base=base)
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (folder / "policy.yaml").write_text(POLICY + "approve: true\n", encoding="utf-8")
    return size


def command(cluster: str) -> list[str]:
    words = f"adapt checkpoint -c {cluster} -r recipe.yaml --headless --policy policy.yaml --no-cache --run-dir run"
    return [sys.executable, "-m", "shardwright.workflows.cli.main", *words.split()]


def first_step(folder: Path, cluster: str, limit_s: float, whole: bool) -> tuple[float, StepMetric]:
    """Run the command.

    Returns:
        Seconds from its start to the first step, and that step.

    Raises:
        FirstStepMissing: with the last lines that the command and its workers wrote.
    """
    run, log = folder / "run", folder / "adapt.log"
    with open(log, "wb") as out:
        began = time.perf_counter()
        process = subprocess.Popen(command(cluster), cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        try:
            found = _wait(process, run / "metrics.jsonl", began + limit_s)
            seconds = time.perf_counter() - began
            if found is not None and whole:
                process.wait()
        finally:
            _end(process)
    if found is None or (whole and process.returncode):
        raise FirstStepMissing(f"exit {process.returncode} after {seconds:.0f} s:\n{last_words(run, log)}")
    return seconds, found


def last_words(run: Path, log: Path) -> str:
    """The ends of what the command and each of its workers wrote."""
    files = [log, *sorted(path for path in run.glob("logs/**/*") if path.is_file())]
    return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


def _wait(process: subprocess.Popen[bytes], metrics: Path, until: float) -> StepMetric | None:
    while time.perf_counter() < until:
        ended = process.poll() is not None
        steps, _ = read_metrics(metrics)
        if steps or ended:
            return steps[0] if steps else None
        time.sleep(POLL_S)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a run to end as a person at a terminal would; insist when it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def in_memory(folder: Path) -> bool:
    """Whether files of this folder lie in memory alone (tmpfs), so that reading them is no test of a disk."""
    mounts = Path("/proc/mounts")
    lines = mounts.read_text(encoding="utf-8").splitlines() if mounts.is_file() else []
    found = [(Path(point), kind) for _, point, kind, *_ in map(str.split, lines)]
    under = [(len(point.parts), kind) for point, kind in found if folder.resolve().is_relative_to(point)]
    return max(under, default=(0, ""))[1] == "tmpfs"


def stages(run: Path) -> dict[str, float]:
    """Seconds of each node of the workflow that started and finished, and of planning as a whole."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for text in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(text)
        at = datetime.fromisoformat(event["time"]).timestamp()
        if event["kind"] == "started":
            begun.setdefault(event["node"], at)
        elif event["kind"] in ("finished", "computed"):
            ended[event["node"]] = at
    found = {f"{node}_s": ended[node] - begun[node] for node in begun if node in ended}
    planned = [node for node in STAGES if node in begun and node in ended]
    if planned:
        found["plan_s"] = max(ended[node] for node in planned) - min(begun[node] for node in planned)
    return found


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Prepare, run, and the fields of a result line."""
    tiny = bool(options.self_test)
    tokens = options.tokens or (64 if tiny else 4096)
    began = time.perf_counter()
    size = prepare(folder, options.layers, tokens, tiny)
    written = time.perf_counter() - began
    sys.stderr.write(f"wrote {size / 1e9:.2f} GB in {written:.0f} s; the clock starts\n")
    seconds, step = first_step(folder, "cpu-1" if tiny else "h200-1", options.limit_s, options.whole)
    run = folder / "run"
    record = RunRecord.model_validate_json((run / "run.json").read_bytes())
    plan = json.loads((run / "plan.json").read_bytes())
    metrics: dict[str, float] = {
        "bar_s": BAR_S,
        "layers": options.layers,
        "tokens": tokens,
        "checkpoint_bytes": size,
        "files_in_memory": in_memory(folder),
        "write_s": written,
        "step_s": step.seconds,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "checks": len(record.checks),
        "fusions": sum(one["provider"] != "eager" for one in plan["decision"]["fusions"]),
        **stages(run),
    }
    if record.load is not None:
        metrics |= {"load_s": record.load.seconds, "load_bytes": record.load.bytes_read}
    return {
        "bench": "k3",
        "case": "k3/first-step",
        "unit": "s",
        "ours": round(seconds, 2),
        "peak_bytes": step.peak_memory_bytes or None,
        "metrics": {name: round(float(value), 4) for name, value in metrics.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="k3_first_step.py")
    parser.add_argument("--layers", type=int, default=3, help="3 hold every kind of layer: 40.6 GB on disk")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of the one sequence; 4,096 unless told")
    parser.add_argument("--folder", type=Path, help="where the files are written; a scratch folder unless told")
    parser.add_argument("--limit-s", type=float, default=BAR_S, help="longest wait for the first step")
    parser.add_argument("--whole", action="store_true", help="let the run go on to its checks, export and report")
    parser.add_argument("--append", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--self-test", action="store_true", help="tiny widths on a CPU; writes nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        try:
            made = line(measured(options, Path(scratch)))
        except FirstStepMissing as problem:
            sys.stderr.write(f"no first step: {problem}\n")
            return 1
    sys.stdout.write(made.model_dump_json() + "\n")
    if options.append and not options.self_test:
        append([made])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
