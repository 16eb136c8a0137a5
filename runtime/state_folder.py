"""The folder of a run's saves: which are whole, which belong to this plan, which stay.

``checkpoints/step-N/`` holds the sharded values and ``save.json`` (the manifest: hashes of the plan, size and SHA-256
of every file); ``checkpoints/latest`` names the newest for people. A folder has that name only when it is whole. A save
that is damaged later is passed over for the one before it, and ``set_aside`` keeps it as evidence.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.runtime import record
from shardwright.schemas.canonical import pretty_bytes, sha256_file, sha256_of
from shardwright.schemas.errors import RunError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import AdaptationPlan, PlanHashes

FOLDER, LATEST, MANIFEST, DAMAGED = "checkpoints", "latest", "save.json", ".damaged"
KEEP_SAVES = 3
"""So many newest saves stay: one that may be damaged, one to fall back to, one more."""
ROOM_SLACK_BYTES = 1 << 20
"""Metadata, manifest and random states of a save, beyond its tensors."""
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Found:
    """The newest whole save.

    Attributes:
        step: after which it was made.
        folder: where it lies.
        manifest: its ``save.json``.
        damaged: newer saves that are not whole, each with what was found.
    """

    step: int
    folder: Path
    manifest: dict[str, Any]
    damaged: tuple[tuple[Path, str], ...] = ()


def saves(run_dir: Path) -> Path:
    """Where a run keeps its saves."""
    return run_dir / FOLDER


def save_folders(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that bears a save's name, newest first."""
    root = saves(run_dir)
    found = [(STEP.fullmatch(entry.name), entry) for entry in root.iterdir()] if root.is_dir() else []
    return sorted(((int(match[1]), entry) for match, entry in found if match), reverse=True)


def training_sha256(plan: AdaptationPlan) -> str:
    """What a save's values depend on, whatever the mesh: checkpoint, data, recipe and targets of a plan."""
    decision = plan.decision.model_dump(mode="json")
    return sha256_of({key: decision[key] for key in ("checkpoint", "data", "recipe", "lora_targets")}, floats=False)


def find(run_dir: Path, hashes: PlanHashes) -> Found | None:
    """The newest whole save of this plan; ``None`` for a run without any.

    Raises:
        RunError: ``other-plan`` when it belongs to another plan; ``damaged-save`` when there are saves and none is
            whole: a run never starts silently from nothing.
    """
    damaged: list[tuple[Path, str]] = []
    for step, folder in save_folders(run_dir):
        try:
            manifest = read_manifest(folder)
        except RunError as error:
            damaged.append((folder, error.what))
            continue
        require_same_plan(manifest, hashes, folder)
        return Found(step, folder, manifest, tuple(damaged))
    if damaged:
        raise RunError(
            "damaged-save",
            "; ".join(f"{folder.name}: {what}" for folder, what in damaged[:3]),
            where=str(saves(run_dir)),
            next_action="no save of this run is whole: restore one from a backup, or start in a new --run-dir",
        )
    return None


def latest(run_dir: Path, hashes: PlanHashes) -> tuple[int, Path] | None:
    """Step and folder of :func:`find`."""
    found = find(run_dir, hashes)
    return None if found is None else (found.step, found.folder)


def final(run_dir: Path, plan: AdaptationPlan) -> Path:
    """The save of the last step, or of the one where early stop ended the run: the only one that an export may read.

    Raises:
        RunError: ``no-save``; ``not-final`` when the newest whole save is of an earlier step; as :func:`find`.
    """
    stopped = record.read(run_dir).stopped_at_step if (run_dir / record.FILE).is_file() else None
    wanted = plan.decision.recipe.schedule.steps if stopped is None else stopped
    found = find(run_dir, plan.hashes)
    if found is None:
        raise RunError("no-save", "the run has no save", where=str(run_dir), next_action="train first")
    if found.step != wanted:
        lost = "; ".join(f"{folder.name}: {what}" for folder, what in found.damaged)
        raise RunError(
            "not-final",
            f"the newest whole save is of step {found.step}, the run has {wanted} steps"
            + (f" ({lost})" if lost else ""),
            where=str(saves(run_dir)),
            next_action="`shardwright resume` trains the missing steps again",
        )
    return found.folder


