"""A point's model through the runtime's own parts: on meta for the prediction, on the device for the measurement."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from points_shapes import ALPHA, RANK, Point
from torch import Tensor, nn
from train_step_ours import decisions_for, open_rank

from shardwright.checkpoints.build import rebuild_buffers
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.checkpoints.targets import resolve_targets
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.device import Device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.fuse import install_fusions
from shardwright.runtime.load.stream import materialize
from shardwright.runtime.lora.inject import inject
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import owned_parameters
from shardwright.runtime.parallelize import decoder_layers
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import BatchSpec, DataSpec, LoraSpec, OptimizerSpec, PrecisionSpec, Recipe

FIRST_VALUE = 1e-2
"""Deviation of adapter B and A matrices: zero B would leave gradients of A zero, not cheaper."""


@dataclass
class Side:
    """A model ready to train on this rank."""

    model: nn.Module
    optimizer: AdapterOptimizer
    meter: LoadMeter
    device: Device

    def gradient(self, ids: Tensor) -> dict[str, Tensor]:
        """Forward and backward of one micro-batch as the trainer does them; rows by layer and expert."""
        self.optimizer.clear()
        with self.meter.record(), self.device.attention():
            loss = summed_loss(self.model, ids) / ids.numel()
            loss.backward()
        del loss
        return self.meter.finish_step()

    def apply(self) -> None:
        """Norm, clip, AdamW."""
        self.optimizer.step(1e-4, self.optimizer.global_norm(self.optimizer.gradients()))


@dataclass(frozen=True)
class Described:
    """What the cost model needs to know of a point."""

    profile: CheckpointProfile
    recipe: Recipe
    targets: tuple[LoraTarget, ...]
    fusions: tuple[FusionDecision, ...]


def plain_model(point: Point, dtype: torch.dtype) -> nn.Module:
    """The family's model on meta, frozen mode as a run has it."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(point.hf_config(), dtype=dtype, attn_implementation="sdpa")
    model.train(False)
    return model


def spec_of(point: Point) -> LoraSpec:
    return LoraSpec(targets=point.targets, rank=RANK, alpha=ALPHA)


def adapted_model(
    point: Point, dtype: torch.dtype
) -> tuple[nn.Module, LoadMeter, tuple[LoraTarget, ...], tuple[FusionDecision, ...]]:
    """Meta model with adapters and our experts in place, and the decisions that would fuse it."""
    _, ranks = open_rank()
    model = plain_model(point, dtype)
    model_type = model.config.model_type  # type: ignore[union-attr]
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    targets = resolve_targets(shapes, spec_of(point), model_type=str(model_type))
    meter = LoadMeter()
    inject(
        model, targets, model_type=str(model_type), ranks=ranks, meter=meter, dropout=0.0, dtype=torch.float32
    )  # fmt: skip
    return model, meter, targets, decisions_for(model, point.fusions)


def live_model(point: Point, dtype: torch.dtype) -> Side:
    """Ready to train, without checkpointing (see :class:`Recomputed`)."""
    device, ranks = open_rank()
    model, meter, _, decisions = adapted_model(point, dtype)
    install_fusions(model, decisions)
    materialize(model, device)
    _fill(model)
    rebuild_buffers(model, device.torch_device)
    adapters = {name: one for name, one in owned_parameters(model).items() if one.adapter}
    return Side(model, AdapterOptimizer(adapters, OptimizerSpec(), ranks), meter, device)


class Recomputed:
    """Checkpoints every layer inside the block, if asked to."""

    def __init__(self, side: Side, how: str) -> None:
        self.layers = list(decoder_layers(side.model).values()) if how == "full" else []
        self.meter = side.meter

    def __enter__(self) -> None:
        checkpoint_layers(self.layers, self.meter)

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.forward = layer.forward.original


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Norms 1, biases and buffers 0, other weights normal with deviation 0.02."""
    for name, owned in owned_parameters(model).items():
        value = owned.local()
        if owned.adapter:
            value.normal_(0.0, FIRST_VALUE)
        elif "norm" in name.rsplit(".", 2)[-2]:
            value.fill_(1.0)
        elif name.endswith("bias"):
            value.zero_()
        else:
            value.normal_(0.0, 0.02)
    for buffer in model.buffers():
        buffer.zero_()


def recipe_of(point: Point) -> Recipe:
    return Recipe(
        data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
        batch=BatchSpec(sequence_tokens=point.tokens, global_batch_sequences=point.batch),
        precision=PrecisionSpec(base="bfloat16", adapter="float32"),
        lora=spec_of(point),
    )


@lru_cache(maxsize=64)
def _described(
    built: tuple[Any, ...], overrides: tuple[tuple[str, Any], ...], point: Point
) -> tuple[CheckpointProfile, tuple[LoraTarget, ...], tuple[FusionDecision, ...]]:
    _, _, targets, decisions = adapted_model(point, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        return headers_only(point, Path(folder)), targets, decisions


def described(point: Point) -> Described:
    """Profile, recipe, targets and fusions of a point, as the product itself would read them."""
    first = Point(*point.built, 2048, 1, "none", overrides=point.overrides)
    profile, targets, fusions = _described(point.built, tuple(point.overrides), first)
    return Described(profile, recipe_of(point), targets, fusions)


def headers_only(point: Point, folder: Path) -> CheckpointProfile:
    """Profile of a checkpoint of this shape whose one shard is a hole behind its header."""
    import json

    model = plain_model(point, torch.bfloat16)
    model.config.save_pretrained(folder)  # type: ignore[union-attr]
    header: dict[str, Any] = {}
    place = 0
    for name, value in model.state_dict().items():
        size = value.numel() * value.element_size()
        kind = {torch.bfloat16: "BF16", torch.float32: "F32"}[value.dtype]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    return profile_checkpoint(folder)
