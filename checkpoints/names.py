"""From file names to parameters and back, by transformers' own conversion rules."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.checkpoints.build import build_from_config
from shardwright.checkpoints.config import ModelConfig
from shardwright.checkpoints.conversion import Box, Piece, Symbolic, UnsupportedConversion, run_chain, transpose
from shardwright.checkpoints.headers import Headers
from shardwright.checkpoints.packing.detect import logical_tensors
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.schemas.errors import CheckpointError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class TensorRead:
    """One file tensor's part in filling a parameter.

    Attributes:
        tensor, file: what to read.
        source: box of the file tensor.
        target: box of the parameter.
        axes: for each dim of the parameter, the dim of the file tensor that feeds it; ``None`` for a stacked dim
            (extent 1). ``(None, 0, 1)`` is one expert of a stack, ``(0, 2, 1)`` a transposed stack.
    """

    tensor: str
    file: str
    target: Box
    source: Box
    axes: tuple[int | None, ...]


class NameMap:
    """Which file tensors fill which parameters.

    Make one with :meth:`for_checkpoint`.
    """

    def __init__(
        self,
        sources: dict[str, tuple[Piece, ...]],
        shapes: dict[str, tuple[int, ...]],
        logical: dict[str, LogicalTensor],
        headers: Headers,
        redundant: tuple[str, ...],
    ) -> None:
        self._sources, self._shapes, self._logical, self._headers = sources, shapes, logical, headers
        self._redundant = redundant

    @classmethod
    def for_checkpoint(
        cls,
        config: ModelConfig,
        headers: Headers,
        parameter_shapes: dict[str, tuple[int, ...]],
        model: nn.Module | None = None,
    ) -> NameMap:
        """Match a checkpoint's tensors with a model's parameters.

        Args:
            config: the checkpoint's configuration.
            headers: its tensors.
            parameter_shapes: what must be filled; ``build.state_shapes(model)`` gives parameters and persistent
                buffers, tied ones once.
            model: the model on meta, if there is one; built here otherwise.

        Raises:
            CheckpointError: ``unknown-architecture``, ``shape-mismatch``, ``unsupported-layout``,
                ``unknown-quantization``.
        """
        logical = logical_tensors(headers.tensors, config.raw)
        rules = Rules(model or build_from_config(config, torch.bfloat16), parameter_shapes)
        groups: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(logical, key=natural_key):
            parameter, converter, pattern = rules.rename(name)
            groups[parameter, converter][pattern].append(name)
        sources: dict[str, tuple[Piece, ...]] = {}
        for (parameter, converter), collected in groups.items():
            parts = {pattern: [_of_file(name, logical[name]) for name in names] for pattern, names in collected.items()}
            for target, symbolic in rules.convert(parameter, converter, parts).items():
                if target not in parameter_shapes:
                    continue
                if target in sources:
                    raise _mismatch(target, f"filled by {sources[target][0].tensor} and by {symbolic.pieces[0].tensor}")
                if symbolic.shape != parameter_shapes[target]:
                    names = [piece.tensor for piece in symbolic.pieces]
                    raise _mismatch(
                        target,
                        f"the files give {list(symbolic.shape)} ({len(names)} tensors, first {names[0]}), "
                        f"the model wants {list(parameter_shapes[target])}",
                    )
                _check_ids(target, symbolic)
                sources[target] = symbolic.pieces
        used = {piece.tensor for pieces in sources.values() for piece in pieces}
        rest = [name for name in logical if name not in used]
        redundant = tuple(name for name in rest if _is_redundant(name, config, rules))
        return cls(sources, parameter_shapes, logical, headers, redundant)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Everything that the files fill, whole and unpacked: parameters and persistent buffers, tied ones once."""
        return self._shapes

    def reads(self, parameter: str) -> tuple[TensorRead, ...]:
        """The reads that fill a parameter whole, in order of their place in it.

        Raises:
            CheckpointError: ``missing-tensor`` when no file tensor fills it, ``packed-weights`` when its values are
                quantised and must be decoded rather than read.
        """
        pieces = self._sources.get(parameter)
        if pieces is None:
            raise CheckpointError(
                "missing-tensor",
                "no file tensor fills this parameter",
                where=parameter,
                next_action="fetch the whole checkpoint; check that its architecture is the model's",
            )
        packed = next((self._logical[p.tensor] for p in pieces if self._logical[p.tensor].format != "plain"), None)
        if packed is not None:
            raise CheckpointError(
                "packed-weights",
                f"{packed.values} is stored as {packed.format}; reading it as it is would give wrong values",
                where=parameter,
                next_action="dequantise the checkpoint to bf16 first",
            )
        reads = [TensorRead(p.tensor, self._headers.tensors[p.tensor].file, p.target, p.source, p.axes) for p in pieces]
        return tuple(sorted(reads, key=lambda read: read.target))

    def hub_names(self, parameter: str) -> tuple[str, ...]:
        """The published names (as in the files) behind a parameter, in the order of their place in it."""
        return tuple(piece.tensor for piece in sorted(self._sources.get(parameter, ()), key=lambda p: p.target))

    def pieces(self, parameter: str) -> tuple[Piece, ...]:
        """The boxes of logical file tensors behind a parameter, packed ones too, in order of their place in it."""
        return tuple(sorted(self._sources.get(parameter, ()), key=lambda piece: piece.target))

    def logical(self, tensor: str) -> LogicalTensor:
        """How a logical file tensor is stored."""
        return self._logical[tensor]

    def stored_dtype(self, stored: str) -> str:
        """The format of a file tensor, by its own name."""
        return self._headers.tensors[stored].dtype

    def missing(self) -> tuple[str, ...]:
        """Parameters that no file tensor fills."""
        return tuple(name for name in self._shapes if name not in self._sources)

    def unused(self) -> tuple[str, ...]:
        """Logical file tensors that fill nothing and should."""
        used = {piece.tensor for pieces in self._sources.values() for piece in pieces}
        skip = used.union(self._redundant)
        return tuple(name for name in self._logical if name not in skip)

    def redundant(self) -> tuple[str, ...]:
        """File tensors that are rightly left out: a tied head's copy, MTP layers, recomputed rotary buffers."""
        return self._redundant


