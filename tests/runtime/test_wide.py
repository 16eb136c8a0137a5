"""A bf16 model in fp32 arithmetic, and the comparisons that fall back on it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.kernels.registry import source_sha256
from shardwright.kernels.rms_norm.reference import rms_norm_reference
from shardwright.runtime.checks import room
from shardwright.runtime.checks.compare import LOSS_TOLERANCE
from shardwright.runtime.checks.wide import MOST, NEARER, Wide, as_near, grouped, in_fp32, largest_difference
from shardwright.runtime.fuse import OPERATOR_FORWARDS
from shardwright.runtime.reference import load_plain
from shardwright.schemas.errors import RunError
from shardwright.schemas.fusion import FusionDecision

CPU = torch.device("cpu")
BF16 = {"precision": {"base": "bfloat16"}, "schedule": {"steps": 1}}
NORM = "model.layers.1.input_layernorm"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("family", ["tiny", "qwen"])
def test_a_bf16_model_gives_what_its_weights_give_in_fp32(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(family).checkpoint
    model, files = load_plain(folder, torch.bfloat16, CPU)
    ids = torch.arange(24).view(2, 12) % 50
    with torch.no_grad():
        narrow = model(input_ids=ids, use_cache=False).logits
        with Wide():
            wide = model(input_ids=ids, use_cache=False).logits
        assert next(model.parameters()).dtype is torch.bfloat16 and narrow.dtype is torch.bfloat16
        exact = model.float()(input_ids=ids, use_cache=False).logits
    assert files.names is not None and wide.dtype is torch.float32
    assert largest_difference(wide, exact) < 1e-5 < 1e-3 < largest_difference(narrow, exact)


def test_what_is_written_in_place_keeps_its_dtype_and_gets_the_wide_value() -> None:
    a, b = draw(7, 33), draw(33, 5, seed=1)
    exact = a.float() @ b.float()
    with Wide():
        narrow, wide, added = torch.empty(7, 5, dtype=torch.bfloat16), torch.empty(7, 5), torch.zeros(7, 5)
        torch.mm(a, b, out=narrow)
        torch.mm(a, b, out=wide)
        added.addmm_(a, b)
        narrow_again = torch.zeros(7, 5, dtype=torch.bfloat16)
        narrow_again.addmm_(a, b)
    assert torch.equal(narrow, exact.bfloat16()) and torch.equal(narrow_again, exact.bfloat16())
    assert largest_difference(wide, exact) < 1e-6 and largest_difference(added, exact) < 1e-6


def test_views_are_not_copies_and_casts_down_are_left_out() -> None:
    stack = draw(4, 8, 8)
    with Wide():
        view = stack[2].mT
        kept = stack.float().to(torch.bfloat16)
        moved = stack.to(torch.float64)
    assert view.dtype is torch.bfloat16 and view.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()
    assert kept.dtype is torch.float32 and moved.dtype is torch.float64


def test_grouped_products_are_loops_in_fp32() -> None:
    a, b, offs = draw(9, 16), draw(3, 16, 8, seed=1), torch.tensor([4, 4, 7], dtype=torch.int32)
    with Wide():
        found = torch._grouped_mm(a, b, offs=offs)
    expected = torch.cat((a[:4].float() @ b[0].float(), a[4:7].float() @ b[2].float(), torch.zeros(2, 8)))
    assert torch.equal(found, expected)
    with pytest.raises(RunError, match=r"check-grouped-product.*2 and 2 dims"):
        grouped(a, b[0], offs)


def test_attention_runs_in_fp32() -> None:
    q, k, v = (draw(1, 2, 16, 8, seed=seed) for seed in range(3))
    with Wide():
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    assert largest_difference(found, exact) < 1e-5


def test_as_near_is_relative_and_has_an_end() -> None:
    assert as_near(0.03, 0.02) and not as_near(0.0301, 0.02) and as_near(0.0, 0.0)
    assert as_near(MOST, MOST) and not as_near(MOST * 1.01, MOST) and not as_near(float("nan"), 0.02)
    assert in_fp32(None, "it") == "" and f"{NEARER:g} times" in in_fp32((0.01, 0.02), "it")


@pytest.mark.parametrize("wrong", [False, True])
def test_a_layer_farther_apart_than_the_tolerance_is_held_against_fp32(
    wrong: bool, tiny: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding alone passes however small the tolerance is; an expert output that is 4 % too large does not."""
    from shardwright.runtime.experts import module

    combine = module.combine
    monkeypatch.setattr(room, "WHOLE_MODEL_SHARE", 0.0)
    monkeypatch.setitem(LOSS_TOLERANCE, "bfloat16", 1e-9)
    if wrong:
        monkeypatch.setattr(module, "combine", lambda rows, *rest: combine(rows * 1.5, *rest))
    job = make_job(tiny, strategy(), recipe=BF16)
    code = single_rank(job)
    found = [one for one in job.record.checks if one.scope == "by_layer"]
    assert found and all("against fp32 arithmetic" in one.evidence for one in found)
    assert all(one.passed for one in found) is not wrong and (code == 0) is not wrong


