"""Routers' biases that a run moved, as part of what is exported.

PEFT has no buffers of its own; a router named in ``modules_to_save`` travels whole: its bias from the run, its matrix
from the base. A merged checkpoint takes the new values in place of the old ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shardwright.checkpoints.build import build_from_config, state_shapes
from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.headers import Headers, read_headers
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.load.decode import read_base
from shardwright.schemas.errors import RunError
from shardwright.schemas.lora import LoraTarget

PREFIX = "base_model.model."
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def routers_of(biases: dict[str, Tensor]) -> list[str]:
    """The modules that hold the biases, for ``modules_to_save``."""
    return sorted({name.rpartition(".")[0] for name in biases})


def saved_routers(
    checkpoint: Path, biases: dict[str, Tensor], targets: tuple[LoraTarget, ...] = ()
) -> dict[str, Tensor]:
    """PEFT key → tensor of every router whose bias moved: the whole state of the module.

    Raises:
        RunError: ``router-biases`` where the bias lies beside the experts, or the router has an adapter too: PEFT would
            save all experts, or take one of both.
    """
    if not biases:
        return {}
    config, headers = read_config(checkpoint), read_headers(checkpoint)
    model = build_from_config(config, torch.bfloat16)
    shapes = state_shapes(model)
    names = NameMap.for_checkpoint(config, headers, shapes, model)
    adapted = {target.module for target in targets}
    tensors: dict[str, Tensor] = {}
    with ShardReader(checkpoint, headers) as reader:
        for router in routers_of(biases):
            held = [name for name in shapes if name.startswith(f"{router}.")]
            if any(len(shapes[name]) == 3 for name in held) or router in adapted:
                raise refused(f"{router} holds experts or an adapter beside its bias")
            for name in held:
                value = biases[name].float() if name in biases else read_base(reader, names, name, shapes[name])
                tensors[PREFIX + name] = value.contiguous()
    return tensors


def merged_biases(names: NameMap, headers: Headers, biases: dict[str, Tensor]) -> dict[str, bytes]:
    """File tensor → its new bytes.

    Raises:
        RunError: ``router-biases`` where a bias is no tensor of its own in the files.
    """
    changed = {}
    for name, value in biases.items():
        stored = names.hub_names(name)
        header = headers.tensors.get(stored[0]) if len(stored) == 1 else None
        if header is None or header.dtype not in DTYPES or torch.Size(header.shape).numel() != value.numel():
            raise refused(f"{name} is no tensor of its own in the files")
        plain = value.to(DTYPES[header.dtype]).contiguous()
        changed[header.name] = plain.view(torch.uint8).numpy().tobytes()
    return changed


def require_frozen(biases: dict[str, Tensor], form: str) -> None:
    """For forms that can carry adapters alone.

    Raises:
        RunError: ``router-biases``.
    """
    if biases:
        raise refused(f"{form} has no place for the {len(biases)} biases that the run moved")


def refused(what: str) -> RunError:
    return RunError(
        "router-biases",
        what,
        where="recipe.balance.bias",
        next_action="export the merged checkpoint: without these biases the adapter is another model",
    )
