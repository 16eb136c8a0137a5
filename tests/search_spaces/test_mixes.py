"""What attention residuals and hyper-connections hold in memory, against live bytes of the models' own code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from models import kimi_k3, recipe_for
from operators_seen import CLASSES, Live, connection

from shardwright.checkpoints.models.kimi_k3.residuals import read
from shardwright.search_spaces.cost import activations, mixes, workload
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.workload import Workload

T, H, N = 64, 512, 4


def live(rows: int) -> tuple[int, int, int]:
    """(most of a forward, kept, most of a backward) of one mix in bf16; given rows do not count."""
    given = [torch.randn(1, T, H, dtype=torch.bfloat16, requires_grad=True) * 1 for _ in range(rows)]
    norm, projection = torch.ones(H, dtype=torch.bfloat16), torch.randn(1, H, dtype=torch.bfloat16)
    with Live(*given) as held:
        y = read(given, norm, projection, 1e-6)
        forward, kept, held.peak = held.peak, held.now, 0
        torch.autograd.grad(y, given, torch.ones_like(y))
    return forward, kept, held.peak


def k3() -> Workload:
    return workload(kimi_k3("mxfp4"), recipe_for(batch=4, tokens=4096), ())


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_a_mix_holds_what_its_operators_hold(rows: int) -> None:
    """To within the result itself and numbers by row; scaled from the model's width to this one."""
    work = k3()
    one = mixes._mixes(work, FusedProviders(), rows, 0)
    kept, passing, backward = (size * T * H / work.hidden for size in (one.first, one.passing, one.first_backward))
    seen_forward, seen_kept, seen_backward = live(rows)
    row = T * H * 2
    assert seen_kept == pytest.approx(kept, abs=1.3 * row)
    assert seen_forward == pytest.approx(kept + passing, abs=3.3 * row)
    assert seen_backward == pytest.approx(kept + backward, rel=0.03, abs=2 * row)


def test_rows_of_a_kind_are_those_of_its_fullest_layer_and_their_mean_for_all_together() -> None:
    work = k3()
    for layer in work.layers:
        fullest, mean = (mixes.mixes_of(work, layer, FusedProviders(), mean=mean) for mean in (False, True))
        if layer.kind.mlp == "dense":
            assert (fullest.first, fullest.second) == (4 * work.hidden, 8 * work.hidden), "one row, and a snapshot"
        else:
            assert fullest.first == fullest.second == 4 * 9 * work.hidden, "eight snapshots and the sum"
            assert 4.5 * 4 * work.hidden < mean.first < 6.5 * 4 * work.hidden
    assert mixes.snapshot_gradients(work) == 8 * 2 * work.hidden


@pytest.mark.parametrize("rows", [2, 9])
def test_a_kernel_holds_numbers_of_rows_and_their_gradients(rows: int) -> None:
    """What ``checks_attention_residual.py`` sees of the operator itself, by token."""
    work = k3()
    fused = FusedProviders({"attention_residual": ("shardwright", ("model.layers.0.mlp_res_norm",))})
    one = mixes._mixes(work, fused, rows, 0)
    assert (one.first, one.passing, one.first_backward) == (4 * (2 * rows + 1), 0, 2 * work.hidden * (rows + 1))
    assert (one.second, one.second_backward) == (0, 0)
    layer = work.layers[-1]
    assert 100 * mixes.mixes_of(work, layer, fused).kept < mixes.mixes_of(work, layer, FusedProviders()).kept


@pytest.mark.parametrize("family", sorted(CLASSES))
def test_a_hyper_connection_holds_what_its_operators_hold(family: str) -> None:
    half = connection(family, N, H)
    streams = torch.randn(1, T, N, H, dtype=torch.bfloat16, requires_grad=True) * 1
    with Live(streams) as held:
        y = half(streams)
        forward, kept, held.peak = held.peak, held.now, 0
        torch.autograd.grad(y, streams, torch.ones_like(y))
    one = T * N * H * 2
    expected = mixes.CONNECTIONS[family]
    assert kept / one - 1 == pytest.approx(expected[0], abs=0.1)
    assert forward / one - kept / one == pytest.approx(expected[1], abs=0.1)
    assert held.peak / one - kept / one == pytest.approx(expected[2], abs=0.1)


def test_streams_are_counted_where_a_config_has_them() -> None:
    profile = kimi_k3("mxfp4").model_copy(update={"model_type": "deepseek_v4"})
    streams = profile.model_copy(update={"shape": profile.shape.model_copy(update={"residual_streams": N})})
    one, four = (workload(each, recipe_for(batch=4, tokens=4096), ()) for each in (profile, streams))
    fused, row = FusedProviders(), 2 * one.hidden
    inputs = [activations.checkpoint_bytes(work, work.layers[0], fused, 1) for work in (one, four)]
    assert inputs[1] - inputs[0] == (N - 1) * row
    assert mixes.mixes_of(one, one.layers[0], fused) == mixes.Mixes()
    assert mixes.mixes_of(four, four.layers[0], fused).kept == pytest.approx((2 * 3.8 + 1) * N * row)


def test_other_families_have_none() -> None:
    profile = kimi_k3("mxfp4").model_copy(update={"model_type": "deepseek_v3"})
    work = workload(profile, recipe_for(batch=4, tokens=4096), ())
    assert (
        mixes.mixes_of(work, work.layers[0], FusedProviders())
        == mixes.last_mix(work, FusedProviders())
        == mixes.Mixes()
    )
    assert mixes.snapshot_gradients(work) == 0
