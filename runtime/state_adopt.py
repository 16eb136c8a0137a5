"""Carry the newest save of a run over to a plan of the same training on another mesh.

Saves hold whole parameters, so any mesh can read them; a plan's hash covers its mesh, so the carried save gets the new
plan's hashes and says where it came from. Checkpoint, data, recipe and targets must be the same: else both plans are
named and nothing is written.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from shardwright.runtime import record
from shardwright.runtime.state_folder import MANIFEST, find, fresh, point, saves, training_sha256
from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.errors import RunError, StalePlanError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import AdaptationPlan, load_plan

METRICS = "metrics.jsonl"


def adopt(old_run: Path, new_run: Path) -> str:
    """Copy the newest whole save, with the metrics and checks up to it, into a fresh run directory.

    Args:
        old_run: a run with saves, not going on.
        new_run: holds ``plan.json`` of the new plan; has no saves yet.

    Returns:
        What was done, for people.

    Raises:
        StalePlanError: ``other-training``, naming what differs and both hashes.
        RunError: ``no-save``, ``run-dir-in-use``, as :func:`find`.
    """
    old, new = load_plan(old_run / "plan.json"), load_plan(new_run / "plan.json")
    require_same_training(old, new, str(old_run))
    found = find(old_run, old.hashes)
    if found is None:
        raise RunError("no-save", "that run has no save", where=str(old_run), next_action="start without --from")
    target = saves(new_run) / found.folder.name
    if saves(new_run).is_dir() and any(saves(new_run).glob("step-*")):
        if (target / MANIFEST).is_file() and found.manifest["hashes"] != new.hashes.model_dump():
            return f"{new_run} already goes on from {found.folder.name}"
        raise RunError(
            "run-dir-in-use",
            "the new run directory has saves of its own",
            where=str(saves(new_run)),
            next_action="leave --from out to go on with them, or name another --run-dir",
        )
    work = saves(new_run) / f".{found.folder.name}.tmp"
    fresh(work)
    for name in found.manifest["files"]:
        shutil.copyfile(found.folder / name, work / name)
    came = {"hashes": found.manifest["hashes"], "mesh": found.manifest["mesh"], "run_dir": str(old_run.resolve())}
    manifest = {**found.manifest, "hashes": new.hashes.model_dump(), "carried_from": came}
    write_atomic(work / MANIFEST, pretty_bytes(manifest))
    _carry_record(old_run, new_run, old, new, found.step)
    os.replace(work, target)
    point(new_run, found.step)
    meshes = f"{old.decision.strategy.mesh.text()} → {new.decision.strategy.mesh.text()}"
    return f"carried {found.folder.name} over from {old_run} ({meshes})"


def require_same_training(old: AdaptationPlan, new: AdaptationPlan, where: str) -> None:
    """Only the mesh may differ; weights' values are compared where both plans pin them.

    Raises:
        StalePlanError: ``other-training``.
    """
    pins = [plan.decision.weights for plan in (old, new)]
    swapped = all(pin is not None and pin.files for pin in pins) and pins[0] != pins[1]
    if training_sha256(old) == training_sha256(new) and not swapped:
        return
    sections = ("checkpoint", *(("weights",) if swapped else ()), "data", "recipe", "lora_targets")
    differ = [name for name in sections if getattr(old.decision, name) != getattr(new.decision, name)]
    raise StalePlanError(
        "other-training",
        f"decision {old.hashes.decision[:16]}… made the saves, decision {new.hashes.decision[:16]}… wants to go on; "
        f"they differ in {', '.join(differ)}",
        where=where,
        next_action="plan again with the same checkpoint, data and recipe; only the mesh may change",
    )


def _carry_record(old_run: Path, new_run: Path, old: AdaptationPlan, new: AdaptationPlan, step: int) -> None:
    """Steps, evaluations and checks up to the save, under the new plan's hashes."""
    lines = (old_run / METRICS).read_bytes().splitlines(keepends=True) if (old_run / METRICS).is_file() else []
    whole = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
    write_atomic(new_run / METRICS, b"".join(whole))
    before = record.read(old_run)
    told = f"before the change of mesh ({old.decision.strategy.mesh.text()}): "
    note = (
        f"step {step} was reached on {old.decision.strategy.mesh.text()} by decision {old.hashes.decision[:16]}…, "
        f"from there on {new.decision.strategy.mesh.text()}"
    )
    record.write(
        new_run,
        record.start(new, before.device).model_copy(
            update={
                "steps": tuple(one for one in before.steps if one.step <= step),
                "evaluations": tuple(one for one in before.evaluations if one.step <= step),
                "checks": tuple(
                    check.model_copy(update={"evidence": told + check.evidence})
                    for check in before.checks
                    if check.stage != "export"
                ),
                "load": before.load,
                "warnings": (*before.warnings, note),
            }
        ),
    )
