"""What the host does for a layer, held against the operators that the runtime's executor really calls."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from shardwright.runtime.load.stream import materialize
from shardwright.runtime.losses import summed_loss
from shardwright.search_spaces.cost import launches, workload
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.layer_time import _norm_costs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
shapes = importlib.import_module("points_shapes")
points_model = importlib.import_module("points_model")
trace_points = importlib.import_module("trace_points")

BOTH = ("attention", "experts")
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view"}
KERNELS = {"sort": 8, "topk": 3, "slice_backward": 2, "select_backward": 2, "new_zeros": 3}
"""Kernels of an operator on CUDA where it is not one; ``new_zeros`` stands for a grouped product with its offsets."""
ATTENTION = {False: 1, True: 5}


@pytest.fixture
def ranks() -> Iterator[None]:
    """What a miniature's model opens is closed again."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Called(TorchDispatchMode):
    """Kernels of all operators that make or change values, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        tensors = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if func.namespace == "aten" and tensors and name not in NO_KERNEL and not func.is_view:
            back = torch._C._current_graph_task_id() != -1
            kernels = ATTENTION[back] if "scaled_dot_product" in name else KERNELS.get(name, 1)
            self.seen["backward" if back else "forward"] += kernels
        return result


def counted(model: str, layers: int, tokens: int) -> Counter[str]:
    """Of one step of an eager miniature."""
    point = shapes.Point("eager", model, BOTH, layers, tokens, 1, "none", tuple(shapes.TINY[model].items()))
    network, *_ = points_model.adapted_model(point, torch.bfloat16)
    device, _ = points_model.open_rank()
    called = Called()
    with trace_points.without_values(), FakeTensorMode(allow_non_fake_inputs=True):
        materialize(network, device)
        with called:
            summed_loss(network, torch.zeros((1, tokens), dtype=torch.long)).backward()
    return called.seen


def test_kernels_of_an_eager_layer_are_those_that_run(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-MoE with adapters on attention and experts: a layer more, every kernel counting one."""
    monkeypatch.setattr(launches, "PLAIN", 1.0)
    three, two = counted("qwen3-30b", 3, 64), counted("qwen3-30b", 2, 64)
    what, fused = points_model.described(shapes.Point("eager", "qwen3-30b", BOTH, 2, 64, 1, "none")), FusedProviders()
    work = workload(what.profile, what.recipe, what.targets)
    forward, backward = launches.launches_of(work, work.layers[0], fused, _norm_costs(work, fused, 64)).layer
    assert forward == pytest.approx(three["forward"] - two["forward"], rel=0.12)
    assert backward == pytest.approx(three["backward"] - two["backward"], rel=0.12)


def test_kernels_of_an_unfused_chain_grow_by_the_chunk_as_they_run() -> None:
    """Kimi-Linear's linear attention over two and four chunks of 64, projections and gates among its operators."""
    config = KimiLinearConfig(hidden_size=8, linear_num_heads=1, linear_head_dim=8)
    layer = KimiLinearDeltaAttention(config, config.layer_types.index("linear_attention")).to(torch.bfloat16)
    found = {}
    for tokens in (128, 256):
        x = torch.zeros(1, tokens, 8, dtype=torch.bfloat16, requires_grad=True)
        with Called() as called:
            layer.requires_grad_(False)(x).sum().backward()
        found[tokens] = (called.seen["forward"], called.seen["backward"])
    for at, (row, each) in enumerate(launches.CHUNK_KERNELS):
        beside = launches.PROJECTIONS["linear"] + launches.BESIDE["linear"][at]
        assert found[256][at] - found[128][at] == 2 * each
        assert 63 * row + 2 * each + beside == pytest.approx(found[128][at], rel=0.02)


def test_fusions_leave_the_host_less_to_do(build: SimpleNamespace) -> None:
    profile = build.qwen3_30b()
    work = workload(profile, build.recipe_of(batch=1, tokens=4096), build.targets_of(profile, rank=16))
    fused = FusedProviders(
        {op: ("shardwright", ("model.layers.0.x",)) for op in ("experts", "router")},
        {"experts": "moe_layer", "router": "router"},
    )
    eager, ours = (
        launches.launches_of(work, work.layers[0], one, _norm_costs(work, one, 64)).layer
        for one in (FusedProviders(), fused)
    )
    for at in (0, 1):
        gone = launches.PLAIN * (launches.ROWS[at] + launches.ROUTER[at]) + 2 * launches.ADAPTED_EXPERTS[at]
        come = launches.NODES["experts"][at] + launches.NODES["router"][at] + launches.PLAIN * launches.EXPERT_CASTS[at]
        assert eager[at] - ours[at] == pytest.approx(gone - come)
        assert ours[at] < eager[at]


def test_rows_that_travelled_are_launched_anew(build: SimpleNamespace) -> None:
    """Six and eight launches of our experts with adapters through triton, and the guards of a layout never seen."""
    profile = build.qwen3_30b()
    work = workload(profile, build.recipe_of(batch=1, tokens=4096), build.targets_of(profile, rank=16))
    fused = FusedProviders({"experts": ("shardwright", ("model.layers.0.x",))}, {"experts": "grouped_lora_mlp"})
    found = launches.launches_of(work, work.layers[0], fused, _norm_costs(work, fused, 64))
    assert found.received == pytest.approx((3.8 + 6 * 1.8, 3.8 + 8 * 1.8))
    eager = launches.launches_of(work, work.layers[0], FusedProviders(), _norm_costs(work, FusedProviders(), 64))
    assert eager.received == (0.0, 0.0)