def require_same_plan(manifest: dict[str, Any], hashes: PlanHashes, folder: Path) -> None:
    """Refuse a save that another decision made."""
    if manifest["hashes"]["decision"] != hashes.decision:
        raise RunError(
            "other-plan",
            f"the save belongs to decision {manifest['hashes']['decision'][:16]}…, this plan's is "
            f"{hashes.decision[:16]}…",
            where=str(folder),
            next_action="resume with the plan that made it, or give another --run-dir; `shardwright apply --from` "
            "carries a save over to a plan of the same training on another mesh",
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """A save's manifest, every file checked against it.

    Raises:
        RunError: ``damaged-save``.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        wrong = [line for name, kept in manifest["files"].items() if (line := _wrong(folder / name, kept))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"no readable {MANIFEST}: {error}") from error
    if wrong:
        raise _damaged(folder, "; ".join(wrong[:3]))
    return manifest


def _wrong(path: Path, kept: dict[str, Any]) -> str:
    size = path.stat().st_size if path.is_file() else -1
    if size != kept["bytes"]:
        return f"{path.name}: {kept['bytes']} bytes expected, {size} found"
    found = sha256_file(path)
    return "" if found == kept["sha256"] else f"{path.name}: {kept['sha256'][:16]}… expected, {found[:16]}… found"


def _damaged(folder: Path, what: str) -> RunError:
    return RunError(
        "damaged-save", what, where=str(folder), next_action="`shardwright resume` goes on from the save before it"
    )


def require_room(run_dir: Path, step: int, bytes_needed: int) -> None:
    """Refuse a save that cannot fit, before anything is written.

    Raises:
        RunError: ``disk-full``.
    """
    saves(run_dir).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(saves(run_dir)).free
    if bytes_needed + ROOM_SLACK_BYTES > free:
        raise disk_full(run_dir, step, f"it needs {bytes_needed + ROOM_SLACK_BYTES:,} bytes, {free:,} are free")


def disk_full(run_dir: Path, step: int, what: str) -> RunError:
    """The error for a save that could not be written."""
    older = [folder.name for _, folder in save_folders(run_dir)]
    kept = f"{', '.join(older)} stay as they are" if older else "there is no older one"
    return RunError(
        "disk-full",
        f"the save of step {step} could not be written: {what}; {kept}",
        where=str(saves(run_dir)),
        next_action="free some space there, then `shardwright resume`",
    )


def fresh(folder: Path) -> None:
    """An empty folder of that name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def commit(run_dir: Path, work: Path, step: int, facts: dict[str, Any]) -> Path:
    """Give a finished folder its manifest and its name, point at it, and let the oldest saves go."""
    files = {
        entry.name: {"bytes": entry.stat().st_size, "sha256": sha256_file(entry)} for entry in sorted(work.iterdir())
    }
    write_atomic(work / MANIFEST, pretty_bytes({"step": step, **facts, "files": files}))
    target = saves(run_dir) / f"step-{step}"
    if target.exists():
        shutil.rmtree(target)
    os.replace(work, target)
    point(run_dir, step)
    for _, folder in save_folders(run_dir)[KEEP_SAVES:]:
        shutil.rmtree(folder)
    return target


def point(run_dir: Path, step: int) -> None:
    """Write the newest save's name into ``latest``."""
    write_atomic(saves(run_dir) / LATEST, f"step-{step}\n".encode())


def set_aside(found: Found) -> tuple[str, ...]:
    """Rename damaged saves so that nothing takes them for whole; returns what was decided, a line each."""
    lines = []
    for folder, what in found.damaged:
        target = folder.with_name(folder.name + DAMAGED)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)
        lines.append(f"{folder.name} is damaged ({what}); kept as {target.name}, went on from {found.folder.name}")
    return tuple(lines)
