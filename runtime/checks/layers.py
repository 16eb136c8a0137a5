"""By layer, where the plain model does not fit one process: each kind of layer with its real weights.

The sharded layer runs on rank 0's first micro-batch, its inputs, its output and the experts it chose are kept, and a
single-process layer of transformers with the whole weights runs on the same inputs with the same experts. Then the same
upstream gradient goes back through both and the adapters' gradients are compared by their norm.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoints.build import build_from_config
from shardwright.checkpoints.precision import keep_stored_fp32
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.agree import on_first_rank
from shardwright.runtime.checkpointing import routed
from shardwright.runtime.checks.compare import LOSS_TOLERANCE, NORM_TOLERANCE, ROUTES_TOLERANCE, relative
from shardwright.runtime.checks.context import first_rows
from shardwright.runtime.load.decode import read_base
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.lora.inject import adapter_names, adapter_shapes
from shardwright.runtime.losses import logits_of
from shardwright.runtime.ownership import sum_copies
from shardwright.runtime.parallelize import DTYPES, decoder_layers
from shardwright.runtime.reference import add_plain_lora
from shardwright.runtime.routing import Routes
from shardwright.runtime.segments import Bounds, bounds_of, keep_apart, segments
from shardwright.runtime.train import Trainer
from shardwright.schemas.run import CheckResult


def layers_equal(trainer: Trainer) -> tuple[CheckResult, ...]:
    """One check for each kind of decoder layer; every rank takes part in the sharded side."""
    layers = decoder_layers(trainer.live.model)
    chosen = first_of_each_kind(layers)
    batch = first_rows(trainer)
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    hooks = [
        layers[name].register_forward_pre_hook(_keep(seen, name), with_kwargs=True, prepend=True) for name in chosen
    ]
    with torch.no_grad():
        logits_of(trainer.live.model, batch.ids, batch.positions)
    for hook in hooks:
        hook.remove()
    bounds = None if batch.positions is None else bounds_of(batch.positions)
    return tuple(_compare(trainer, name, layers[name], *seen[name], bounds) for name in chosen)


def first_of_each_kind(layers: dict[str, nn.Module]) -> list[str]:
    """Layers that differ in their class or in the names and shapes of their parameters."""
    kinds: dict[tuple[Any, ...], str] = {}
    for name, layer in layers.items():
        shapes = tuple((leaf, tuple(value.shape)) for leaf, value in layer.named_parameters())
        kinds.setdefault((type(layer).__name__, shapes), name)
    return list(kinds.values())


def _keep(seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[name] = (_detached(args), _detached(kwargs))

    return hook


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value)(_detached(item) for item in value)
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return value


def _compare(
    trainer: Trainer, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], bounds: Bounds | None
) -> CheckResult:
    base = trainer.recipe.precision.base
    trainer.optimizer.clear()
    routes = Routes()
    alone = nullcontext() if trainer.indexer is None else trainer.indexer.silent()
    with alone, segments(bounds), routed(routes):
        ours = _output(layer(*args, **kwargs))
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0)).to(ours)
    ours.backward(upstream if trainer.ranks.rank == 0 else torch.zeros_like(upstream))
    reached = {key: owned for key, owned in trainer.live.adapters.items() if key.startswith(f"{name}.")}
    sum_copies(reached, trainer.ranks)
    mine = {key: grad for key, owned in trainer.optimizer.adapters.items() if (grad := owned.local_grad()) is not None}
    norm = trainer.optimizer.global_norm(mine)
    trainer.optimizer.clear()

    def plain() -> tuple[float, float, Routes]:
        with segments(bounds), routed(repeated := routes.again()):
            theirs, plain_norm = _plain_layer(trainer, name, args, kwargs, upstream)
        error = (ours.detach().float() - theirs.float()).abs().max() / theirs.float().abs().max()
        repeated.made.clear()
        return float(error), plain_norm, repeated

    error, plain_norm, repeated = on_first_rank(plain)
    norm_error = relative(norm, plain_norm)
    return CheckResult(
        stage="load",
        name=f"layer-equal:{name}",
        passed=error <= LOSS_TOLERANCE[base]
        and norm_error <= NORM_TOLERANCE[base]
        and repeated.differing_share <= ROUTES_TOLERANCE[base],
        evidence=f"output of {name} differs from the plain layer's by {error:.1e} of its largest value, adapter "
        f"gradient norm {norm:.6g} against {plain_norm:.6g} ({norm_error:.1e}); "
        f"{repeated.differing} of {repeated.compared} experts chosen otherwise",
        scope="by_layer",
    )


def _output(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def _plain_layer(
    trainer: Trainer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], upstream: Tensor
) -> tuple[Tensor, float]:
    """Output and adapter-gradient norm of one whole layer in this process."""
    files, decision = trainer.live.files, trainer.plan.decision
    device, dtype = trainer.device.torch_device, DTYPES[decision.recipe.precision.base]
    model = build_from_config(files.config, dtype)
    keep_stored_fp32(model, files.names, files.headers)
    layer = model.get_submodule(name)
    with ShardReader(files.folder, files.headers) as reader:
        for leaf, value in list(layer.named_parameters()):
            owner = layer.get_submodule(leaf.rpartition(".")[0])
            read = read_base(reader, files.names, f"{name}.{leaf}", tuple(value.shape), device=device)
            owner._parameters[leaf.rpartition(".")[2]] = nn.Parameter(read.to(device, value.dtype), requires_grad=False)
        for leaf, buffer in list(layer.named_buffers()):
            owner = layer.get_submodule(leaf.rpartition(".")[0])
            read = read_base(reader, files.names, f"{name}.{leaf}", tuple(buffer.shape))
            owner._buffers[leaf.rpartition(".")[2]] = read.to(device, buffer.dtype)
    targets = tuple(target for target in decision.lora_targets if target.parameter.startswith(f"{name}."))
    adapters = {}
    for target in targets:
        for adapter, shape in zip(adapter_names(target), adapter_shapes(target), strict=True):
            whole = tuple((0, size) for size in shape)
            adapters[adapter] = initial_box(decision.recipe.seeds.lora, adapter, shape, whole).to(device)
    leaves = add_plain_lora(model, targets, adapters, files.config.text_model_type)
    if trainer.indexer is not None:
        trainer.indexer.follow_plain(model)
    keep_apart(layer)
    theirs = _output(layer(*args, **kwargs))
    if theirs.requires_grad:
        theirs.backward(upstream)
    squares = [leaf.grad.double().square().sum() for leaf in leaves.values() if leaf.grad is not None]
    return theirs.detach(), float(torch.stack(squares).sum().sqrt()) if squares else 0.0
