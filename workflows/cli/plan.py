"""``shardwright plan``: the agents run, the plan is saved, nothing is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.schemas.words import plural
from shardwright.workflows.advice import Advice
from shardwright.workflows.cli.common import (
    DEFAULT_TRIALS,
    AdviceOption,
    CalibrationOption,
    CheckpointOrAddress,
    ClusterOption,
    EvidenceOption,
    LlmConfigOption,
    LlmLimitOption,
    LlmModelOption,
    LlmReplayOption,
    LlmUrlOption,
    LoadProfileOption,
    NoCacheOption,
    OfflineOption,
    PlainOutput,
    PlainOutputOption,
    RecipeOption,
    TimeBudgetOption,
    TimeLimitOption,
    TrialsOption,
    TrustOption,
    demand_place,
    limits_of,
    note,
    put,
)


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    checkpoint: CheckpointOrAddress,
    cluster: ClusterOption,
    recipe: RecipeOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="Plan file to write.")] = Path("plan.json"),
    report: Annotated[
        Path | None, typer.Option("--report", help="Also write the plan's report: one HTML file, self-contained.")
    ] = None,
    trials: TrialsOption = DEFAULT_TRIALS,
    calibration: CalibrationOption = None,
    load_profile: LoadProfileOption = None,
    evidence: EvidenceOption = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Also consider what the runtime does not run; apply refuses such a plan.")
    ] = False,
    time_budget: TimeBudgetOption = None,
    time_limit: TimeLimitOption = None,
    llm: AdviceOption = Advice.off,
    llm_url: LlmUrlOption = "",
    llm_model: LlmModelOption = "",
    llm_replay: LlmReplayOption = None,
    llm_config: LlmConfigOption = None,
    llm_limit: LlmLimitOption = None,
    offline: OfflineOption = False,
    trust_remote_code: TrustOption = None,
    no_cache: NoCacheOption = False,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Make a plan: structure, fusions, strategy search. The same input gives the same bytes."""
    import tempfile

    from shardwright.workflows.advising import keep_recording, llm_request
    from shardwright.workflows.cache import default_cache
    from shardwright.workflows.cli.progress import Progress
    from shardwright.workflows.drive import drive
    from shardwright.workflows.llm_options import llm_options
    from shardwright.workflows.plan_calls import unmeasured
    from shardwright.workflows.prepare import fresh_request
    from shardwright.workflows.review.terminal import plan_text
    from shardwright.workflows.search_options import search_request

    for file in filter(None, (out, report)):
        demand_place(file)
    limits = limits_of(time_limit)
    options = llm_options(llm_config, llm_limit or ())
    asked, words = llm_request(llm, url=llm_url, model=llm_model, replay=llm_replay, offline=offline, options=options)
    if words:
        note(words)
    search = search_request(calibration, load_profile, explore, time_budget)
    request = fresh_request(
        "plan",
        checkpoint,
        cluster,
        recipe,
        trials,
        search=search,
        offline=offline,
        llm=asked,
        trust_remote_code=trust_remote_code,
        evidence=evidence,
        tell=note,
    )
    with tempfile.TemporaryDirectory(prefix="shardwright-plan-") as folder:
        cache = None if no_cache else default_cache()
        made = drive(request, Path(folder), listener=Progress(), limits=limits, cache=cache).plan
        kept = keep_recording(Path(folder), out)
    made.save(out)
    note(f"wrote {out}")
    if report is not None:
        from shardwright.schemas.files import write_atomic
        from shardwright.workflows.report.html import html_plan

        write_atomic(report, html_plan(made).encode())
        note(f"wrote {report}")
    if kept is not None:
        note(f"wrote {kept}: --llm-replay plays it again")
    if output is PlainOutput.json:
        put(made.to_bytes().decode())
    elif output is PlainOutput.markdown:
        from shardwright.workflows.report.markdown import markdown_plan

        put(markdown_plan(made))
    else:
        put(plan_text(made))
        if fusions := unmeasured(made, evidence or ()):
            measure = f"`shardwright kernels bench --plan {out} --evidence FILE` times them on {cluster}'s device"
            note(f"{plural(fusions, 'fusion')} at sizes that nothing has measured: {measure}; --list says which")
        note(f"next: shardwright review {out}")
