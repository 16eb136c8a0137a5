"""Which layers are built alike: same classes, same parameter shapes, same constants.

A profile groups layers by what headers show; a constant such as an epsilon is not in headers, so each instance is
compared here before a match in one of them is carried over to the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.profile import LayerKind

_POSITIONAL = ("layer_idx", "layer_index", "layer_id", "layer_number", "_fsdp_state")


@dataclass(frozen=True)
class KindGroup:
    """Layers that one capture stands for."""

    name: str
    indices: tuple[int, ...]
    signature: str


def signature(layer: nn.Module) -> str:
    """Hash of a module tree: classes, parameters (name, shape, dtype), scalar attributes but the layer's position."""
    facts: list[object] = []
    for path, module in layer.named_modules():
        constants = {
            name: repr(value)
            for name, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and name not in _POSITIONAL
        }
        weights = [
            [name, list(value.shape), str(value.dtype)] for name, value in module.named_parameters(recurse=False)
        ]
        buffers = [[name, list(value.shape), str(value.dtype)] for name, value in module.named_buffers(recurse=False)]
        facts.append([path, f"{type(module).__module__}.{type(module).__qualname__}", constants, weights, buffers])
    return sha256_of(facts)


def group_layers(layers: nn.ModuleList, kinds: tuple[LayerKind, ...]) -> tuple[KindGroup, ...]:
    """Split each kind of the profile where its instances differ; the first group keeps the kind's name."""
    named = {index: kind.name for kind in kinds for index in kind.layer_indices}
    groups: dict[tuple[str, str], list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault((named.get(index, "layer"), signature(layer)), []).append(index)
    seen: dict[str, int] = {}
    result = []
    for (name, digest), indices in groups.items():
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name}-{seen[name]}"
        result.append(KindGroup(label, tuple(indices), digest))
    return tuple(result)
