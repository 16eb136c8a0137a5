"""The structure stage: a checkpoint folder in; its graph, and fusions with proof, out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from shardwright.agents.structure.canonical import CanonicalGraph, canonical_graphs, layer_graph, opaque_layer
from shardwright.agents.structure.capture import CapturedGraph, capture_model
from shardwright.agents.structure.facts import ModelFacts, observe, versions
from shardwright.agents.structure.measured import shipped_evidence
from shardwright.agents.structure.patterns import Match
from shardwright.agents.structure.propose import find_matches, propose
from shardwright.agents.structure.rank import Target
from shardwright.agents.structure.skeleton import SEQUENCE, find_layers
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.graph import OpGraph
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe

CAPTURE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class StructureResult:
    """What structure parsing found."""

    graph: OpGraph
    proposals: tuple[FusionProposal, ...]


@dataclass(frozen=True)
class Opened:
    """A checkpoint's model, captured and matched, before anything is proposed."""

    pairs: tuple[tuple[CapturedGraph, CanonicalGraph | None], ...]
    matches: tuple[Match, ...]
    facts: ModelFacts
    target: Target


def open_structure(
    folder: Path,
    profile: CheckpointProfile,
    cluster: ClusterSpec,
    recipe: Recipe,
    evidence: tuple[Path, ...] = (),
) -> Opened:
    """Capture and match; arguments and errors as ``run_structure``."""
    from shardwright.checkpoints.build import build_on_meta
    from shardwright.checkpoints.packed_names import packed_parameters
    from shardwright.checkpoints.targets import resolve_targets

    model = build_on_meta(folder, CAPTURE_DTYPE)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    targets = resolve_targets(shapes, recipe.lora, model_type=profile.model_type)
    layers_path, layers = find_layers(model, profile.shape.num_layers)
    units = [f"{layers_path}.{index}" for index in range(len(layers))]
    facts = observe(model, units, targets, profile.tied_weights)
    captured = capture_model(model, profile.layer_kinds, profile.shape.num_layers)
    pairs = canonical_graphs(captured)
    plain = all(packing.format == "plain" for packing in profile.packing)
    files = (*shipped_evidence(), *evidence)
    packed = {} if plain else packed_parameters(folder, model)
    return Opened(pairs, find_matches(pairs), facts, Target(cluster, profile, recipe, files, packed))


def run_structure(
    folder: Path,
    profile: CheckpointProfile,
    cluster: ClusterSpec,
    recipe: Recipe,
    evidence: tuple[Path, ...] = (),
) -> StructureResult:
    """Capture, match, certify, rank.

    Args:
        folder: the checkpoint; config.json is read here, and where weights are packed the headers.
        profile: of the same checkpoint.
        cluster: what variants are ranked for.
        recipe: its LoRA targets decide what lies inside a region, its format what is costed.
        evidence: files of measured times beside those that come with the package; all replace modelled ones, and of
            two that time the same case the later file's goes before.

    Raises:
        CheckpointError: ``unknown-architecture``, ``no-decoder-layers``.
        LegalityError: a LoRA target matches nothing.
        ClusterError: the device has no rate for the recipe's format.
        KernelError: ``corrupt-evidence``.
    """
    opened = open_structure(folder, profile, cluster, recipe, evidence)
    proposals = propose(opened.matches, opened.facts, opened.target)
    graphs = tuple(layer_graph(one, form) if form is not None else opaque_layer(one) for one, form in opened.pairs)
    found = versions()
    graph = OpGraph(
        layers=graphs,
        torch_version=found["torch"],
        transformers_version=found["transformers"],
        capture_dtype=str(CAPTURE_DTYPE).removeprefix("torch."),
        sequence_tokens=SEQUENCE,
    )
    return StructureResult(graph, proposals)
