"""Written kernels: the honest one passes, every cheat is refused, and for the reason that it cheats."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._dynamo.utils import counters

from shardwright.agents.llm.kernel_writer.candidates import approve, keep, load, record, usable
from shardwright.agents.llm.kernel_writer.compiled import compile_region
from shardwright.agents.llm.kernel_writer.judge import Verdict, judge, plausible
from shardwright.agents.llm.kernel_writer.sandbox import Limits, run_apart
from shardwright.agents.llm.kernel_writer.screen import screen
from shardwright.agents.llm.kernel_writer.task import Task
from shardwright.agents.llm.kernel_writer.writer import seed_of
from shardwright.schemas.canonical import sha256_hex
from shardwright.schemas.errors import LlmError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from written_kernels.cheats import CHEATS, HONEST

LIMITS = Limits(seconds=90, memory_bytes=6 << 30)


@pytest.fixture(scope="module")
def task(gpt_oss: SimpleNamespace) -> Task:
    """Scores, mask and sink of gpt_oss: three inputs, one of them shared by all heads."""
    return Task.of(gpt_oss.match("mul", "add", "cat"))


@pytest.mark.slow
def test_the_honest_kernel_passes(task: Task) -> None:
    verdict = judge(HONEST, task, seed=seed_of(HONEST), limits=LIMITS)
    assert verdict.accepted, verdict.because
    assert 0 < verdict.worst <= 1 and verdict.cases == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHEATS))
def test_a_cheat_is_refused_for_its_reason(task: Task, name: str) -> None:
    source = CHEATS[name].source()
    quick = Limits(seconds=15, memory_bytes=6 << 30) if name == "never_ends" else LIMITS
    verdict = judge(source, task, seed=seed_of(source), limits=quick)
    assert not verdict.accepted
    assert re.search(CHEATS[name].refused, verdict.because), verdict.because


def test_a_time_below_the_floor_is_refused() -> None:
    seen = Verdict(True, "fine", 0.5, 6, ms=0.010)
    assert plausible(seen, floor_ms=0.009) == seen
    assert "below the floor" in plausible(seen, floor_ms=0.011).because


@pytest.mark.parametrize(
    "text",
    [
        "x = eval('1')",
        "def forward(x0):\n    return open('/etc/passwd')\n",
        "def forward(x0):\n    return globals()\n",
        "import os\n",
        "import torch.nn\n",
        "import triton.language as torch\n",
        "def forward(x0):\n    torch.load('x')\n",
        "class A:\n    pass\n",
        "def forward(x0):\n    while True:\n        pass\n",
        "def forward(x0):\n    return x0.data_ptr()\n",
        "def forward(x0):\n    return (lambda: x0)()\n",
        "def forward(x0):\n    try:\n        pass\n    except Exception:\n        pass\n",
        "(" * 5000,
        "\x00",
    ],
)
def test_the_screen_refuses(text: str) -> None:
    assert screen(text)


def test_the_sandbox_has_no_network_and_few_files(tmp_path: Path) -> None:
    probe = tmp_path / "outward.py"
    probe.write_text(
        "import socket, sys\n"
        "try:\n    socket.create_connection(('127.0.0.1', int(sys.argv[1])), 2)\nexcept OSError:\n    sys.exit(0)\n"
        "sys.exit(5)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = run_apart("outward", [str(port)], tmp_path, Limits(seconds=30), {"PYTHONPATH": path_with(tmp_path)})
    assert ended.code == 0, f"not even this machine's own loopback is reached: {ended}"


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_a_candidate_is_used_only_as_approved(tmp_path: Path) -> None:
    source, verdict = HONEST, Verdict(True, "6 cases", 0.5, 6)
    kept = keep(tmp_path, source, record(source, "proposed-region:x", "0" * 64, "m", "cpu", verdict))
    with pytest.raises(LlmError, match="not-approved"):
        usable(kept)
    with pytest.raises(LlmError, match="other-hash"):
        approve(kept, "1" * 64, "ada")
    approve(kept, sha256_hex(source.encode()), "ada")
    assert usable(kept) == source
    kept.with_suffix(".py").write_text(source + "\n# changed\n")
    with pytest.raises(LlmError, match="candidate-edited"):
        load(kept)


def test_a_region_is_compiled_as_one_graph(task: Task) -> None:
    """Left to the interpreter of its traced nodes, the compiler would give every operation back to Python."""
    counters.clear()
    seen = compile_region(task, "cpu", 16)
    assert seen.right and seen.ms > 0
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] >= 1
