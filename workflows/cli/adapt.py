"""``shardwright adapt``: the whole flow, from a checkpoint to a verified adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.advice import Advice
from shardwright.workflows.cli.common import (
    DEFAULT_TRIALS,
    AdviceOption,
    CalibrationOption,
    CheckpointOrAddress,
    ClusterOption,
    EvidenceOption,
    HeadlessOption,
    LaunchOption,
    LlmConfigOption,
    LlmLimitOption,
    LlmModelOption,
    LlmReplayOption,
    LlmUrlOption,
    LoadProfileOption,
    NoCacheOption,
    OfflineOption,
    Output,
    OutputOption,
    PolicyOption,
    PreflightOption,
    RecipeOption,
    ReportsOption,
    TimeBudgetOption,
    TimeLimitOption,
    TrialsOption,
    TrustOption,
    limits_of,
    note,
)


def register(app: typer.Typer) -> None:
    app.command()(adapt)


def adapt(
    checkpoint: CheckpointOrAddress,
    cluster: ClusterOption,
    recipe: RecipeOption,
    headless: HeadlessOption = False,
    policy: PolicyOption = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the run. [default: runs/NAME-HASH of the inputs]")
    ] = None,
    trials: TrialsOption = DEFAULT_TRIALS,
    calibration: CalibrationOption = None,
    load_profile: LoadProfileOption = None,
    evidence: EvidenceOption = None,
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
    launch: LaunchOption = None,
    preflight: PreflightOption = False,
    output: OutputOption = Output.text,
    reports: ReportsOption = None,
) -> None:
    """Plan, review, train, check, export, report.

    Pauses for review (exit 3 off a terminal), or lets a policy decide with --headless --policy. Interrupted or killed,
    the same command goes on from where it was.
    """
    from shardwright.workflows.advising import llm_request
    from shardwright.workflows.cache import default_cache
    from shardwright.workflows.cli.finish import deciders, finishing
    from shardwright.workflows.cli.launching import keep_options
    from shardwright.workflows.drive import drive
    from shardwright.workflows.llm_options import llm_options
    from shardwright.workflows.prepare import fresh_request
    from shardwright.workflows.request import default_run_dir
    from shardwright.workflows.search_options import search_request

    with finishing(output, reports) as run:
        limits, cache = limits_of(time_limit), None if no_cache else default_cache()
        options = llm_options(llm_config, llm_limit or ())
        asked, words = llm_request(
            llm, url=llm_url, model=llm_model, replay=llm_replay, offline=offline, options=options
        )
        if words:
            note(words)
        rules, reviewer = deciders(headless, policy)
        search = search_request(calibration, load_profile, time_budget_s=time_budget)
        request = fresh_request(
            "adapt",
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
        folder = run_dir or default_run_dir(request)
        keep_options(folder, launch, preflight)
        listener = run.begin(folder)
        drive(request, folder, listener=listener, policy=rules, reviewer=reviewer, limits=limits, cache=cache)
