"""KDA: numerics under the interpreter, counted work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.kernels.kda.cost import cost

H200_BYTES_PER_S = 4.3e12


def test_interpreted(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_kda.py")


@pytest.mark.slow
def test_addresses(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_kda_addresses.py")


@pytest.mark.slow
def test_neighbours(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_delta_neighbours.py")


def test_layers_of_models(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_delta_model.py")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sequence_over_ranks_is_the_sequence(ranks: int) -> None:
    """Outputs and every gradient of every rank against one rank, over gloo."""
    pytest.importorskip("triton")
    script = Path(__file__).parent / "ranks" / "kda_context.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = ["timeout", "-k", "5", "240", *torchrun, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_floors_of_the_stated_case() -> None:
    """T 32768, H 32, K = V = 128, bf16: five tensors once forward, ten backward; states and betas beside them."""
    found = cost(32768, 32, 128, 128, "bfloat16")
    width = 32768 * 32 * 128 * 2
    assert found.backward is not None
    assert found.forward.floor_bytes == pytest.approx(5 * width, rel=0.01)
    assert found.backward.floor_bytes == pytest.approx(10 * width, rel=0.01)
    assert found.forward.floor_bytes / H200_BYTES_PER_S * 1e3 == pytest.approx(0.313, abs=2e-3)


def test_counted_traffic_in_widths() -> None:
    """What the design moves, in bf16 tensors of [T, H, 128]; the output and a width of pairs and inverses stay."""
    found = cost(32768, 32, 128, 128, "bfloat16")
    width = 32768 * 32 * 128 * 2
    assert found.backward is not None and found.saved_bytes / width == pytest.approx(2.0, abs=0.05)
    forward, backward = ((p.bytes_read + p.bytes_written) / width for p in (found.forward, found.backward))
    assert (forward, backward) == pytest.approx((23.1, 53.8), abs=0.2)


def test_what_is_kept_saves_traffic_and_launches() -> None:
    """Some 61 widths in place of 77 for both passes, 4 + 6 launches in place of 4 + 9, for 8 widths of memory more."""
    plain, kept = (cost(32768, 32, 128, 128, "bfloat16", keep=keep) for keep in (False, True))
    width = 32768 * 32 * 128 * 2
    assert plain.backward is not None and kept.backward is not None
    assert (plain.total_bytes() / width, kept.total_bytes() / width) == pytest.approx((76.9, 61.3), abs=0.5)
    assert (plain.backward.launches, kept.backward.launches) == (9, 6)
    assert (kept.saved_bytes - plain.saved_bytes) / width == pytest.approx(8.0, abs=0.1)


def test_documents_add_their_last_chunks() -> None:
    one, many = (cost(4096, 2, 64, 64, "bfloat16", docs=n) for n in (1, 9))
    assert many.forward.flops == one.forward.flops * (64 + 8) // 64
