"""A checkpoint as config.json and headers tell it; no weight is read and no code of the checkpoint is run."""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections import defaultdict
from math import prod
from pathlib import Path

from shardwright.checkpoints.build import has_transformers_class
from shardwright.checkpoints.collector import paused_collector
from shardwright.checkpoints.components import split_layer
from shardwright.checkpoints.config import CONFIG_FILE, ModelConfig, read_config
from shardwright.checkpoints.counting import Counter
from shardwright.checkpoints.fingerprint import fingerprint
from shardwright.checkpoints.headers import Headers, read_headers
from shardwright.checkpoints.kinds import layer_kinds
from shardwright.checkpoints.packing.detect import logical_tensors
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.checkpoints.precision import listed_pattern, stored_fp32
from shardwright.checkpoints.shape import model_shape
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.profile import CheckpointProfile, ModelShape, Packing

_EXPERT = re.compile(r"(?:^|\.)experts\.(?:expert_)?(\d+)\.")


def profile_checkpoint(folder: Path) -> CheckpointProfile:
    """Profile a folder.

    Raises:
        CheckpointError: as :func:`read_config` and :func:`read_headers`; ``unknown-quantization``,
            ``config-contradiction``.
    """
    with paused_collector():
        return _profile(Path(folder))


def _profile(folder: Path) -> CheckpointProfile:
    config = read_config(folder)
    headers = read_headers(folder)
    shape = model_shape(config)
    logical = logical_tensors(headers.tensors, config.raw)
    counter = Counter(logical, headers, config, shape)
    check_agreement(config, shape, logical, counter)
    known = has_transformers_class(config)
    if not known and "auto_map" in config.raw and held_one_by_one(logical):
        shape = shape.model_copy(update={"expert_stacks": False})
    wide = listed_pattern(config) if known else None
    kept = () if wide is None else stored_fp32(logical, headers, wide)
    return CheckpointProfile(
        model_type=config.model_type,
        architecture=config.architecture or config.model_type,
        transformers_class=known,
        tensors=len(headers.tensors),
        files=len(headers.files),
        stored_bytes=headers.stored_bytes,
        dtypes=dict(sorted(Tally(tensor.dtype for tensor in headers.tensors.values()).items())),
        parameters=counter.parameters().model_copy(update={"kept_float32": counter.weights_of(kept)}),
        packing=packing_of(logical, headers),
        shape=shape,
        layer_kinds=layer_kinds(counter, config),
        tied_weights=counter.tied,
        fingerprint=fingerprint(folder, headers),
        warnings=_warnings(config, counter, known),
    )


def packing_of(logical: dict[str, LogicalTensor], headers: Headers) -> tuple[Packing, ...]:
    """One entry for each storage format and block, sorted."""
    groups: dict[tuple[str, tuple[int, ...]], list[LogicalTensor]] = defaultdict(list)
    for tensor in logical.values():
        groups[tensor.format, tensor.block].append(tensor)
    return tuple(
        Packing(
            format=tensors[0].format,
            tensors=len(tensors),
            stored_bytes=sum(
                headers.tensors[name].stored_bytes for tensor in tensors for name in (tensor.values, *tensor.companions)
            ),
            logical_parameters=sum(prod(tensor.shape) for tensor in tensors),
            block=block,
        )
        for (_, block), tensors in sorted(groups.items())
    )


def check_agreement(
    config: ModelConfig, shape: ModelShape, logical: dict[str, LogicalTensor], counter: Counter
) -> None:
    """Tensors and configuration must tell of the same model.

    Raises:
        CheckpointError: ``config-contradiction``, naming the field and the tensor.
    """

    def require(field: str, expected: int, found: int, tensor: str) -> None:
        if expected != found:
            raise CheckpointError(
                "config-contradiction",
                f"config.json has {field} = {expected}; the tensors say {found} ({tensor})",
                where=str(config.folder / CONFIG_FILE),
                next_action="config.json and the weights must be of one revision; fetch both again",
            )

    for name in counter.embeddings:
        if len(logical[name].shape) == 2 and len(counter.embeddings) == 1:
            require("vocab_size", shape.vocab_size, logical[name].shape[0], name)
            require("hidden_size", shape.hidden_size, logical[name].shape[1], name)
    stems = {stem for stem, _ in counter.layers}
    if len(stems) == 1:
        (stem,) = stems
        present = {index for _, index in counter.layers}
        absent = next((index for index in range(shape.num_layers) if index not in present), None)
        if absent is not None:
            require("num_hidden_layers", shape.num_layers, len(present), f"no tensor {stem}{absent}.*")
    elif not stems and shape.num_layers:
        require("num_hidden_layers", shape.num_layers, 0, "no tensor of any layer")
    identity = config.count("zero_expert_num")
    widths = config.get("moe_intermediate_size")
    pools = len(widths) if isinstance(widths, list) and widths else 1
    for name, count in sorted(expert_counts(logical, counter).items()):
        if count != shape.num_experts * pools + identity:
            require("the number of experts", shape.num_experts, count, name)


def expert_counts(logical: dict[str, LogicalTensor], counter: Counter) -> dict[str, int]:
    """First expert tensor of each decoder layer → experts in that layer's files."""
    ids: dict[tuple[str, int], set[int]] = defaultdict(set)
    first: dict[tuple[str, int], str] = {}
    for name, tensor in logical.items():
        place = split_layer(name)
        if place is None or place[:2] not in counter.layers or "shared" in place[2]:
            continue
        match = _EXPERT.search(place[2])
        if match:
            ids[place[:2]].add(int(match.group(1)))
            first.setdefault(place[:2], name)
        elif len(tensor.shape) == 3 and "experts." in place[2]:
            ids[place[:2]].update(range(tensor.shape[0]))
            first.setdefault(place[:2], name)
    return {first[place]: len(found) for place, found in ids.items()}


def held_one_by_one(logical: dict[str, LogicalTensor]) -> bool:
    """Whether files have a tensor for each expert.

    A checkpoint's own code reads files by its parameters' names, so that its experts then are modules of their own.
    """
    return any(_EXPERT.search(name) for name in logical)


def _warnings(config: ModelConfig, counter: Counter, known: bool) -> tuple[str, ...]:
    notes = []
    if not known:
        notes.append(f"transformers has no class for model_type {config.model_type!r}: profiled from headers only")
    if "auto_map" in config.raw:
        notes.append("the checkpoint brings its own code (auto_map); it is not run")
    if not counter.heads and not counter.tied:
        notes.append("no output head in the files, and config.json does not tie it to the embedding")
    if counter.by_component.get("other"):
        notes.append(f"{counter.by_component['other']} parameters belong to no known component")
    return tuple(notes)
