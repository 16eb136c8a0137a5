"""Norms and routers that a plan installs in families' own modules, and what is refused before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwright.kernels.registry import source_sha256
from shardwright.runtime.fuse import install_fusions
from shardwright.runtime.fused_router import fused_router
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

pytest.importorskip("triton", reason="kernels need triton")


def decision(op: str, roles: dict[str, str], constants: dict[str, Any]) -> FusionDecision:
    return FusionDecision(
        proposal_id="one",
        pattern=op,
        variant="kernel",
        provider="shardwright",
        op=op,
        modules=("0",),
        roles=roles,
        constants=constants,
        source_sha256=source_sha256(op),
        tolerance="0.0001",
    )


@pytest.mark.parametrize(
    "checks",
    ["checks_modules.py", "checks_experts.py", "checks_packed_rows.py", "checks_rotation.py", "checks_rows.py"],
)
def test_interpreted(tmp_path: Path, checks: str) -> None:
    """The interpreter is chosen when kernels are imported, so it needs its own process."""
    file = Path(__file__).parent / "interpreted" / checks
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", f"--basetemp={tmp_path / 'inner'}"]
    command = ["timeout", "-k", "5", "240", sys.executable, "-m", "pytest", str(file), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_gate_that_the_norm_does_not_compute_is_refused() -> None:
    model = nn.Sequential(nn.RMSNorm(8))
    with pytest.raises(LegalityError, match="fusion-norm"):
        install_fusions(model, (decision("gated_rms_norm", {"weight": "weight"}, {"eps": "0.1", "act": "tanh"}),))


@pytest.mark.parametrize("roles", [{"weight": "wg.weight"}, {"offset": "nowhere"}, {"bias": "outside.bias"}])
def test_a_router_without_the_tensors_that_the_plan_binds_is_refused(roles: dict[str, str]) -> None:
    constants = {"k": 2, "scoring": "softmax"}
    with pytest.raises(LegalityError, match="fusion-router"):
        fused_router(nn.Linear(4, 6), "gate", decision("router", roles, constants))
    given = decision("router", {"bias": "outside.bias"}, {**constants, "bias_argument": True})
    fused_router(nn.Linear(4, 6), "gate", given)
