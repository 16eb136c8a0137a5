"""One training step through the runtime's own modules: adapters, experts, fusions, checkpointing, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from train_step_cases import ALPHA, RANK, Case
from train_step_decisions import decisions_for

from shardwright.checkpoints.build import rebuild_buffers
from shardwright.checkpoints.targets import resolve_targets
from shardwright.runtime.checkpointing import checkpoint_layers, recomputed
from shardwright.runtime.device import Device, open_device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.shared import put_shared_before_experts
from shardwright.runtime.fuse import install_fusions
from shardwright.runtime.load.stream import materialize
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.lora.inject import inject
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import owned_parameters
from shardwright.runtime.parallelize import decoder_layers
from shardwright.schemas.recipe import LoraSpec, OptimizerSpec
from shardwright.schemas.strategy import Mesh

__all__ = ["Ours", "build_ours", "copy_base", "decisions_for", "open_rank"]


@dataclass
class Ours:
    """A model ready to train on one rank."""

    model: nn.Module
    optimizer: AdapterOptimizer
    meter: LoadMeter
    device: Device
    trainable: int
    fused_modules: int

    def loss(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return summed_loss(self.model, ids) / (ids.shape[0] * (ids.shape[1] - 1))

    def step(self, ids: Tensor) -> float:
        """Forward, backward, one norm, clip, AdamW: what a run does for each step."""
        self.optimizer.clear()
        with self.meter.record(), self.device.attention():
            loss = self.loss(ids)
            loss.backward()
        norm = self.optimizer.global_norm(self.optimizer.gradients())
        self.meter.finish_step()
        self.optimizer.step(1e-4, norm)
        return float(loss.detach())


def open_rank() -> tuple[Device, Ranks]:
    """This process as the only rank."""
    device = open_device("cuda" if torch.cuda.is_available() else "cpu", 0)
    if not dist.is_initialized():
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
    return device, open_mesh(Mesh(), device)


def build_ours(case: Case, fusions: tuple[str, ...]) -> Ours:
    """Meta → adapters and local experts → fusions → checkpointing → random weights on the device."""
    from transformers import AutoModelForCausalLM

    device, ranks = open_rank()
    dtype = getattr(torch, case.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.hf_config(), dtype=dtype, attn_implementation="sdpa")
    model.train(False)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    spec = LoraSpec(targets=case.targets, rank=RANK, alpha=str(ALPHA))
    model_type = model.config.model_type
    targets = resolve_targets(shapes, spec, model_type=model_type)
    meter = LoadMeter()
    inject(model, targets, model_type=model_type, ranks=ranks, meter=meter, dropout=0.0, dtype=torch.float32)
    decisions = decisions_for(model, fusions)
    switches = install_fusions(model, decisions)
    put_shared_before_experts(model, decisions)
    checkpoint_layers(recomputed(list(decoder_layers(model).values()), case.strategy()), meter)
    materialize(model, device)
    _fill(model)
    rebuild_buffers(model, device.torch_device)
    owned = owned_parameters(model)
    adapters = {name: one for name, one in owned.items() if one.adapter}
    optimizer = AdapterOptimizer(adapters, OptimizerSpec(), ranks)
    trainable = sum(one.parameter.numel() for one in adapters.values())
    return Ours(model, optimizer, meter, device, trainable, len(switches))


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Norms 1, biases 0, other weights normal with deviation 0.02, adapters as a run starts."""
    for name, owned in owned_parameters(model).items():
        value = owned.local()
        if owned.adapter:
            value.copy_(initial_box(0, name, owned.shape, owned.box))
        elif "norm" in name.rsplit(".", 2)[-2]:
            value.fill_(1.0)
        elif name.endswith("bias"):
            value.zero_()
        else:
            value.normal_(0.0, 0.02)
    for buffer in model.buffers():
        buffer.zero_()


@torch.no_grad()
def copy_base(model: nn.Module, plain: nn.Module) -> None:
    """Frozen weights and buffers of the rival's model, by their names without PEFT's wrapping."""
    names = {}
    for name, value in (*plain.named_parameters(), *plain.named_buffers()):
        if "lora_" not in name:
            names[name.removeprefix("base_model.model.").replace(".base_layer", "")] = value
    for name, owned in owned_parameters(model).items():
        if not owned.adapter:
            owned.local().copy_(names[name])
