"""A slice of a large model as the runtime trains it on one device: adapters, packed experts, kernels, random weights.

What a plan would decide is written out here by the classes of modules: experts, routers, norms, sparse attention, the
loss. Kimi K3's delta-rule layers and its gated sparse slot, which no plan reaches yet, get their operators by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from k3_model import Slice, write_headers
from torch import Tensor, nn
from train_step_ours import _decision as decision
from train_step_ours import _epsilon as epsilon
from train_step_ours import open_rank, register

from shardwright.checkpoints.build import rebuild_buffers
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.checkpoints.targets import resolve_targets
from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.device import Device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.packed import SCALES, VALUES, packed_experts_of
from shardwright.runtime.files import open_files
from shardwright.runtime.fuse import Switch, install_fusions
from shardwright.runtime.fused_dsa_borders import Borders
from shardwright.runtime.fused_dsa_layer import SparseAttention
from shardwright.runtime.load.stream import materialize
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.lora.inject import find_experts, inject
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import owned_parameters
from shardwright.runtime.parallelize import decoder_layers
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import LoraSpec, OptimizerSpec

LATENT_PROJECTIONS = ("routed_expert_down_proj", "routed_expert_up_proj")
SCALE_CODES = 0x7A7A
"""Two E8M0 codes of 122 in one int16: 2^(122 − 127) times 0 to 6."""
SPARSE = {"GlmMoeDsaAttention": ("interleaved", True), "DeepseekV32Attention": ("half-split", False)}
"""Class → how its indexer rotates, and whether it hands its choice on to the next layer."""
SPARSE_ROLES = {
    "q_a": "q_a_proj", "q_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm", "kv_b_weight": "kv_b_proj.weight", "o": "o_proj", "index_q": "indexer.wq_b",
    "index_k": "indexer.wk", "index_norm": "indexer.k_norm", "index_weights": "indexer.weights_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Described:
    """A slice on disk: what a plan is made from."""

    folder: Path
    profile: CheckpointProfile
    targets: tuple[LoraTarget, ...]
    lora: LoraSpec
    packed: bool


def described(cut: Slice, folder: Path) -> Described:
    """Header-only files of the slice, their profile, and adapters on attention, latent projections and experts."""
    write_headers(folder, cut)
    latent = LATENT_PROJECTIONS if cut.packed else ()
    lora = LoraSpec(targets=("attention", "experts", *latent), rank=16, alpha="32")
    shapes = {name: tuple(value.shape) for name, value in open_files(folder, torch.bfloat16)[0].named_parameters()}
    targets = resolve_targets(shapes, lora, model_type=cut.model)
    return Described(folder, profile_checkpoint(folder), targets, lora, cut.packed)


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
    if "dsa" in fusions:
        install_gated_sparse(model)
    if "kda" in fusions:
        install_delta_rule(model, OPERATORS["kda"].load_op())
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


def decisions(model: nn.Module, fusions: tuple[str, ...]) -> tuple[FusionDecision, ...]:
    """What a plan for this model would decide, for the named operators; those without a place are left out."""
    register(fusions)
    makers = {
        "experts": _experts,
        "router": _routers,
        "rms_norm": _norms,
        "gated_rms_norm": _gated_norms,
        "kda": lambda _: [],
        "dsa": _sparse,
        "linear_cross_entropy": _loss,
    }
    unknown = [name for name in fusions if name not in makers]
    if unknown:
        raise SystemExit(f"unknown fusions: {', '.join(unknown)}; known: {', '.join(makers)}")
    return tuple(one for name in fusions for one in makers[name](model))


def named(model: nn.Module, *classes: str) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ in classes}


def _experts(model: nn.Module) -> list[FusionDecision]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, LoraExperts)}
    if not found:
        return []
    first: Any = next(iter(found.values()))
    constants: dict[str, Any] = {"activation": "swiglu"}
    text: Any = getattr(model.config, "text_config", model.config)
    if hasattr(text, "activation_situ_beta"):
        beta, linear = text.activation_situ_beta, text.activation_situ_linear_beta
        constants = {"activation": "situ", "limit": f"{beta:g}", "alpha": f"{linear:g}", "offset": "0"}
    return [decision("packed_experts" if first.packing else "moe_layer", tuple(found), {}, constants)]


def _routers(model: nn.Module) -> list[FusionDecision]:
    """Routers that give scores, weights and ids themselves: Kimi K3's."""
    found = named(model, "Router")
    if not found:
        return []
    gate = next(iter(found.values()))
    constants = {
        "k": gate.top_k, "scoring": "sigmoid", "renormalise": gate.renormalise, "scale": f"{gate.scale:g}",
        "logits_dtype": "float32",
    }  # fmt: skip
    return [decision("router", tuple(found), {"weight": "weight", "bias": "e_score_correction_bias"}, constants)]


