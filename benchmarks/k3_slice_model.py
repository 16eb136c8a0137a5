"""A slice of a large model as the runtime trains it on one device: adapters, packed experts, kernels, random weights.

Kernels are installed by the decisions of ``k3_slice_fusions``, as a plan's are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from k3_model import Slice, write_headers
from k3_slice_fusions import decisions
from torch import Tensor, nn
from train_step_ours import open_rank

from shardwright.checkpoints.build import rebuild_buffers
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.checkpoints.targets import resolve_targets
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.device import Device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.packed import SCALES, VALUES, packed_experts_of
from shardwright.runtime.files import open_files
from shardwright.runtime.fuse import Switch, install_fusions
from shardwright.runtime.load.stream import materialize
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.lora.inject import find_experts, inject
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import owned_parameters
from shardwright.runtime.parallelize import decoder_layers
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import LoraSpec, OptimizerSpec

LATENT_PROJECTIONS = ("routed_expert_down_proj", "routed_expert_up_proj")
SCALE_CODES = 0x7A7A
"""Two E8M0 codes of 122 in one int16: 2^(122 − 127) times 0 to 6."""


@dataclass(frozen=True)
class Described:
    """A slice on disk: what a plan is made from."""

    folder: Path
    profile: CheckpointProfile
    targets: tuple[LoraTarget, ...]
    lora: LoraSpec
    packed: bool


def described(cut: Slice, folder: Path) -> Described:
    """Header-only files of the slice, their profile; adapters on attention, and on experts and latent projections."""
    write_headers(folder, cut)
    routed = any(not layer.endswith("+dense") for layer in cut.layers)
    packed = cut.packed and routed
    experts = ("experts", *(LATENT_PROJECTIONS if cut.packed else ())) if routed else ()
    lora = LoraSpec(targets=("attention", *experts), rank=16, alpha="32")
    shapes = {name: tuple(value.shape) for name, value in open_files(folder, torch.bfloat16)[0].named_parameters()}
    targets = resolve_targets(shapes, lora, model_type=cut.model)
    return Described(folder, profile_checkpoint(folder), targets, lora, packed)


@dataclass
class Sliced:
    """A slice ready to train on one device."""

    model: nn.Module
    optimizer: AdapterOptimizer
    meter: LoadMeter
    device: Device
    switches: tuple[Switch, ...]

    def loss(self, ids: Tensor) -> Tensor:
        return summed_loss(self.model, ids) / (ids.shape[0] * (ids.shape[1] - 1))

    def step(self, ids: Tensor) -> float:
        """Forward, backward, norm, clip, AdamW: what a run does for each step."""
        self.optimizer.clear()
        with self.meter.record(), self.device.attention():
            loss = self.loss(ids)
            loss.backward()
        self.meter.finish_step()
        self.optimizer.step(1e-4, self.optimizer.global_norm(self.optimizer.gradients()))
        return float(loss.detach())


def build(what: Described, fusions: tuple[str, ...], dtype: torch.dtype) -> Sliced:
    """Meta → adapters and experts, packed where the files are → kernels → checkpointing → random weights."""
    device, ranks = open_rank()
    model, files = open_files(what.folder, dtype)
    meter = LoadMeter()
    stacks = {
        name: tuple(f"{name}.{stack}" for stack, value in module.named_parameters(recurse=False) if value.dim() == 3)
        for name, module in find_experts(model).items()
    }
    base_format = "mxfp4" if what.packed else "compute"
    inject(
        model,
        what.targets,
        model_type=files.config.text_model_type,
        ranks=ranks,
        meter=meter,
        dropout=0.0,
        dtype=torch.float32,
        packed=packed_experts_of(files.names, stacks, base_format),
    )
    switches = install_fusions(model, decisions(model, fusions))
    layers = list(decoder_layers(model).values())
    checkpoint_layers(layers, meter)
    materialize(model, device)
    fill(model)
    rebuild_buffers(model, device.torch_device)
    adapters = {name: one for name, one in owned_parameters(model).items() if one.adapter}
    return Sliced(model, AdapterOptimizer(adapters, OptimizerSpec(), ranks), meter, device, switches)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Norms 1, vectors 0, other weights normal with deviation 0.02, packed codes random, adapters as a run starts."""
    torch.manual_seed(0)
    for name, owned in owned_parameters(model).items():
        value = owned.local()
        if owned.adapter:
            value.copy_(initial_box(0, name, owned.shape, owned.box))
        elif name.endswith(VALUES):
            value.random_(0, 256)
        elif name.endswith(SCALES):
            value.fill_(SCALE_CODES)
        elif "norm" in name.rsplit(".", 2)[-2] and name.endswith("weight"):
            value.fill_(1.0)
        elif value.dim() < 2:
            value.zero_()
        else:
            value.normal_(0.0, 0.02)
    for buffer in model.buffers():
        buffer.zero_()
