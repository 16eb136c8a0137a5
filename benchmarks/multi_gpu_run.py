"""Starts the ranks of ``multi_gpu.py``, hands on each result as it comes, and goes on past a case that ends a rank."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from multi_gpu_lines import COMPLETE, ENDED, Raw

HERE = Path(__file__).resolve().parent
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
RESULT, BEGUN = "RESULT ", "BEGUN "
"""First words of the lines that the first rank prints: a result, and a case that it goes into."""
SOFT = 0.85
"""Share of a limit after which ranks begin nothing new."""
TIMED_OUT = (124, 137)
"""Exit codes of ``timeout``: the case that went on then is done in a later call."""
LEAST_S = 45.0
"""What a start of ranks takes at least: imports, process groups, one model."""


def launcher(count: int) -> list[str]:
    """What starts that many processes of a script."""
    options = ["--nnodes=1", f"--nproc-per-node={count}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, "--local-addr=127.0.0.1"]


def ranks(
    what: str,
    count: int,
    given: argparse.Namespace,
    work: Path,
    limit_s: float,
    done: set[str],
    tell: Callable[[Raw], None],
) -> None:
    """Run ``multi_gpu_rank.py`` on that many ranks under a hard limit, again past each case that ended them.

    Args:
        done: cases that are not run again.
        tell: gets every result at once.
    """
    began, skipped = time.monotonic(), set(done)
    while True:
        left = limit_s - (time.monotonic() - began)
        code, begun, got = _once(what, count, given, work, left, skipped, tell)
        if code == 0 or code in TIMED_OUT:
            return
        tell({"kind": what, "case": ENDED, "metrics": {"exit_code": float(code), "ranks": float(count)}})
        lost = [case for case in begun if case not in got]
        for case in lost:
            tell({"kind": what, "case": case, "metrics": {"failed": 1.0, "ranks": float(count)}})
        skipped |= {*got, *lost}
        if not lost or limit_s - (time.monotonic() - began) < LEAST_S:
            return


def _once(
    what: str,
    count: int,
    given: argparse.Namespace,
    work: Path,
    limit_s: float,
    skipped: set[str],
    tell: Callable[[Raw], None],
) -> tuple[int, list[str], set[str]]:
    """(exit code, cases begun, cases with a result) of one start."""
    (work / "done.json").write_text(json.dumps(sorted(skipped)))
    words = ["timeout", "-k", "5", str(max(1, int(limit_s))), *launcher(count)]
    words += [str(HERE / "multi_gpu_rank.py"), what, "--models", given.models]
    words += ["--work", str(work), "--calibration", str(given.calibration), "--limit-seconds", str(limit_s * SOFT)]
    words += ["--rehearse"] if given.rehearse else []
    environment = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if given.rehearse:
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    begun: list[str] = []
    got: set[str] = set()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith(BEGUN):
                begun.append(text[len(BEGUN) :].strip())
            elif text.startswith(RESULT):
                found: Raw = json.loads(text[len(RESULT) :])
                got.add(found["case"])
                tell(found)
        code = process.wait()
    return code, begun, got


def whole(what: str, raw: list[Raw]) -> bool:
    """Whether an earlier call came to the end of this part."""
    return any(one["kind"] == what and one["case"] == COMPLETE for one in raw)
