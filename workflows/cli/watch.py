"""``shardwright watch``: adapt every checkpoint that appears in a folder, or whose world has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.schemas.words import plural
from shardwright.workflows.cli.common import (
    DEFAULT_TRIALS,
    CalibrationOption,
    ClusterOption,
    EvidenceOption,
    PlainOutput,
    PlainOutputOption,
    RecipeOption,
    TrialsOption,
    note,
    put,
    put_json,
)


def register(app: typer.Typer) -> None:
    app.command()(watch)


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder whose sub-folders are checkpoints.")],
    cluster: ClusterOption,
    recipe: RecipeOption,
    policy: Annotated[Path, typer.Option("--policy", help="Policy that decides about every plan.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the runs.")] = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="Look once and end; for cron and CI.")] = False,
    interval: Annotated[int, typer.Option("--interval", min=1, help="Seconds between two looks.")] = 60,
    trials: TrialsOption = DEFAULT_TRIALS,
    calibration: CalibrationOption = None,
    evidence: EvidenceOption = None,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Adapt each checkpoint of a folder once; again when anything it depends on changes.

    That is its files, the recipe, cluster and policy, the driver, libraries, kernels, and files of measurements. Only
    one watch works on an output folder. A run that died is taken up again. With --once the exit code is 1 where a
    checkpoint failed, 4 where the policy denied one, 3 where one waits for a person.
    """
    import time

    from shardwright.schemas.errors import UsageError
    from shardwright.workflows.cache import default_cache
    from shardwright.workflows.evidence import pins
    from shardwright.workflows.policy import load_policy
    from shardwright.workflows.stages import Stages
    from shardwright.workflows.watch import Seen, Watch, kernel_hashes, pass_over, worst

    if not folder.is_dir():
        raise UsageError("no-folder", "no such folder", where=str(folder), next_action="name a folder of checkpoints")
    work = Watch(
        folder,
        out,
        cluster,
        recipe,
        load_policy(policy),
        trials,
        Stages(),
        kernel_hashes,
        default_cache(),
        calibration,
        tuple(evidence or ()),
    )

    for words in pins(evidence, work.stages.load_cluster(cluster))[1]:
        note(words)

    def tell(seen: Seen) -> None:
        mark = {"failed": "✗", "denied": "✗", "waiting": "‖"}.get(seen.status, "✓")
        note(f"{mark} {seen.checkpoint}: {seen.status}{f' [{seen.code}] {seen.what}' if seen.code else ''}")

    while True:
        found = pass_over(work, tell)
        if once:
            break
        time.sleep(interval)
    if output is PlainOutput.json:
        put_json([seen.model_dump() for seen in found])
    else:
        from shardwright.workflows.report.blocks import Heading, Table
        from shardwright.workflows.report.markdown import render
        from shardwright.workflows.review.terminal import document_text

        rows = tuple((s.checkpoint, s.status, s.code or "–", s.what or "–", s.next or "–") for s in found)
        document = (
            Heading(f"{plural(len(found), 'checkpoint')} in {folder}", 3),
            Table(("checkpoint", "status", "code", "what", "next"), rows),
        )
        put(render(document) if output is PlainOutput.markdown else document_text(document))
    raise typer.Exit(int(worst(found)))
