"""``shardwright inspect``: what is in a checkpoint, from its headers alone."""

from __future__ import annotations

import typer

from shardwright.schemas.words import plural
from shardwright.workflows.cli.common import (
    CheckpointOrAddress,
    OfflineOption,
    PlainOutput,
    PlainOutputOption,
    facts,
    put,
    put_json,
)


def register(app: typer.Typer) -> None:
    app.command()(inspect)


def inspect(
    checkpoint: CheckpointOrAddress, offline: OfflineOption = False, output: PlainOutputOption = PlainOutput.text
) -> None:
    """Show what is in a checkpoint: exact counts by component, layer kinds, packing. No weight is read.

    Beside a folder, ``hf://org/model@revision`` is read: its configuration and headers by range reads.
    """
    from shardwright.checkpoints.profile import profile_checkpoint
    from shardwright.workflows.checkpoint_folders import checkpoint_folder
    from shardwright.workflows.report.blocks import Heading, Table
    from shardwright.workflows.report.markdown import render
    from shardwright.workflows.report.units import count, size

    profile = profile_checkpoint(checkpoint_folder(checkpoint, offline=offline))
    if output is PlainOutput.json:
        put_json(profile.model_dump(mode="json"))
        return
    parameters = profile.parameters
    rows = [
        ("architecture", f"{profile.architecture} ({profile.model_type})"),
        ("files", f"{profile.files} with {profile.tensors:,} tensors, {size(profile.stored_bytes)}"),
        ("parameters", f"{parameters.total:,} ({count(parameters.total)})"),
        ("active a token", f"{parameters.active.all:,} ({parameters.active.without_embeddings:,} without embeddings)"),
        ("dtypes", ", ".join(f"{name} × {n:,}" for name, n in sorted(profile.dtypes.items()))),
        ("packing", ", ".join(f"{p.format} × {p.tensors:,}" for p in profile.packing)),
        ("fingerprint", profile.fingerprint.digest),
    ]
    components = tuple(
        (name, f"{n:,}")
        for name, n in sorted(parameters.by_component.items(), key=lambda item: (-item[1], item[0]))
        if n
    )
    kinds = tuple(
        (kind.name, str(len(kind.layer_indices)), f"{kind.parameters:,}", f"{kind.expert_parameters:,}")
        for kind in profile.layer_kinds
    )
    if output is PlainOutput.markdown:
        document = (
            Heading(profile.architecture, 1),
            Table(("", ""), tuple(rows)),
            Table(("component", "parameters"), components, numeric=(1,)),
            Table(("layer kind", "layers", "parameters a layer", "of them experts"), kinds, numeric=(1, 2, 3)),
        )
        put(render(document))
        return
    for name, number in components:
        rows.append((f"  {name}", number))
    for kind, layers, number, experts in kinds:
        rows.append((f"  {kind}", f"{plural(int(layers), 'layer')} of {number} parameters, {experts} of them experts"))
    rows += [("warning", warning) for warning in profile.warnings]
    put(facts(rows))