def _norms(model: nn.Module) -> list[FusionDecision]:
    """Plain norms, one decision an epsilon. Norms whose weight alone is read (attention residuals) never run."""
    by_epsilon: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and "Gated" not in kind and "_res_norm" not in name:
            by_epsilon.setdefault(epsilon(module), []).append(name)
    return [
        decision("rms_norm", tuple(names), {"weight": "weight"}, {"eps": eps})
        for eps, names in sorted(by_epsilon.items())
    ]


def _gated_norms(model: nn.Module) -> list[FusionDecision]:
    found = named(model, "GatedRMSNorm")
    if not found:
        return []
    eps = epsilon(next(iter(found.values())))
    return [decision("gated_rms_norm", tuple(found), {"weight": "weight"}, {"eps": eps, "act": "sigmoid"})]


def _sparse(model: nn.Module) -> list[FusionDecision]:
    """One decision a class of sparse attention; Kimi K3's slot is installed by :func:`install_gated_sparse`."""
    found = []
    for kind, (layout, hands_on) in SPARSE.items():
        modules = named(model, kind)
        if modules:
            constants = {
                **_sparse_sizes(model.config), "layout": "interleaved", "index_layout": layout, "hands_on": hands_on,
            }  # fmt: skip
            found.append(decision("dsa", tuple(modules), SPARSE_ROLES, constants))
    return found


def _sparse_sizes(config: Any) -> dict[str, Any]:
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    return {
        "nope": nope, "rope": rope, "value": config.v_head_dim, "top_k": config.index_topk, "form": "own",
        "scale": f"{(nope + rope) ** -0.5:.12f}", "index_first": True,
        "index_scale": f"{(config.index_n_heads * config.index_head_dim) ** -0.5:.12f}",
    }  # fmt: skip


def install_gated_sparse(model: nn.Module) -> None:
    """The operator in Kimi K3's gated sparse slot, which has no rotation and takes nothing but hidden states."""
    for name, module in named(model, "GatedSparseAttention").items():
        constants = {
            **_sparse_sizes(model.config.text_config),  # type: ignore[union-attr]
            "layout": "none", "index_layout": "none", "hands_on": False,
        }  # fmt: skip
        roles = {**SPARSE_ROLES, "gate": "g_proj"}
        layer = SparseAttention.of(module, name, decision("dsa", (name,), roles, constants))
        module.forward = _gated_forward(layer)


def install_delta_rule(model: nn.Module, op: Callable[..., tuple[Tensor, Any]]) -> None:
    """The operator in Kimi K3's delta-rule layers: raw gate and beta, the lower-bounded decay, whole sequences.

    Args:
        op: ``kernels.kda.op.kda``, or what has its meaning.
    """
    for module in named(model, "DeltaAttention").values():
        module.forward = _delta_forward(module, op)


def _delta_forward(module: Any, op: Callable[..., tuple[Tensor, Any]]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        heads = (*x.shape[:2], module.heads, module.width)
        mixed = (
            module._short(conv, projection(x)).reshape(heads)
            for conv, projection in (
                (module.q_conv1d, module.q_proj),
                (module.k_conv1d, module.k_proj),
                (module.v_conv1d, module.v_proj),
            )
        )
        parts = (*mixed, module.f_b_proj(module.f_a_proj(x)).view(heads), module.b_proj(x))
        rates, shift = module.A_log[: module.heads], module.dt_bias.view(module.heads, module.width)
        out, _ = op(*(one.contiguous() for one in parts), rates, shift, gate="bounded", lower_bound=module.lower_bound)
        gate = module.g_proj(x).view(heads)
        return module.o_proj(module.o_norm(out.to(x.dtype), gate).reshape(*x.shape[:2], -1))

    return forward


def _gated_forward(layer: SparseAttention) -> Any:
    def forward(x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            raise SystemExit("the slice trains whole sequences, without masks")
        return layer(x, None, Borders.of(x, None), None)[0]

    return forward


def _loss(model: nn.Module) -> list[FusionDecision]:
    head = next(name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == "lm_head")
    return [decision("linear_cross_entropy", (head,), {"weight": "weight"}, {})]
