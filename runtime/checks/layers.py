"""By layer, where the plain model does not fit one process: each kind of layer with its real weights.

The sharded layer runs on rank 0's first micro-batch, its inputs, its output and the experts it chose are kept, and a
single-process layer of transformers with the whole weights runs on the same inputs with the same experts. Then the same
upstream gradient goes back through both and the adapters' gradients are compared by their norm. A plain layer that has
no room beside the loaded model runs on the host, which the evidence says; one at a time is in memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.checkpoints.build import build_from_config
from shardwright.checkpoints.precision import keep_stored_fp32
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.agree import on_first_rank
from shardwright.runtime.checkpointing import routed
from shardwright.runtime.checks.compare import LOSS_TOLERANCE, NORM_TOLERANCE, ROUTES_TOLERANCE, relative
from shardwright.runtime.checks.context import first_rows
from shardwright.runtime.checks.memory import check_guard
from shardwright.runtime.checks.room import place_of_layer
from shardwright.runtime.checks.wide import Wide, as_near, in_fp32, largest_difference
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
    """One check for each kind of decoder layer; every rank takes part in the sharded side.

    Raises:
        RunError: ``check-no-room``, ``check-out-of-memory``.
    """
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
        seen[name] = tree_map_only(Tensor, lambda value: value.detach().clone(), (args, kwargs))

    return hook


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

    output = ours.detach()
    del ours

    def plain() -> tuple[_Plain, Routes]:
        repeated = routes.again()
        try:
            with check_guard(trainer.device, f"{name} ran as a plain layer"), segments(bounds):
                found = _plain_layer(trainer, name, (args, kwargs, upstream), output, repeated)
        finally:
            trainer.device.release()
        repeated.made.clear()
        return found, repeated

    found, repeated = on_first_rank(plain)
    norm_error = relative(norm, found.norm)
    return CheckResult(
        stage="load",
        name=f"layer-equal:{name}",
        passed=(found.error <= LOSS_TOLERANCE[base] or (found.wide is not None and as_near(*found.wide)))
        and norm_error <= NORM_TOLERANCE[base]
        and repeated.differing_share <= ROUTES_TOLERANCE[base],
        evidence=f"output of {name} differs from the plain layer's{found.place} by {found.error:.1e} of its largest "
        f"value{in_fp32(found.wide, 'the plain layer')}, adapter gradient norm {norm:.6g} against {found.norm:.6g} "
        f"({norm_error:.1e}); {repeated.differing} of {repeated.compared} experts chosen otherwise",
        scope="by_layer",
    )


def _output(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class _Plain:
    """What a plain layer said.

    Attributes:
        error: of the sharded layer's output against it.
        norm: of its adapters' gradients.
        wide: where the error is large, those of the sharded and of the plain layer against it in fp32.
        place: where it ran, if not on the device.
    """

    error: float
    norm: float
    wide: tuple[float, float] | None
    place: str


def _plain_layer(
    trainer: Trainer,
    name: str,
    given: tuple[tuple[Any, ...], dict[str, Any], Tensor],
    output: Tensor,
    routes: Routes,
) -> _Plain:
    """One whole layer in this process, on a layer's arguments and upstream gradient, beside the sharded ``output``."""
    layer, leaves, device = _built_layer(trainer, name)
    args, kwargs, upstream = tree_map_only(Tensor, lambda value: value.to(device), given)
    keep_apart(layer)
    with routed(routes):
        theirs = _output(layer(*args, **kwargs))
    if theirs.requires_grad:
        theirs.backward(upstream)
    squares = [leaf.grad.double().square().sum() for leaf in leaves.values() if leaf.grad is not None]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    theirs = theirs.detach()
    error, wide = largest_difference(output, theirs), None
    base = trainer.recipe.precision.base
    if base != "float32" and not error <= LOSS_TOLERANCE[base]:
        with torch.no_grad(), Wide(), routed(routes.again()):
            exact = _output(layer(*args, **kwargs))
        wide = (largest_difference(output, exact), largest_difference(theirs, exact))
    return _Plain(error, norm, wide, "" if device == output.device else " on the host")


def _built_layer(trainer: Trainer, name: str) -> tuple[nn.Module, dict[str, Tensor], torch.device]:
    """A layer with its whole weights and plain adapters, the adapters as leaves, and where they are."""
    files, decision = trainer.live.files, trainer.plan.decision
    model = build_from_config(files.config, DTYPES[decision.recipe.precision.base])
    keep_stored_fp32(model, files.names, files.headers)
    layer = model.get_submodule(name)
    device = place_of_layer(name, sum(value.nbytes for value in layer.parameters()), trainer.device)
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
    return layer, leaves, device
