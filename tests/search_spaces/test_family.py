"""What Kimi K3's layers compute besides, held against the operators that its code calls, byte for byte."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from models import kimi_k3, recipe_for, targets_for
from operators_seen import Moved

from shardwright.checkpoints.models.kimi_k3.configuration import DEFAULTS
from shardwright.checkpoints.models.kimi_k3.feed_forward import situ
from shardwright.checkpoints.models.kimi_k3.residuals import read
from shardwright.schemas.ops import OpCost
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import family, launches, residuals, workload
from shardwright.search_spaces.cost.compute import Rates
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.layer_time import _elementwise, _residual_mixes
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.providers import provider_cost

T, H = 8, 64
DTYPES = (torch.bfloat16, torch.float32)


def seen(run: Callable[..., Tensor], *inputs: Tensor) -> Moved:
    given = [one.requires_grad_() for one in inputs]
    with torch.no_grad():
        gradient = torch.randn_like(run(*given))
    with Moved() as moved:
        torch.autograd.grad(run(*given), given, gradient)
    return moved


def passes(costs: list[OpCost]) -> Iterator[tuple[int, int]]:
    """(bytes, kernels) of each pass."""
    for one in zip(*((cost.forward, cost.backward) for cost in costs), strict=True):
        parts = [part for part in one if part is not None]
        yield sum(p.bytes_read + p.bytes_written for p in parts), sum(p.launches for p in parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_situ_moves_what_its_operators_move(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(T, H, dtype=dtype) for _ in range(2))
    moved = seen(lambda g, u: situ(g, u, 4.0, 25.0), gate, up)
    cost = provider_cost("situ", "eager", {"T": T, "I": H}, str(dtype)[6:])
    assert list(passes([cost])) == list(zip(moved.bytes, moved.kernels, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_residuals_of_a_layer_move_what_its_operators_move(rows: int, snapshot: bool, dtype: torch.dtype) -> None:
    """Both mixes and both sums; attention and feed-forward hand on what they read. No other layer reads the rows."""
    norm, projection = torch.ones(H, dtype=dtype), torch.randn(1, H, dtype=dtype)

    def layer(*given: Tensor) -> Tensor:
        *snapshots, hidden = given
        mixed = read(given, norm, projection, 1e-6)
        value = mixed.view_as(mixed)
        total = value if snapshot else hidden + value
        mixed = read((*snapshots, hidden, total) if snapshot else (*snapshots, total), norm, projection, 1e-6)
        return total + mixed.view_as(mixed)

    moved = seen(layer, *(torch.randn(1, T, H, dtype=dtype) for _ in range(rows)))
    sizes, after, name = {"T": T, "R": rows, "H": H}, {"T": T, "R": rows + snapshot, "H": H}, str(dtype)[6:]
    costs = [
        provider_cost("residual_rows", "eager", {**sizes, "S": int(snapshot)}, name),
        provider_cost("attention_residual", "eager", sizes, name),
        provider_cost("attention_residual", "eager", after, name),
    ]
    others = (rows - 1) * 3 * T * H * dtype.itemsize, rows - 1
    found = list(zip(moved.bytes, moved.kernels, strict=True))
    assert list(passes(costs)) == [found[0], (found[1][0] + others[0], found[1][1] + others[1])]


def test_rows_are_those_that_the_model_hands_on() -> None:
    """The family's own rule: a snapshot at every ``attn_res_block_size``-th layer, from the first on."""
    block, layers = residuals.SNAPSHOT_LAYERS["kimi_k3"], kimi_k3("mxfp4").shape.num_layers
    assert DEFAULTS["attn_res_block_size"] == block and layers == 93
    rows = 1
    for index in range(layers):
        assert residuals.rows_of_layer(index, block) == (rows, index % block == 0)
        rows += index % block == 0
    assert residuals.rows_at_end(layers, block) == rows == 9


def test_a_layer_of_kimi_k3_is_priced_with_its_gate_and_its_rows() -> None:
    profile = kimi_k3("mxfp4")
    work = workload(profile, recipe_for(batch=4, tokens=4096), targets_for(profile, rank=16))
    other = workload(profile.model_copy(update={"model_type": "deepseek_v3"}), work.recipe, ())
    plans = plans_of([ParallelStrategy(mesh=Mesh(ep=64, shard=2))], profile)
    rates, fused = Rates.of(load_cluster("h200-128"), "bfloat16", None), FusedProviders()
    tokens = plans.tokens(4096)
    (dense,) = (layer for layer in work.layers if layer.kind.mlp == "dense")
    moves = residuals.residual_moves(work, dense, fused)
    moved, mixed = moves.chains[0], moves.kernels[0]
    assert dense.kind.layer_indices == (0,) and mixed == 14 + 14 + 2 + 1 and moves.operator == (0, 0)
    assert moved == pytest.approx((44 + 78 + 4 + 8 + 6) * work.hidden, rel=1e-3), "one row, and a snapshot"
    forward, backward = _elementwise(work, dense, rates, fused, tokens)
    plain, _ = _elementwise(other, dense, rates, fused, tokens)
    gate = 98 * dense.mlp_width - 10 * dense.mlp_width
    added = gate / rates.bandwidth - 2 * 3 * 2 * work.hidden / rates.bandwidth
    assert forward - plain == pytest.approx(float(tokens[0]) * added, rel=1e-6)
    mixes = _residual_mixes(work, dense, rates, fused, tokens)
    assert mixes[0] == pytest.approx(float(tokens[0]) * moved / (0.70 * rates.bandwidth), rel=1e-6)
    assert backward > forward and mixes[1] > mixes[0]
    (ours, theirs) = (launches.launches_of(one, dense, fused, ()).layer for one in (work, other))
    assert ours[0] > theirs[0] + launches.PLAIN * (mixed - launches.RESIDUAL_SUMS[0])


