"""What hyper-connections move, held against the operators that the families' own code calls, byte for byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from models import kimi_k3, recipe_for
from operators_seen import CLASSES, Moved, connection, module

from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import launches, residuals
from shardwright.search_spaces.cost.compute import Rates
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.layer_time import _elementwise, _residual_mixes
from shardwright.search_spaces.cost.workload import Workload, workload
from shardwright.search_spaces.providers import provider_cost

T, N, H = 512, 4, 2048
BLOCK = 2 / N
"""What the stand-in for attention or feed-forward reads and writes, in streams, each pass."""


@pytest.mark.parametrize("family", sorted(CLASSES))
def test_a_connection_moves_what_its_operators_move(family: str) -> None:
    """Within 3 %: weights of the connection and numbers by token weigh more at this width than at a model's."""
    half = connection(family, N, H)
    streams = torch.randn(1, T, N, H, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        gradient = torch.randn_like(half(streams))
    with Moved() as moved:
        torch.autograd.grad(half(streams), streams, gradient)
    size, kernels = residuals.CONNECTION_MOVES[family]
    assert [one / (2 * T * N * H) - BLOCK for one in moved.bytes] == pytest.approx(size, rel=0.03)
    assert [one - 1 for one in moved.kernels] == list(kernels)


@pytest.mark.parametrize("steps", [10, 20])
def test_the_weights_alone_move_what_their_operators_move(steps: int) -> None:
    """What a plan may have compiled, its module alone: to 1 %, and kernel for kernel."""
    half = module("deepseek_v4", N, H, steps=steps).to(torch.float32)
    streams = torch.randn(1, T, N, H, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        gradients = [torch.randn_like(one) for one in half(streams)]
    with Moved() as moved:
        torch.autograd.grad(half(streams), streams, gradients)
    cost = provider_cost("hyper_connection", "eager", {"T": T, "N": N, "H": H, "S": steps}, "bfloat16")
    passes = [one for one in (cost.forward, cost.backward) if one is not None]
    assert [one.bytes_read + one.bytes_written for one in passes] == pytest.approx(moved.bytes, rel=0.01)
    assert [one.launches for one in passes] == moved.kernels


def test_compiled_weights_leave_the_sums_around_them() -> None:
    """Of a layer's bytes what the module moved goes, and what it moves compiled comes; launches more than halve."""
    work = with_streams("deepseek_v4", N)
    compiled = FusedProviders({"hyper_connection": ("compile", ("model.layers.0.attn_hc",))})
    eager, fewer = (residuals.residual_moves(work, work.layers[0], one) for one in (FusedProviders(), compiled))
    unit = 2 * 2 * N * work.hidden
    assert [(a - b) / unit for a, b in zip(eager.chains, fewer.chains, strict=True)] == pytest.approx(
        [21.4, 54.3], abs=0.4
    )
    assert [one / unit for one in fewer.operator] == pytest.approx([6.3, 10.7], abs=0.2)
    assert all(2 * a < b for a, b in zip(fewer.kernels, eager.kernels, strict=True))
    other = with_streams("hy_v4", N)
    assert residuals.residual_moves(other, other.layers[0], compiled).operator == (0, 0), "its module is no such region"


def with_streams(model_type: str, streams: int) -> Workload:
    profile = kimi_k3("mxfp4")
    shape = profile.shape.model_copy(update={"residual_streams": streams})
    return workload(
        profile.model_copy(update={"model_type": model_type, "shape": shape}), recipe_for(batch=4, tokens=4096), ()
    )


def test_a_layer_of_streams_is_priced_by_its_connections() -> None:
    """Two of them in place of two sums, in bytes, seconds and launches; one stream has none."""
    one, four = with_streams("deepseek_v4", 1), with_streams("deepseek_v4", N)
    fused, layer = FusedProviders(), four.layers[0]
    assert residuals.residual_moves(one, one.layers[0], fused) == residuals.RowMoves()
    moves = residuals.residual_moves(four, layer, fused)
    assert moves.chains[0] == 2 * 28.0 * 2 * N * four.hidden and moves.kernels == (290, 618)
    rates, tokens = Rates.of(load_cluster("h200-128"), "bfloat16", None), torch.tensor([4096.0]).numpy()
    mixed, _ = _residual_mixes(four, layer, rates, fused, tokens)
    assert mixed == pytest.approx(4096 * moves.chains[0] / (0.70 * rates.bandwidth), rel=1e-6)
    plain, streamed = (_elementwise(work, work.layers[0], rates, fused, tokens)[0] for work in (one, four))
    assert plain - streamed == pytest.approx(4096 * 2 * 3 * 2 * four.hidden / rates.bandwidth, rel=1e-6)
    counted = [launches.launches_of(work, work.layers[0], fused, ()).layer[0] for work in (one, four)]
    assert counted[1] - counted[0] == pytest.approx(launches.PLAIN * (290 - launches.RESIDUAL_SUMS[0]))


def test_an_unknown_family_is_priced_as_the_dearest() -> None:
    work = with_streams("some_other", N)
    moves = residuals.residual_moves(work, work.layers[0], FusedProviders())
    assert moves.kernels == (290, 618) and moves.chains[1] == pytest.approx(2 * 72.9 * 2 * N * work.hidden)
