"""One training step through the runtime's own modules: adapters, experts, fusions, checkpointing, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from train_step_cases import ALPHA, RANK, Case

from shardwright.checkpoints.build import rebuild_buffers
from shardwright.checkpoints.targets import resolve_targets
from shardwright.kernels.registry import OPERATORS, ROOM, OperatorEntry, source_sha256
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.device import Device, open_device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.fuse import install_fusions
from shardwright.runtime.load.stream import materialize
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.lora.inject import inject
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import owned_parameters
from shardwright.runtime.parallelize import decoder_layers
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.recipe import LoraSpec, OptimizerSpec
from shardwright.schemas.strategy import Mesh

FUSIONS = ("moe_layer", "router", "rms_norm", "add_rms_norm", "qk_norm_rope", "kda", "linear_cross_entropy")
"""Operators that a case may use; ``grouped_lora_mlp`` takes the place of ``moe_layer`` where it is named instead."""
NOT_NORMS_OF_TOKENS = ("q_norm", "k_norm", "kv_a_layernorm")
"""Norms on heads, and one that reads part of what its projection gives: ``rms_norm`` takes whole rows."""
WITHOUT = {"Qwen3MoeConfig": ("kda",), "KimiLinearConfig": ("router", "qk_norm_rope")}
"""Operators that a family has no place for."""


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
        self.meter.finish_step()
        norm = self.optimizer.global_norm(self.optimizer.gradients())
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
    switches = install_fusions(model, decisions_for(model, fusions))
    checkpoint_layers(list(decoder_layers(model).values()), meter)
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


def decisions_for(model: nn.Module, fusions: tuple[str, ...]) -> tuple[FusionDecision, ...]:
    """What a plan for this model would decide, for the named operators."""
    register(fusions)
    made = {
        "moe_layer": _experts(model, "moe_layer"),
        "grouped_lora_mlp": _experts(model, "grouped_lora_mlp"),
        "router": _router(model),
        "rms_norm": _norms(model),
        "add_rms_norm": _layers(model),
        "qk_norm_rope": _attention(model),
        "kda": _kda(model),
        "linear_cross_entropy": _decision("linear_cross_entropy", ("lm_head",), {"weight": "weight"}, {}),
    }
    chosen = [made[name] for name in fusions]
    return tuple(one for one in chosen if one is not None)


def register(names: tuple[str, ...]) -> None:
    """Operators in the kernels room that the registry does not admit yet are timed all the same."""
    for name in names:
        if name not in OPERATORS and (Path(ROOM) / name / "op.py").is_file():
            OPERATORS[name] = OperatorEntry(name, name, f"{name}.op:{name}", f"{name}.cost:cost", "", ())


def _decision(op: str, modules: tuple[str, ...], roles: dict[str, str], constants: dict[str, Any]) -> FusionDecision:
    return FusionDecision(
        proposal_id=f"bench.{op}",
        pattern=op,
        variant="fused",
        provider="shardwright",
        op=op,
        modules=modules,
        roles=roles,
        constants=constants,
        source_sha256=source_sha256(op) if op in OPERATORS else None,
        tolerance="0.02",
    )


def _experts(model: nn.Module, op: str) -> FusionDecision | None:
    names = tuple(name for name, module in model.named_modules() if isinstance(module, LoraExperts))
    return _decision(op, names, {}, {"activation": "swiglu"}) if names else None


def _norms(model: nn.Module) -> FusionDecision | None:
    found = {
        name: module for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm") and name
    }
    plain = {
        name: module
        for name, module in found.items()
        if "Gated" not in type(module).__name__ and name.rsplit(".", 1)[-1] not in NOT_NORMS_OF_TOKENS
    }
    if not plain:
        return None
    eps = _epsilon(next(iter(plain.values())))
    same = tuple(name for name, module in plain.items() if _epsilon(module) == eps)
    return _decision("rms_norm", same, {"weight": "weight"}, {"eps": eps})


def _router(model: nn.Module) -> FusionDecision | None:
    """Routers of the Qwen3 kind: softmax, renormalised, weights in the format of the logits."""
    kind = "Qwen3MoeTopKRouter"
    names = {name: module for name, module in model.named_modules() if type(module).__name__ == kind}
    if not names:
        return None
    gate: Any = next(iter(names.values()))
    constants = {"k": int(gate.top_k), "scoring": "softmax", "renormalise": bool(gate.norm_topk_prob)}
    return _decision("router", tuple(names), {"weight": "weight"}, constants)


def _layers(model: nn.Module) -> FusionDecision | None:
    children = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    names = {
        name: layer for name, layer in decoder_layers(model).items() if set(dict(layer.named_children())) == children
    }
    if not names:
        return None
    roles = {
        "first_norm": "input_layernorm",
        "branch": "self_attn",
        "norm": "post_attention_layernorm",
        "mlp": "mlp",
    }
    first: Any = next(iter(names.values()))
    eps = _epsilon(first.post_attention_layernorm)
    return _decision("add_rms_norm", tuple(names), roles, {"eps": eps})


def _attention(model: nn.Module) -> FusionDecision | None:
    """Attentions with a norm on each head."""
    found = {name: module for name, module in model.named_modules() if hasattr(module, "q_norm")}
    norms: list[Any] = [module.q_norm for module in found.values()]
    return _decision("qk_norm_rope", tuple(found), {}, {"eps": _epsilon(norms[0])}) if norms else None


def _kda(model: nn.Module) -> FusionDecision | None:
    names = tuple(name for name, module in model.named_modules() if type(module).__name__ == "KimiLinearDeltaAttention")
    return _decision("kda", names, {}, {}) if names else None


def _epsilon(norm: Any) -> str:
    value = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return f"{float(value):.12f}".rstrip("0")
