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
from shardwright.runtime.batch import IGNORE
from shardwright.runtime.checks.fusions import furthest, shortened, tokens_that_fit
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


def plan_of(plain: int | None, held: int = 40, budget: int = 100, cp: int = 1) -> Any:
    return SimpleNamespace(
        evidence=SimpleNamespace(
            plain=None if plain is None else SimpleNamespace(reserved_bytes=plain),
            cost=SimpleNamespace(memory=SimpleNamespace(budget_bytes=budget, by_moment={"load": held})),
        ),
        decision=SimpleNamespace(
            strategy=SimpleNamespace(micro_batch_sequences=8, mesh=SimpleNamespace(cp=cp)),
            recipe=SimpleNamespace(batch=SimpleNamespace(sequence_tokens=4096)),
        ),
    )


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_of(None), None),
        (plan_of(100), None),
        (plan_of(160), 8192),  # half of 32,768 tokens fit beside the weights, half of that is taken
        (plan_of(231), 4096),  # 32,768 * 60 / 191 / 2 = 5,146
        (plan_of(10_000), 64),
        (plan_of(10_000, cp=8), 512),
        (plan_of(10_000, held=100), 64),
    ],
)
def test_tokens_that_fit_without_fusions(plan: Any, expected: int | None) -> None:
    assert tokens_that_fit(plan) == expected


def test_shortened_rows_keep_whole_sequences_and_labels() -> None:
    ids = torch.arange(4 * 16).view(4, 16)
    assert torch.equal(shortened(ids, 32), ids[:2]) and torch.equal(shortened(ids, 8), ids[:1, :8])
    labels = torch.full((4, 16), IGNORE)
    labels[:, 12] = 7
    planes = torch.stack((ids, labels, torch.arange(16).expand(4, 16)), 1)
    assert torch.equal(shortened(planes, 14), planes[:1, :, :14])
    begin = shortened(planes, 8)
    assert (
        torch.equal(begin[0, 1, :-1], ids[0, 1:8]) and begin[0, 1, -1] == IGNORE and (planes[:, 1, :8] == IGNORE).all()
    )
    images = torch.cat((planes, torch.full((4, 1, 16), -1)), 1)
    assert torch.equal(shortened(images, 8), images[:1])


def test_a_plan_that_fits_only_fused_is_compared_on_fewer_tokens(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways see the same few tokens, the evidence says so, and a wrong gradient is still found."""
    from shardwright.runtime.checks import fusions

    cuts: list[int] = []
    monkeypatch.setattr(fusions, "tokens_that_fit", lambda plan: 8)
    monkeypatch.setattr(fusions, "shortened", lambda rows, most: (cuts.append(most), shortened(rows, most))[1])
    test_a_run_whose_fused_norm_loses_its_gradient_ends_before_the_first_step(
        True, tiny, make_job, strategy, single_rank, monkeypatch
    )
    assert len(cuts) >= 3 and set(cuts) == {8}
