"""``shardwright cluster detect|init``: cluster.yaml from this machine, and a recipe to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import note, put

app = typer.Typer(
    help="Describe the machines: cluster.yaml, and a recipe.yaml to begin with.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RanksOption = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Ranks. [default: devices, or cores at most 2]")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


@app.command()
def detect(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. [default: stdout]")] = None,
    ranks: RanksOption = None,
    nvidia_smi: Annotated[
        Path | None, typer.Option("--nvidia-smi", help="Recorded output of nvidia-smi: plan for another machine.")
    ] = None,
    slurm: Annotated[
        Path | None, typer.Option("--slurm", help="Recorded output of sinfo: all nodes of a partition.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Write a cluster file for this machine; every figure says whether it was found or assumed."""
    from shardwright.workflows.detect import cluster_yaml, recorded_yaml, write_new

    text = recorded_yaml(nvidia_smi, slurm) if nvidia_smi or slurm else cluster_yaml(ranks)
    if out is None:
        put(text)
        return
    write_new(out, text, force)
    note(f"wrote {out}")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write both files.")] = Path("."),
    ranks: RanksOption = None,
    force: ForceOption = False,
) -> None:
    """Write cluster.yaml for this machine and a commented recipe.yaml."""
    from shardwright.workflows.detect import cluster_yaml, recipe_yaml, refuse_existing, write_new

    files = {folder / "cluster.yaml": cluster_yaml(ranks), folder / "recipe.yaml": recipe_yaml()}
    refuse_existing(files, force)
    for path, text in files.items():
        write_new(path, text, force)
        note(f"wrote {path}")
