"""What attention residuals hold in memory, against the live bytes of the model's own code."""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from models import kimi_k3, recipe_for

from shardwright.checkpoints.models.kimi_k3.residuals import read
from shardwright.search_spaces.cost import activations, mixes, workload
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.workload import Workload

T, H, N = 64, 512, 4
CLASSES = {
    "deepseek_v4": "DeepseekV4HyperConnection",
    "glm5_next": "Glm5NextTextHyperConnection",
    "hy_v4": "HYV4HyperConnection",
    "qwen4_exp": "Qwen4ExpTextGatedResidual",
}


class Live(TorchDispatchMode):
    """Bytes of all storages made inside that are still alive, and the most at any operator's end.

    Args:
        given: tensors that are there before, and that views may show.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {one.untyped_storage()._cdata for one in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._hold(value.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


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
    one = mixes._mixes(work, rows, 0)
    kept, passing, backward = (size * T * H / work.hidden for size in (one.first, one.passing, one.first_backward))
    seen_forward, seen_kept, seen_backward = live(rows)
    row = T * H * 2
    assert seen_kept == pytest.approx(kept, abs=1.3 * row)
    assert seen_forward == pytest.approx(kept + passing, abs=3.3 * row)
    assert seen_backward == pytest.approx(kept + backward, rel=0.03, abs=2 * row)


def test_rows_of_a_kind_are_those_of_its_fullest_layer_and_their_mean_for_all_together() -> None:
    work = k3()
    for layer in work.layers:
        fullest, mean = mixes.mixes_of(work, layer), mixes.mixes_of(work, layer, mean=True)
        if layer.kind.mlp == "dense":
            assert (fullest.first, fullest.second) == (4 * work.hidden, 8 * work.hidden), "one row, and a snapshot"
        else:
            assert fullest.first == fullest.second == 4 * 9 * work.hidden, "eight snapshots and the sum"
            assert 4.5 * 4 * work.hidden < mean.first < 6.5 * 4 * work.hidden
    assert mixes.snapshot_gradients(work) == 8 * 2 * work.hidden


def connection(family: str) -> Callable[[Tensor], Tensor]:
    """A frozen hyper-connection of a family with the sum behind it, as the family's layer spells it."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hc_mult": N, "hc_count": N, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "hc_lowrank": 64}
    config = SimpleNamespace(**sizes, rms_norm_eps=1e-6, hidden_size=H, hc_magnitude=2.0)
    made = getattr(module, CLASSES[family])(config).to(torch.bfloat16).requires_grad_(False)
    for value in made.parameters():
        value.data = 0.02 * torch.randn_like(value)

    def half(streams: Tensor) -> Tensor:
        if family == "qwen4_exp":
            read, given, weights = made(streams.flatten(-2))
            return cast(Tensor, given + ((read * 1).unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2))
        if family == "hy_v4":
            post, read = made(streams)
            added = post.float().unsqueeze(-1) * (read * 1).float().unsqueeze(-2)
            return cast(Tensor, (added + streams.float()).to(streams.dtype))
        post, mixed, read = made(streams)
        spread = post.to(streams.dtype).unsqueeze(-1) * (read * 1).unsqueeze(-2)
        return cast(Tensor, spread + torch.matmul(mixed.to(streams.dtype).transpose(-1, -2), streams))

    return half


@pytest.mark.parametrize("family", sorted(CLASSES))
def test_a_hyper_connection_holds_what_its_operators_hold(family: str) -> None:
    half = connection(family)
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
    assert mixes.mixes_of(one, one.layers[0]) == mixes.Mixes()
    assert mixes.mixes_of(four, four.layers[0]).kept == pytest.approx((2 * 3.8 + 1) * N * row)


def test_other_families_have_none() -> None:
    profile = kimi_k3("mxfp4").model_copy(update={"model_type": "deepseek_v3"})
    work = workload(profile, recipe_for(batch=4, tokens=4096), ())
    assert mixes.mixes_of(work, work.layers[0]) == mixes.last_mix(work) == mixes.Mixes()
    assert mixes.snapshot_gradients(work) == 0