@pytest.mark.parametrize("wrong", [False, True])
def test_fused_logits_farther_apart_than_the_tolerance_are_held_against_fp32(
    wrong: bool, tiny: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused norm rounds elsewhere, which passes; one that leaves the mean square's last tenth out does not."""

    def made(module: Any, name: str, decision: FusionDecision) -> Callable[[Tensor], Tensor]:
        def norm(x: Tensor) -> Tensor:
            value = x.float()
            if wrong:
                return (rms_norm_reference(value, module.weight.float(), 1e-5) * value.abs().clamp_max(1.5)).to(x.dtype)
            return rms_norm_reference(value, module.weight.float(), 1e-5).to(x.dtype)

        return norm

    monkeypatch.setitem(OPERATOR_FORWARDS, "rms_norm", made)
    from shardwright.runtime.checks import fusions

    asked: list[tuple[float, ...]] = []
    plain = fusions.largest_of_ranks

    def errors(trainer: Any, *found: float) -> tuple[float, ...]:
        asked.append(plain(trainer, *found))
        return (1.0,) if len(found) == 1 else asked[-1]

    monkeypatch.setattr(fusions, "largest_of_ranks", errors)
    decision = FusionDecision(
        proposal_id="norm.1", pattern="rms_norm", variant="kernel", provider="shardwright", op="rms_norm",
        modules=(NORM,), roles={"weight": "weight"}, constants={"eps": "0.00001"},
        source_sha256=source_sha256("rms_norm"), tolerance="0.02",
    )  # fmt: skip
    job = make_job(tiny, strategy(), recipe=BF16, fusions=(decision,))
    code = single_rank(job)
    (check,) = [one for one in job.record.checks if one.name == "fusions-equal"]
    assert "against fp32 arithmetic" in check.evidence and len(asked) == 2
    assert as_near(*asked[1]) is not wrong and check.passed is not wrong and (code == 0) is not wrong


def test_ranks_decide_alike() -> None:
    from shardwright.runtime.checks.fusions import largest_of_ranks

    alone = SimpleNamespace(device=SimpleNamespace(torch_device=CPU), ranks=SimpleNamespace(world=1))
    assert largest_of_ranks(alone, 0.5, 0.25) == (0.5, 0.25)


def test_a_model_on_two_ranks_gives_what_the_whole_gives_in_fp32(
    tiny: Any, make_job: Any, strategy: Any, on_ranks: Any
) -> None:
    """Weights gathered by FSDP, experts reached by dispatch: every rank is in the mode, and none waits for another."""
    jobs = [make_job(tiny, chosen, recipe=BF16) for chosen in (strategy(ep=2), strategy(shard=2))]
    said = on_ranks(2, "wide.py", str(tiny.checkpoint), *(str(job.plan_path) for job in jobs))
    assert said.count("done") == 2 and said.count(" rank ") == 4
