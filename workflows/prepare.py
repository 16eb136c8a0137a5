"""From command-line words to a request: paths made absolute, inputs pinned, data found by its hash."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwright.schemas.approval import copy_log, find_approval, verify_approval
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import StalePlanError, UsageError
from shardwright.schemas.plan import AdaptationPlan, load_plan, parse_plan
from shardwright.workflows.approvals import demand_other_approver, demand_signature
from shardwright.workflows.artifacts import ArtifactStore
from shardwright.workflows.checkpoint_folders import checkpoint_folder, demand_weights, local_checkpoint
from shardwright.workflows.context import AdaptState
from shardwright.workflows.evidence import pins
from shardwright.workflows.remote_code import require_trust
from shardwright.workflows.request import (
    Goal,
    LlmRequest,
    Request,
    SearchRequest,
    cluster_sha256,
    default_run_dir,
    file_sha256,
    load_recipe,
    load_request,
    request_path,
)
from shardwright.workflows.stages import Stages
from shardwright.workflows.whole_log import demand_whole_log, head_seen


@dataclass(frozen=True)
class Prepared:
    """A run that starts from an approved plan."""

    request: Request
    run_dir: Path
    state: AdaptState


def fresh_request(
    goal: Goal,
    checkpoint: Path,
    cluster: str,
    recipe: Path,
    trials: int,
    stages: Stages | None = None,
    search: SearchRequest | None = None,
    offline: bool = False,
    llm: LlmRequest | None = None,
    trust_remote_code: str | None = None,
    evidence: list[Path] | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> Request:
    """The request of ``plan`` and ``adapt``; recipe and cluster are read here, so their faults show at once.

    Args:
        checkpoint: a folder, or ``hf://org/model@revision``, of which the headers are fetched.
        search: how the search goes beyond its defaults.
        offline: refuse what another machine would have to answer.
        llm: which language model is asked.
        trust_remote_code: hash of the checkpoint's own code, which may then run.
        evidence: files of measured times of the user's own.
        tell: told what counts in each of them, and what does not.

    Raises:
        CheckpointError, RecipeError, ClusterError: an input is missing or wrong.
        UsageError: ``trust-not-needed``; a file of measured times as ``workflows.evidence.pins``.
    """
    read = load_recipe(recipe)
    folder = checkpoint_folder(checkpoint, offline=offline)
    if trust_remote_code is not None:
        require_trust(folder, trust_remote_code)
    spec = (stages or Stages()).load_cluster(cluster)
    times, told = pins(evidence, spec)
    for words in told:
        tell(words)
    as_path = Path(cluster)
    return Request(
        goal=goal,
        checkpoint=str(folder),
        data_root=str(recipe.resolve().parent),
        recipe=str(recipe.resolve()),
        recipe_sha256=file_sha256(recipe),
        cluster=str(as_path.resolve()) if as_path.is_file() else cluster,
        cluster_sha256=cluster_sha256(spec),
        trials=trials,
        name=_name(read.name),
        search=search,
        evidence=times,
        llm=llm,
        trust_remote_code=trust_remote_code,
    )


def approved_start(
    plan_file: Path,
    checkpoint: Path,
    log: Path,
    data_root: Path | None,
    run_dir: Path | None,
    other_approver: bool = False,
    approvals_head: str | None = None,
) -> Prepared:
    """The request and first state of ``apply``; the approvals log is copied into the run's folder.

    Args:
        approvals_head: hash of a line that the log must have.

    Raises:
        PlanError: the plan's bytes are not what they claim to be.
        ApprovalError: not approved, or not this plan.
        StalePlanError: ``data``: the data files are not those of the plan.
    """
    plan = load_plan(plan_file)
    approval = find_approval(log, plan)
    verify_approval(plan, approval)
    demand_signature(approval)
    if other_approver:
        demand_other_approver(log, plan)
    folder = local_checkpoint(checkpoint)
    demand_weights(folder)
    request = Request(
        goal="apply",
        checkpoint=str(folder),
        data_root=str(find_data(plan, plan_file, folder, data_root)),
        name=_name(plan.decision.recipe.name),
        plan_sha256=file_sha256(plan_file),
        trust_remote_code=None if plan.decision.remote_code is None else plan.decision.remote_code.sha256,
    )
    target = run_dir or default_run_dir(request)
    if request_path(target).exists() and load_request(target).goal != "apply":
        raise UsageError(
            "other-request",
            "this folder belongs to an `adapt` run",
            where=str(target),
            next_action="start that `adapt` command again, or name another --run-dir",
        )
    demand_whole_log(log, head_seen(target, plan), approvals_head)
    if log.resolve() != (target / "approvals.jsonl").resolve():
        copy_log(log, target / "approvals.jsonl")
    plan.save(target / "plan.json")
    return Prepared(request, target, _state(target, plan, approval.sha256))


def recorded_start(run_dir: Path, request: Request) -> AdaptState | None:
    """The first state of an ``apply`` run from what its folder holds; ``None`` for other runs."""
    if request.goal != "apply":
        return None
    plan = load_plan(run_dir / "plan.json")
    return _state(run_dir, plan, find_approval(run_dir / "approvals.jsonl", plan).sha256)


def _state(run_dir: Path, plan: AdaptationPlan, approval: str) -> AdaptState:
    plan.save(run_dir / "plans" / f"{plan.hashes.decision[:16]}-{plan.hashes.evidence[:16]}.json")
    sha256 = ArtifactStore(run_dir).put_bytes(plan.to_bytes())
    parse_plan(plan.to_bytes(), where=str(run_dir / "plan.json"))
    return {"plan": sha256, "approval": approval}


def find_data(plan: AdaptationPlan, plan_file: Path, checkpoint: Path, given: Path | None) -> Path:
    """The folder whose data files have the hashes that the plan pins.

    Looked for in ``given`` alone, or else: where the plan was made, beside the plan, beside and in the checkpoint.

    Raises:
        StalePlanError: ``data``: files are there, with other contents.
        UsageError: ``no-data``: no such files anywhere.
    """
    places = [given] if given is not None else _data_places(plan_file, checkpoint)
    spec, pins = plan.decision.recipe.data, plan.decision.data
    wrong = []
    for place in places:
        files = [(place / spec.train, pins.train_sha256), (place / spec.held_out, pins.held_out_sha256)]
        if not all(path.is_file() for path, _ in files):
            continue
        changed = [str(path) for path, sha256 in files if sha256_file(path) != sha256]
        if not changed:
            return place.resolve()
        wrong += changed
    if wrong:
        raise StalePlanError(
            "data",
            f"data files differ from those the plan was made for: {', '.join(wrong)}",
            where=f"decision.data of {plan_file}",
            next_action="restore the files, name their folder with --data-root, or plan again",
        )
    raise UsageError(
        "no-data",
        f"{spec.train} and {spec.held_out} are in none of: {', '.join(map(str, places))}",
        where="--data-root",
        next_action="name the folder that the recipe's data paths are relative to",
    )


def _data_places(plan_file: Path, checkpoint: Path) -> list[Path]:
    beside = plan_file.resolve().parent
    places = [Path(load_request(beside).data_root)] if request_path(beside).is_file() else []
    return [*places, beside, checkpoint.parent, checkpoint, Path.cwd()]


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"