def test_the_last_mix_is_priced_with_the_head_and_other_families_have_none() -> None:
    profile = kimi_k3("mxfp4")
    work = workload(profile, recipe_for(batch=4, tokens=4096), ())
    moves = residuals.last_mix_moves(work, FusedProviders())
    (forward, backward), kernels = moves.chains, moves.kernels
    assert kernels == (14, 18) and moves.operator == (0, 0) and 0 < forward < backward
    assert forward == pytest.approx((2 * 9 + 32 * 9 + 10) * work.hidden, rel=0.06)
    other = workload(profile.model_copy(update={"model_type": "deepseek_v3"}), work.recipe, ())
    assert residuals.last_mix_moves(other, FusedProviders()) == residuals.RowMoves()
    assert residuals.residual_moves(other, other.layers[0], FusedProviders()) == residuals.RowMoves()


def test_compiled_operators_move_less() -> None:
    profile = kimi_k3("mxfp4")
    work = workload(profile, recipe_for(batch=4, tokens=4096), ())
    compiled = FusedProviders({op: ("compile", ("model.layers.0.x",)) for op in ("attention_residual", "activation")})
    eager, fewer = (residuals.residual_moves(work, work.layers[0], one) for one in (FusedProviders(), compiled))
    assert all(a > b for a, b in zip((*eager.chains, *eager.kernels), (*fewer.chains, *fewer.kernels), strict=True))
    costs = [family.gate_cost(work, one, 64, 128) for one in (FusedProviders(), compiled)]
    assert [cost.forward.launches for cost in costs] == [12, 1]


def test_an_operator_of_ours_moves_what_it_declares_and_copies_no_rows() -> None:
    """A layer of five rows: both mixes by their own cost; of what torch does around them the sums alone are left."""
    work = workload(kimi_k3("mxfp4"), recipe_for(batch=4, tokens=4096), ())
    fused = FusedProviders({"attention_residual": ("shardwright", ("model.layers.0.self_attention_res_norm",))})
    ours = residuals._of_layers(((5, False),), "shardwright", work.hidden, "bfloat16")
    y = 2 * work.hidden
    assert ours.chains == ((3 + 3) * y, 2 * 5 * 3 * y), "two sums; a gradient of each row from each mix added"
    assert ours.kernels == (2 + 2, 2 + 2 * 5)
    kept = 4 * (2 * 5 + 1)
    expected = 2 * ((5 + 1) * y + kept), 2 * ((3 * 5 + 1) * y + kept)
    assert ours.operator == pytest.approx(expected, rel=1e-3), "backward reads rows twice and writes their gradients"
    routed = next(layer for layer in work.layers if layer.kind.mlp != "dense")
    eager = residuals.residual_moves(work, routed, FusedProviders())
    whole = residuals.residual_moves(work, routed, fused)
    assert 3 * sum(whole.bytes) < sum(eager.bytes) and sum(whole.kernels) < sum(eager.kernels)
    last = residuals.last_mix_moves(work, fused)
    assert last.chains == (0, 0) and last.kernels == (1, 1) and last.operator[0] == pytest.approx(10 * y, rel=1e-2)


class Unmoved(torch.autograd.Function):
    """A mix that moves nothing: what is left is what the layer does around it."""

    @staticmethod
    def forward(ctx: Any, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(*rows)
        return torch.empty_like(rows[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(row) for row in ctx.saved_tensors)


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_around_an_operator_rows_move_as_torch_adds_them(rows: int, snapshot: bool) -> None:
    """Both sums, and the gradients that a row gets from both mixes; no other layer reads the rows."""

    def layer(*given: Tensor) -> Tensor:
        *snapshots, hidden = given
        value = Unmoved.apply(*given)
        total = value if snapshot else hidden + value
        return total + Unmoved.apply(*(given if snapshot else snapshots), total)  # type: ignore[no-any-return]

    moved = seen(layer, *(torch.randn(1, T, H, dtype=torch.bfloat16) for _ in range(rows)))
    cost = provider_cost(
        "residual_rows", "eager", {"T": T, "R": rows, "H": H, "S": int(snapshot), "apart": 1}, "bfloat16"
    )
    others = (rows - 1) * 3 * T * H * 2, rows - 1
    found = list(zip(moved.bytes, moved.kernels, strict=True))
    assert list(passes([cost])) == [found[0], (found[1][0] + others[0], found[1][1] + others[1])]
