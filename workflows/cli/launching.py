"""How the verbs that train hand their launch options to the runtime: through the run folder."""

from __future__ import annotations

from pathlib import Path

from shardwright.workflows.cli.common import put


def keep_options(run_dir: Path, launch: str | None, preflight: bool) -> None:
    """Write the options that were given; a folder without any runs locally, one with earlier ones keeps them.

    Raises:
        UsageError: ``unknown-engine``, ``invalid``.
    """
    from shardwright.runtime.launch.options import parse_options, read_options, write_options

    if launch is None and not preflight:
        return
    options = parse_options(launch) if launch is not None else read_options(run_dir)
    write_options(run_dir, options.model_copy(update={"preflight": preflight or options.preflight}))


def show_job(run_dir: Path, checkpoint: Path, data_root: Path) -> None:
    """Print what would be submitted for a run folder."""
    from shardwright.runtime.launch.engines import render
    from shardwright.runtime.launch.job import Job
    from shardwright.runtime.launch.options import read_options

    job = Job.of(run_dir / "plan.json", checkpoint, data_root, run_dir / "approvals.jsonl", run_dir)
    texts = render(job, read_options(run_dir))
    for name, text in texts.items():
        if len(texts) > 1:
            put(f"# {name}")
        put(text)
