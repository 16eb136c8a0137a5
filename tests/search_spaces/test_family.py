"""What Kimi K3's layers compute besides, held against the operators that its code calls, byte for byte."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from models import kimi_k3, recipe_for, targets_for

from shardwright.checkpoints.models.kimi_k3.configuration import DEFAULTS
from shardwright.checkpoints.models.kimi_k3.feed_forward import situ
from shardwright.checkpoints.models.kimi_k3.residuals import read
from shardwright.schemas.ops import OpCost
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import family, launches, workload
from shardwright.search_spaces.cost.compute import Rates
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.layer_time import _elementwise
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.providers import provider_cost

NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"}
T, H = 8, 64
DTYPES = (torch.bfloat16, torch.float32)


def distinct_bytes(value: Tensor) -> int:
    """Of a tensor's own values: an expanded dimension repeats the same ones."""
    return (
        value.element_size()
        * torch.Size(size for size, stride in zip(value.shape, value.stride(), strict=True) if stride).numel()
    )


class Moved(TorchDispatchMode):
    """Bytes that operators read and write, and how many there are, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels = [0, 0], [0, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if func.namespace == "aten" and made and not func.is_view and func._schema.name[6:] not in NO_KERNEL:
            back = torch._C._current_graph_task_id() != -1
            read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self.bytes[back] += sum(map(distinct_bytes, (*read, *made)))
            self.kernels[back] += 1
        return result


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
    block, layers = family.SNAPSHOT_LAYERS["kimi_k3"], kimi_k3("mxfp4").shape.num_layers
    assert DEFAULTS["attn_res_block_size"] == block and layers == 93
    rows = 1
    for index in range(layers):
        assert family.rows_of_layer(index, block) == (rows, index % block == 0)
        rows += index % block == 0
    assert family.rows_at_end(layers, block) == rows == 9


def test_a_layer_of_kimi_k3_is_priced_with_its_gate_and_its_rows() -> None:
    profile = kimi_k3("mxfp4")
    work = workload(profile, recipe_for(batch=4, tokens=4096), targets_for(profile, rank=16))
    other = workload(profile.model_copy(update={"model_type": "deepseek_v3"}), work.recipe, ())
    plans = plans_of([ParallelStrategy(mesh=Mesh(ep=64, shard=2))], profile)
    rates, fused = Rates.of(load_cluster("h200-128"), "bfloat16", None), FusedProviders()
    tokens = plans.tokens(4096)
    (dense,) = (layer for layer in work.layers if layer.kind.mlp == "dense")
    (moved, _), (mixed, _) = family.residual_moves(work, dense, fused)
    assert dense.kind.layer_indices == (0,) and mixed == 14 + 14 + 2 + 1
    assert moved == pytest.approx((44 + 78 + 4 + 8 + 6) * work.hidden, rel=1e-3), "one row, and a snapshot"
    forward, backward = _elementwise(work, dense, rates, fused, tokens)
    plain, _ = _elementwise(other, dense, rates, fused, tokens)
    gate = 98 * dense.mlp_width - 10 * dense.mlp_width
    added = gate / rates.bandwidth + moved / (0.70 * rates.bandwidth) - 2 * 3 * 2 * work.hidden / rates.bandwidth
    assert forward - plain == pytest.approx(float(tokens[0]) * added, rel=1e-6)
    assert backward > forward
    (ours, theirs) = (launches.launches_of(one, dense, fused, ()).layer for one in (work, other))
    assert ours[0] > theirs[0] + launches.PLAIN * (mixed - launches.RESIDUAL_SUMS[0])


def test_the_last_mix_is_priced_with_the_head_and_other_families_have_none() -> None:
    profile = kimi_k3("mxfp4")
    work = workload(profile, recipe_for(batch=4, tokens=4096), ())
    (forward, backward), kernels = family.last_mix_moves(work, FusedProviders())
    assert kernels == (14, 18) and 0 < forward < backward
    assert forward == pytest.approx((2 * 9 + 32 * 9 + 10) * work.hidden, rel=0.06)
    other = workload(profile.model_copy(update={"model_type": "deepseek_v3"}), work.recipe, ())
    assert family.last_mix_moves(other, FusedProviders()) == family.NOTHING
    assert family.residual_moves(other, other.layers[0], FusedProviders()) == family.NOTHING


def test_compiled_operators_move_less() -> None:
    profile = kimi_k3("mxfp4")
    work = workload(profile, recipe_for(batch=4, tokens=4096), ())
    compiled = FusedProviders({op: ("compile", ("model.layers.0.x",)) for op in ("attention_residual", "activation")})
    eager, fewer = (family.residual_moves(work, work.layers[0], one) for one in (FusedProviders(), compiled))
    assert all(a > b for a, b in zip((*eager[0], *eager[1]), (*fewer[0], *fewer[1]), strict=True))
    costs = [family.gate_cost(work, one, 64, 128) for one in (FusedProviders(), compiled)]
    assert [cost.forward.launches for cost in costs] == [12, 1]
