"""Models on a mesh without a checkpoint: the runtime's own parts, random weights that do not depend on the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from points_model import Recomputed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from train_step_ours import decisions_for

from shardwright.checkpoints.build import rebuild_buffers
from shardwright.checkpoints.targets import resolve_targets
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.device import Device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.shared import put_shared_before_experts
from shardwright.runtime.fuse import install_fusions
from shardwright.runtime.load.stream import materialize
from shardwright.runtime.lora.init import generator_for
from shardwright.runtime.lora.inject import inject
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import Owned, as_saved, owned_parameters
from shardwright.runtime.parallelize import decoder_layers, shard
from shardwright.schemas.recipe import LoraSpec, OptimizerSpec, PrecisionSpec
from shardwright.schemas.strategy import ParallelStrategy

RANK, ALPHA = 16, "32"

__all__ = ["Built", "Recomputed", "build", "fusions_for"]


@dataclass
class Built:
    """A sharded model ready to train on this rank."""

    model: nn.Module
    owned: dict[str, Owned]
    optimizer: AdapterOptimizer
    meter: LoadMeter
    device: Device
    ranks: Ranks

    def gradient(self, rows: Sequence[Tensor], counted: int) -> tuple[float, dict[str, Tensor]]:
        """Forward and backward over this rank's micro-batches; loss per counted token of all ranks, rows by expert."""
        self.optimizer.clear()
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        with self.meter.record():
            for ids in rows:
                with self.device.attention():
                    loss = summed_loss(self.model, ids.to(self.device.torch_device)) / counted
                    loss.backward()
                total += loss.detach().double()
                del loss
        if self.ranks.world > 1:
            dist.all_reduce(total)
        return float(total), self.meter.finish_step()

    def norm(self) -> float:
        return self.optimizer.global_norm(self.optimizer.gradients())

    def apply(self) -> None:
        self.optimizer.step(1e-4, self.norm())

    def whole_gradients(self) -> dict[str, Tensor]:
        """Gradients of all adapters, whole and on the host, on every rank."""
        found = {}
        for name, owned in self.owned.items():
            mine = owned.local_grad() if owned.adapter else None
            if mine is not None:
                placed = as_saved(owned, mine, self.ranks)
                whole = placed.full_tensor() if isinstance(placed, DTensor) else placed
                found[name] = whole.float().cpu()
        return found


def fusions_for(operators: Sequence[str], ep: int) -> tuple[str, ...]:
    """Operators under expert parallelism: received rows in place of the whole layer."""
    return tuple("grouped_lora_mlp" if name == "moe_layer" and ep > 1 else name for name in operators)


def build(
    config: Any,
    strategy: ParallelStrategy,
    precision: PrecisionSpec,
    targets: tuple[str, ...],
    operators: Sequence[str],
    device: Device,
    *,
    exact: bool,
) -> Built:
    """Meta → adapters and local experts → fusions → checkpointing → FSDP → weights, as a run does.

    Args:
        operators: to fuse; empty for the family's own modules.
        exact: weights by name from one generator each, alike on every mesh (small models); else drawn where they lie.
    """
    ranks = open_mesh(strategy.mesh, device)
    model = on_meta(config, getattr(torch, precision.base))
    family = str(model.config.model_type)  # type: ignore[union-attr]
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    resolved = resolve_targets(shapes, LoraSpec(targets=targets, rank=RANK, alpha=ALPHA), model_type=family)
    meter = LoadMeter()
    adapter = getattr(torch, precision.adapter)
    inject(
        model,
        resolved,
        model_type=family,
        ranks=ranks,
        meter=meter,
        dropout=0.0,
        dtype=adapter,
        chunks=strategy.overlap_chunks,
        padding=strategy.expert_padding_tokens,
    )
    decisions = decisions_for(model, fusions_for(operators, strategy.mesh.ep))
    install_fusions(model, decisions)
    if strategy.checkpointing == "full":
        put_shared_before_experts(model, decisions)
        checkpoint_layers(list(decoder_layers(model).values()), meter)
    shard(model, strategy, precision, ranks)
    materialize(model, device)
    owned = owned_parameters(model)
    _fill(model, owned, exact)
    rebuild_buffers(model, device.torch_device)
    adapters = {name: one for name, one in owned.items() if one.adapter}
    return Built(model, owned, AdapterOptimizer(adapters, OptimizerSpec(), ranks), meter, device, ranks)


def on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    """The family's causal language model on meta, with torch's attention where the family has it."""
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping[type(config)]
    attention = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    with torch.device("meta"):
        model: nn.Module = kind._from_config(config, dtype=dtype, attn_implementation=attention)
    model.train(False)
    return model


@torch.no_grad()
def _fill(model: nn.Module, owned: dict[str, Owned], exact: bool) -> None:
    """Norms 1, biases and buffers 0, other weights normal: deviation 0.02, of adapters 0.01 (0.1 where exact)."""
    for name, one in owned.items():
        value = one.local()
        if "norm" in name.rsplit(".", 2)[-2] and not one.adapter:
            value.fill_(1.0)
        elif name.endswith("bias"):
            value.zero_()
        elif exact:
            deviation = 0.1 if one.adapter or value.dim() > 1 else 0.02
            whole = torch.randn(one.shape, generator=generator_for(0, name)) * deviation
            value.copy_(whole[tuple(slice(first, last) for first, last in one.box)])
        elif value.numel():
            value.normal_(0.0, 0.01 if one.adapter else 0.02)
    for buffer in model.buffers():
        buffer.zero_()
