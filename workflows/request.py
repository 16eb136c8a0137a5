"""What the user asked for: the inputs of a run, pinned by content, and the run folder they map to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from shardwright.schemas.base import Identifier, Model, Positive, PositiveInt, Sha256, added
from shardwright.schemas.canonical import pretty_bytes, sha256_hex, sha256_of
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.errors import RecipeError, RunError, UsageError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.llm import LlmEndpoint, LlmMode
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.validation import explain, parse_yaml
from shardwright.workflows.texts import read_text

Goal = Literal["plan", "adapt", "apply"]


class SearchRequest(Model):
    """How the search goes beyond its defaults. Files are pinned by hash."""

    calibration: str = ""
    calibration_sha256: Sha256 | None = None
    load_profile: str = ""
    load_profile_sha256: Sha256 | None = None
    explore: bool = False
    time_budget_s: Positive | None = None


class LlmRequest(Model):
    """Which language model is asked, or which recording of one is played again."""

    mode: LlmMode
    endpoint: LlmEndpoint
    replay: str = ""
    replay_sha256: Sha256 | None = None


class EvidencePin(Model):
    """A file of the user's own measured times."""

    path: str
    sha256: Sha256


class Request(Model):
    """One run's inputs. Paths are absolute; what they hold is pinned by hash."""

    schema_version: Literal[1] = 1
    goal: Goal
    checkpoint: str
    data_root: str
    """The folder that the recipe's data paths are relative to."""
    recipe: str = ""
    recipe_sha256: Sha256 | None = None
    cluster: str = ""
    cluster_sha256: Sha256 | None = None
    trials: PositiveInt = 64
    name: Identifier = "run"
    plan_sha256: Sha256 | None = None
    """Of the plan file's bytes, where the run starts from a plan (``apply``)."""
    search: SearchRequest | None = added(None)
    evidence: tuple[EvidencePin, ...] = added(())
    """Measured times to rank fusions by, beside those that come with the package; a later file goes before."""
    llm: LlmRequest | None = added(None)
    """``None``: rules alone."""
    trust_remote_code: Sha256 | None = added(None)
    """Hash of the checkpoint's own code, where it may run."""

    def key(self) -> str:
        return sha256_of(self)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file.

    Raises:
        RecipeError: ``missing``, ``unreadable`` or ``invalid``, naming the fields.
    """
    if not path.is_file():
        raise RecipeError(
            "missing",
            "no such recipe file",
            where=str(path),
            next_action="write one with `shardwright cluster init`, or name an existing one with --recipe",
        )
    return parse_yaml(Recipe, read_text(path, RecipeError), where=str(path), error=RecipeError)


def default_run_dir(request: Request) -> Path:
    """``runs/<name>-<key>``: the same command always means the same folder."""
    return Path("runs") / f"{request.name}-{request.key()[:12]}"


def request_path(run_dir: Path) -> Path:
    return run_dir / "request.json"


def claim(run_dir: Path, request: Request) -> None:
    """Record the request in a new run folder, or check that the folder belongs to it.

    Raises:
        UsageError: ``other-request`` naming each field that differs.
    """
    path = request_path(run_dir)
    if not path.exists():
        write_atomic(path, pretty_bytes(request))
        return
    recorded = load_request(run_dir)
    if recorded == request:
        return
    changed = ", ".join(differences(recorded.model_dump(mode="json"), request.model_dump(mode="json")))
    raise UsageError(
        "other-request",
        f"this run folder belongs to another request ({changed})",
        where=str(run_dir),
        next_action="name another --run-dir, or leave it out so that the folder follows the inputs",
    )


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """``field: old → new`` for each value of two requests that differs, nested ones by their whole name."""
    if isinstance(before, dict) or isinstance(now, dict):
        old, new = before or {}, now or {}
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif isinstance(before, list) or isinstance(now, list):
        for place, (old, new) in enumerate(zip_longest(before or (), now or ())):
            yield from differences(old, new, f"{name}[{place}]")
    elif _shown(before) != _shown(now):
        yield f"{name}: {_shown(before)} → {_shown(now)}"


def _shown(value: object) -> str:
    if value is None or value is False or value == "":
        return "none"
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 and text.isalnum() else text


def load_request(run_dir: Path) -> Request:
    """The request of an existing run folder.

    Raises:
        RunError: ``no-run`` or ``damaged-request``.
    """
    path = request_path(run_dir)
    if not path.is_file():
        raise RunError(
            "no-run", "not a run folder", where=str(path), next_action="name the folder that `shardwright adapt` made"
        )
    try:
        return Request.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RunError(
            "damaged-request", explain(error), where=str(path), next_action="start the run again in another folder"
        ) from error


def require_run(run_dir: Path) -> Request:
    """The request of a run folder.

    Raises:
        RunError: ``no-run``.
    """
    if not run_dir.is_dir():
        raise RunError("no-run", "no such folder", where=str(run_dir), next_action="name the folder of a run")
    return load_request(run_dir)


def file_sha256(path: Path) -> str:
    return sha256_hex(path.read_bytes())


def cluster_sha256(cluster: ClusterSpec) -> str:
    """The hash that a request pins its cluster by."""
    return sha256_of(cluster)
