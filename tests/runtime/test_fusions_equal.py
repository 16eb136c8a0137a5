"""The check that runs fused and unfused: what it lets pass, and the wrong gradients that only it sees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.kernels.registry import source_sha256
from shardwright.kernels.rms_norm.reference import rms_norm_reference
from shardwright.runtime.checks.fusions import furthest
from shardwright.runtime.fuse import OPERATOR_FORWARDS
from shardwright.schemas.fusion import FusionDecision

NORM = "model.layers.1.input_layernorm"


def trainer_of(gradients: dict[str, Tensor]) -> Any:
    return SimpleNamespace(
        live=SimpleNamespace(adapters=gradients),
        optimizer=SimpleNamespace(gradients=lambda: gradients),
        ranks=SimpleNamespace(world=1),
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda value: value, 0.0),
        (lambda value: value * 1.1, 0.1),
        (lambda value: -value, 2.0),
        (lambda value: value.roll(1, 0), 1.0),
        (torch.zeros_like, 1.0),
    ],
)
def test_one_adapters_gradient_is_seen_beside_a_large_one(change: Callable[[Tensor], Tensor], expected: float) -> None:
    """The norm over both moves by less than 1e-5 whatever becomes of the small one."""
    generator = torch.Generator().manual_seed(0)
    plain = {"large": torch.randn(64, 64, generator=generator) * 100, "small": torch.randn(64, 64, generator=generator)}
    fused = {**plain, "small": change(plain["small"])}
    norms = [torch.stack([one.norm() for one in gradients.values()]).norm() for gradients in (plain, fused)]
    assert abs(float(norms[1] / norms[0]) - 1) < 1e-4
    name, apart = furthest(trainer_of(plain), fused)
    assert apart == pytest.approx(expected, abs=0.05) and (name == "small" or expected == 0.0)


def test_rounding_moves_it_by_its_square_and_zeros_by_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    plain = {"b": torch.randn(256, 64, generator=generator), "a": torch.zeros(8, 8)}
    noise = 0.02 * torch.randn(256, 64, generator=generator)
    assert furthest(trainer_of(plain), {"b": plain["b"] + noise, "a": torch.zeros(8, 8)})[1] < 1e-3
    assert furthest(trainer_of(plain), {"b": plain["b"], "a": torch.full((8, 8), 1e-9)})[1] < 1e-12


class _Cut(torch.autograd.Function):
    """A value whose gradient gets lost."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0])


@pytest.mark.parametrize("wrong", [False, True])
def test_a_run_whose_fused_norm_loses_its_gradient_ends_before_the_first_step(
    wrong: bool, tiny: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are right either way, and so is the loss; only the gradient of what lies before the norm is not."""

    def made(module: Any, name: str, decision: FusionDecision) -> Callable[[Tensor], Tensor]:
        eps = float(decision.constants["eps"])
        return lambda x: rms_norm_reference(_Cut.apply(x) if wrong else x, module.weight, eps)

    monkeypatch.setitem(OPERATOR_FORWARDS, "rms_norm", made)
    decision = FusionDecision(
        proposal_id="norm.1", pattern="rms_norm", variant="kernel", provider="shardwright", op="rms_norm",
        modules=(NORM,), roles={"weight": "weight"}, constants={"eps": "0.00001"},
        source_sha256=source_sha256("rms_norm"), tolerance="0.0001",
    )  # fmt: skip
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 1}}, fusions=(decision,))
    code = single_rank(job)
    (check,) = [one for one in job.record.checks if one.name == "fusions-equal"]
    assert check.passed is not wrong and (code == 0) is not wrong
    assert not wrong or ("furthest apart" in check.evidence and job.record.status == "failed" and not job.losses)
