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
from shardwright.search_spaces.cost import family, launches, workload
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
ATTENTION = {"forward": 1, "backward": 5}
FURTHER = {
    "deepseek-v3": (
        "DeepseekV3Config",
        {"first_k_dense_replace": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "q_lora_rank": 1536},
        {
            "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 4,
            "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 16,
            "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size": 256,
            "n_group": 2, "topk_group": 1,
        },
    )
}  # fmt: skip
"""A shape beside those that were measured, whole and in miniature."""


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
            self.seen["backward" if back else "forward"] += KERNELS.get(name, 1)
        return result


class Attention(torch.autograd.Function):
    """Torch's attention, which on a GPU is ``ATTENTION`` kernels and on a CPU a chain of others."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.shapes = q.shape, k.shape, v.shape
        return q.new_empty((*q.shape[:-1], v.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradients[0].new_empty(shape) for shape in ctx.shapes)


def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = Attention.apply(q, k, v)
    return out


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


@pytest.mark.parametrize(
    ("model", "layers"), [("qwen3-30b", 3), ("deepseek-v3", 3), ("glm-5", 3), ("kimi-linear-48b", 4)]
)
def test_kernels_of_an_eager_layer_are_those_that_run(
    ranks: None, monkeypatch: pytest.MonkeyPatch, model: str, layers: int
) -> None:
    """Adapters on attention and experts; softmax, latent and sparse attention: a layer more, a kernel counting one."""
    monkeypatch.setattr(launches, "PLAIN", 1.0)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    for name, (config, sizes, tiny) in FURTHER.items():
        monkeypatch.setitem(shapes.SHAPES, name, shapes.Shape(config, sizes, ()))
        monkeypatch.setitem(shapes.TINY, name, tiny)
    more, fewer = counted(model, layers, 64), counted(model, layers - 1, 64)
    what = points_model.described(shapes.Point("eager", model, BOTH, layers, 64, 1, "none"))
    work, fused = workload(what.profile, what.recipe, what.targets), FusedProviders()
    (layer,) = (one for one in work.layers if layers - 1 in one.kind.layer_indices)
    found = launches.launches_of(work, layer, fused, _norm_costs(work, fused, 64)).layer
    for name, ours in zip(("forward", "backward"), found, strict=True):
        assert ours == pytest.approx(more[name] - fewer[name] + ATTENTION[name], rel=0.06), name


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


def test_tensors_that_an_unfused_chain_saves_are_those_that_hooks_see() -> None:
    """Of Kimi-Linear's linear attention over two and four chunks, and fewer than a layer's others beside them."""
    config = KimiLinearConfig(hidden_size=8, linear_num_heads=1, linear_head_dim=8)
    layer = KimiLinearDeltaAttention(config, config.layer_types.index("linear_attention")).to(torch.bfloat16)
    found = {}
    for tokens in (128, 256):
        x = torch.zeros(1, tokens, 8, dtype=torch.bfloat16, requires_grad=True)
        seen: list[Tensor] = []

        def pack(one: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(one)
            return one

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            layer.requires_grad_(False)(x)
        found[tokens] = len(seen)
    row, each = launches.CHUNK_SAVED
    assert found[256] - found[128] == 2 * each
    assert 0 < found[128] - 2 * each - 63 * row < 461 / 8


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
        gate = family.eager_gate("qwen3_moe", "bfloat16")[1][at]
        gone = launches.PLAIN * (launches.ROWS[at] + gate + launches.ROUTER[at]) + 2 * launches.ADAPTED_EXPERTS[at]
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