class Rules:
    """transformers' renamings and converters for one model."""

    def __init__(self, model: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        transforms = get_model_conversion_mapping(model)
        self.converters = [one for one in transforms if hasattr(one, "operations")]
        self.renamings = [one for one in transforms if not hasattr(one, "operations")]
        self.prefix = model.base_model_prefix
        self.shapes = shapes
        self.known = {*shapes, *(name for name, _ in model.named_parameters(remove_duplicate=False))}
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self.ignored = [re.compile(pattern) for pattern in ignored]

    def rename(self, name: str) -> tuple[str, int, str]:
        """(parameter or layer name, converter's place or -1, source pattern that matched).

        A name that is the model's own stays where the rules lead nowhere: files that transformers itself has saved keep
        some (DeepSeek-V4's ``model.norm.weight``, which a rule for an inner norm also fits).
        """
        renamed = name
        for one in self.renamings:
            renamed, _ = one.rename_source_key(renamed)
        place, pattern = -1, ""
        for index, one in enumerate(self.converters):
            renamed, matched = one.rename_source_key(renamed)
            if matched is not None:
                place, pattern = index, matched
                break
        found = self.with_prefix(renamed)
        return (name, -1, "") if found not in self.known and name in self.known else (found, place, pattern)

    def with_prefix(self, name: str) -> str:
        """A base model's files load into the model with a head, and the reverse."""
        if not self.prefix or name in self.known:
            return name
        bare = name.removeprefix(f"{self.prefix}.")
        if bare != name and bare in self.known:
            return bare
        return f"{self.prefix}.{name}" if f"{self.prefix}.{name}" in self.known else name

    def convert(self, layer: str, place: int, parts: dict[str, list[Symbolic]]) -> dict[str, Symbolic]:
        """Parameter → symbolic tensor."""
        if place < 0:
            (only,) = parts.values()
            if len(only) > 1:
                raise _mismatch(layer, f"filled by {only[0].pieces[0].tensor} and by {only[1].pieces[0].tensor}")
            return {layer: only[0]}
        converter = self.converters[place]
        first = converter.target_patterns[0]
        named = {pattern: self.with_prefix(layer.replace(first, pattern, 1)) for pattern in converter.target_patterns}
        expected = {pattern: self.shapes[name] for pattern, name in named.items() if name in self.shapes}
        if not expected:
            return {}
        try:
            done = run_chain(
                converter.operations, parts, converter.source_patterns, converter.target_patterns, expected
            )
        except UnsupportedConversion as error:
            if len(parts) < len(converter.source_patterns):
                absent = [pattern for pattern in converter.source_patterns if pattern not in parts]
                raise _mismatch(layer, f"no file tensor matches {', '.join(absent)}") from error
            raise CheckpointError(
                "unsupported-layout",
                f"{error}",
                where=layer,
                next_action="convert the checkpoint with transformers' save_pretrained first",
            ) from error
        return {named[pattern]: symbolic for pattern, symbolic in done.items() if pattern in named}


def _of_file(name: str, tensor: LogicalTensor) -> Symbolic:
    """A file tensor as the model's class orders it: gpt-oss blocks keep [E, out, in], its experts [E, in, out].

    That is a fact of the format; sizes could not tell where out is in.
    """
    whole = Symbolic.of_file(name, tensor.shape)
    rank = len(tensor.shape)
    return transpose(whole, rank - 2, rank - 1) if tensor.format == "gpt-oss-mxfp4" else whole


def _mismatch(parameter: str, what: str) -> CheckpointError:
    return CheckpointError(
        "shape-mismatch",
        what[:500],
        where=parameter,
        next_action="config.json and the weights must be of one revision; fetch both again",
    )


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which ``experts.10`` follows ``experts.9``."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in _DIGITS.split(name))


def _check_ids(parameter: str, symbolic: Symbolic) -> None:
    """Stacked file tensors must be numbered 0 … n-1: a gap would shift every later expert by one."""
    by_column: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
    for piece in symbolic.pieces:
        stacked = [place for place, axis in enumerate(piece.axes) if axis is None]
        if len(stacked) != 1:
            return
        rest = tuple(extent for place, extent in enumerate(piece.target) if place != stacked[0])
        by_column[rest].append(piece.tensor)
    for names in by_column.values():
        columns = zip(*(map(int, _DIGITS.findall(name)) for name in names), strict=False)
        varying = [column for column in columns if len(set(column)) > 1]
        if len(names) > 1 and (len(varying) != 1 or sorted(varying[0]) != list(range(len(names)))):
            raise _mismatch(parameter, f"stacked tensors are not numbered 0 … {len(names) - 1}: {names[:3]} …")


def _is_redundant(name: str, config: ModelConfig, rules: Rules) -> bool:
    layers = config.count("num_hidden_layers", "n_layer", "n_layers")
    layer = _LAYER.search(name)
    beyond = layer is not None and layers > 0 and int(layer.group(1)) >= layers
    mtp = name.startswith("mtp.") or ".mtp." in name or beyond
    parameter = rules.rename(name)[0]
    tied_copy = parameter in rules.known and parameter not in rules.shapes
    return mtp or tied_copy or name.endswith("inv_freq") or any(rule.search(name) for rule in rules.ignored)
