"""What attaching adapters and clipping take: cases B9 and B10, reported elsewhere as whole models on every rank.

Rank 0 of eight on a fake process group: storages are counted as they are made, so the sum bounds every peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shardwright.checkpoints.targets import resolve_targets
from shardwright.runtime.device import Device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.load.stream import materialize
from shardwright.runtime.lora.inject import inject
from shardwright.runtime.mesh import open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import owned_parameters
from shardwright.runtime.parallelize import shard
from shardwright.schemas.recipe import LoraSpec, OptimizerSpec, PrecisionSpec
from shardwright.schemas.strategy import Mesh, ParallelStrategy

WORLD = 8


class Made(TorchDispatchMode):
    """Bytes of all storages that are made inside, freed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {value.untyped_storage()._cdata for value in local_tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for value in local_tensors(out):
            if value.untyped_storage()._cdata not in given:
                self.bytes += value.untyped_storage().nbytes()
                self.kept.append(value)
        return out


def local_tensors(tree: Any) -> list[Tensor]:
    """Tensors with storage on this rank; of a DTensor its local part."""
    found = [value.to_local() if isinstance(value, DTensor) else value for value in tree_leaves(tree)]
    return [value for value in found if isinstance(value, Tensor) and not value.is_meta]


@pytest.fixture
def fake_world() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("ep", [1, 4])
def test_attaching_adapters_touches_no_base_data(fake_world: None, ep: int) -> None:
    """B9: nothing but the rank's own shard is ever allocated, adapters and small buffers included."""
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    device = Device("cpu", torch.device("cpu"), "fake")
    strategy = ParallelStrategy(mesh=Mesh(shard=WORLD // ep, ep=ep))
    with Made() as made:
        ranks = open_mesh(strategy.mesh, device)
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(config)
        whole = 4 * sum(value.numel() for value in model.parameters())
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        targets = resolve_targets(shapes, LoraSpec(targets=("attention", "experts"), rank=4), model_type="qwen3_moe")
        inject(
            model, targets, model_type="qwen3_moe", ranks=ranks, meter=LoadMeter(), dropout=0.0, dtype=torch.float32
        )  # fmt: skip
        assert all(value.is_meta for value in model.parameters())
        shard(model, strategy, PrecisionSpec(base="float32"), ranks)
        materialize(model, device)
    owned = owned_parameters(model)
    kept = sum(one.local().numel() * one.local().element_size() for one in owned.values())
    assert whole / WORLD < kept < 1.3 * whole / WORLD, "base and adapters, each rank its share"
    assert kept <= made.bytes <= kept + 8192, "nothing beyond it, not even for a moment"


def test_clipping_takes_no_more_than_the_local_shard() -> None:
    """B10: the gradient that AdamW sees has the largest norm; norm and clip make numbers, no copies of gradients."""
    generator = torch.Generator().manual_seed(0)
    adapters: dict[str, Any] = {}
    for name in ("a.lora_a", "a.lora_b"):
        value = nn.Parameter(torch.zeros(1 << 14))
        value.grad = torch.randn(1 << 14, generator=generator)
        adapters[name] = SimpleNamespace(
            local=value.detach, local_grad=lambda value=value: value.grad, parameter=value, slots=None
        )
    ranks: Any = SimpleNamespace(world=1)
    optimizer = AdapterOptimizer(adapters, OptimizerSpec(max_grad_norm="0.5"), ranks)
    optimizer.moments()
    with Made() as made:
        norm = optimizer.global_norm(optimizer.gradients())
    assert norm == pytest.approx(float(torch.cat([one.local_grad() for one in adapters.values()]).norm()))
    assert norm > 100 and made.bytes < 4096
    optimizer.step(0.0, norm)
    assert optimizer.global_norm(optimizer.gradients()) == pytest.approx(0.5, rel=1e-4)
