"""One family through profile, capture, patterns and certificates: what :mod:`families` records as a row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from families_own import OWN, parameters, write
from families_tiny import main_type, tiny_config

NORM_OPS = frozenset({"layer_norm", "native_layer_norm", "rms_norm"})
EXPERTS = ("experts", "experts_loop", "experts_embedding")
"""Patterns of an experts block: stacks, a loop over matrices, neurons in embedding tables."""
ACTIVATION_OPS = frozenset({"silu", "gelu", "relu"})


def row_of(family: str, folder: Path) -> dict[str, Any]:
    """Build a tiny checkpoint of a family in ``folder``; profile it, capture it, match it, certify it."""
    from shardwright.schemas.errors import ShardwrightError

    row: dict[str, Any] = {"family": family}
    for name, step in (("profile", _profile), ("capture", _capture)):
        try:
            row |= step(family, folder)
        except ShardwrightError as error:
            row |= {name: "no", f"{name}_reason": f"{error.code}: {error.what}"[:240]}
    return row


def _profile(family: str, folder: Path) -> dict[str, Any]:
    """Counts from headers beside the model's own. Values are whatever memory held: none is read."""
    import torch

    from shardwright.checkpoints.build import build_on_meta
    from shardwright.checkpoints.profile import profile_checkpoint

    if family in OWN:
        write(family, folder)
        model = build_on_meta(folder, torch.bfloat16)
        own = parameters(model)
    else:
        with torch.device("meta"):
            model = _class_of(family, folder)._from_config(tiny_config(family), dtype=torch.bfloat16)
        model.to_empty(device="cpu")
        model.tie_weights()
        model.save_pretrained(folder)
        own = sum(p.numel() for p in model.parameters())
    counts = profile_checkpoint(folder).parameters
    counted = counts.total + counts.mtp
    row = {"class": type(model).__name__, "parameters": own}
    if counted == own:
        return {**row, "profile": "exact"}
    return {**row, "profile": "no", "profile_reason": f"the headers give {counted:,}, the model has {own:,}"}


def _class_of(family: str, folder: Path) -> Any:
    """The family's language model; its token classifier where it has none."""
    import transformers
    from transformers.models.auto import modeling_auto

    from shardwright.checkpoints.build import model_class_for
    from shardwright.checkpoints.config import config_of
    from shardwright.schemas.errors import CheckpointError

    try:
        return model_class_for(config_of({"model_type": main_type(family)}, folder))
    except CheckpointError:
        return getattr(transformers, modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[main_type(family)])


def _capture(family: str, folder: Path) -> dict[str, Any]:
    """Capture every kind of layer; match; certify."""
    import torch

    from shardwright.agents.structure.canonical import canonical_graphs
    from shardwright.agents.structure.capture import EXPERTS_SUFFIX, capture_model
    from shardwright.agents.structure.certify import certify
    from shardwright.agents.structure.facts import observe
    from shardwright.agents.structure.propose import find_matches
    from shardwright.agents.structure.skeleton import find_layers
    from shardwright.checkpoints.build import build_on_meta
    from shardwright.checkpoints.profile import profile_checkpoint

    profile = profile_checkpoint(folder)
    model = build_on_meta(folder, torch.bfloat16)
    path, layers = find_layers(model, profile.shape.num_layers)
    facts = observe(model, [f"{path}.{i}" for i in range(len(layers))], (), profile.tied_weights)
    pairs = canonical_graphs(capture_model(model, profile.layer_kinds, profile.shape.num_layers))
    lost = {one.kind: one.reason[:160] for one, form in pairs if form is None}
    layers_lost = {kind: why for kind, why in lost.items() if not kind.endswith(EXPERTS_SUFFIX)}
    nodes = [node for _, form in pairs if form is not None for node in form.nodes]
    certificates = [(match, certify(match, facts)) for match in find_matches(pairs)]
    legal = Counter(match.pattern.name for match, certificate in certificates if certificate.legal)
    refused = {
        f"{match.pattern.name}: {o.name}": o.evidence[:160]
        for match, certificate in certificates
        for o in certificate.obligations
        if o.status != "proved" and not match.seam
    }
    # One that could not run is unknown, hence refused; one that ran and differed is a wrong match.
    failed = sum(
        o.name == "differential-test" and o.status == "refuted" for _, one in certificates for o in one.obligations
    )
    found = Counter(match.pattern.name for match, _ in certificates)
    targets = Counter(node.target for node in nodes if node.kind == "op")
    experts = "proved" if any(legal[name] for name in EXPERTS) else "one node" if targets["experts"] else "no"
    return {
        "graphs": {one.kind: one.capture for one, _ in pairs},
        "lost": lost,
        "capture": "yes" if not layers_lost else "no",
        "capture_reason": "; ".join(f"{kind}: {why}" for kind, why in sorted(layers_lost.items())),
        "experts": experts,
        "norms": found["rms_norm"] + sum(targets[op] for op in NORM_OPS),
        "activations": sum(found[name] for name in ("swiglu", *EXPERTS)) + sum(targets[op] for op in ACTIVATION_OPS),
        "found": dict(sorted(found.items())),
        "legal": dict(sorted(legal.items())),
        "refused": dict(sorted(refused.items())),
        "failed_differential": failed,
    }
