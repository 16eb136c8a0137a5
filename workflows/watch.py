"""Adapt whatever checkpoints stand in a folder, each once for each state of the world, under a lock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwright.schemas.base import Model
from shardwright.schemas.canonical import sha256_file, sha256_of
from shardwright.schemas.errors import ExitCode, ShardwrightError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.policy import Policy
from shardwright.workflows.cache import NodeCache
from shardwright.workflows.drive import drive
from shardwright.workflows.environment import tool_versions
from shardwright.workflows.evidence import pins
from shardwright.workflows.lock import RunLock
from shardwright.workflows.prepare import fresh_request
from shardwright.workflows.search_options import search_request, stages_for
from shardwright.workflows.stages import Stages

DRIVER = Path("/proc/driver/nvidia/version")


class Seen(Model):
    """What happened to one checkpoint in one state of the world."""

    checkpoint: str
    """Name of its folder."""
    key: str
    """Hash of its files, the inputs, versions, driver and kernels."""
    status: Literal["adapted", "unchanged", "waiting", "denied", "failed"]
    code: str = ""
    what: str = ""
    next: str = ""
    run_dir: str = ""

    @property
    def exit_code(self) -> ExitCode:
        return {
            "waiting": ExitCode.NEEDS_APPROVAL,
            "denied": ExitCode.POLICY_DENIED,
            "failed": ExitCode.ERROR,
        }.get(self.status, ExitCode.OK)


@dataclass(frozen=True)
class Watch:
    """What to look at and what to do with it."""

    folder: Path
    out: Path
    cluster: str
    recipe: Path
    policy: Policy
    trials: int
    stages: Stages
    kernels: Callable[[], dict[str, str]]
    """Operator → hash of its sources."""
    cache: NodeCache | None = None
    """What other runs on this machine have worked out."""
    calibration: Path | None = None
    """Measured curves that plans are priced by."""
    evidence: tuple[Path, ...] = ()
    """The user's own measured times."""

    def world(self) -> dict[str, str]:
        """Everything beside a checkpoint that an adaptation depends on.

        Raises:
            ShardwrightError: recipe, cluster, calibration or a file of times cannot be read.
        """
        cluster = self.stages.load_cluster(self.cluster)
        search_request(self.calibration, None)
        pins(list(self.evidence), cluster)
        driver = sha256_file(DRIVER) if DRIVER.is_file() else "none"
        return {
            "recipe": sha256_file(self.recipe),
            "cluster": sha256_of(cluster),
            "policy": sha256_of(self.policy),
            "trials": str(self.trials),
            "driver": driver,
            **({} if self.calibration is None else {"calibration": sha256_file(self.calibration)}),
            **{f"evidence.{place}": sha256_file(path) for place, path in enumerate(self.evidence)},
            **{f"version.{name}": version for name, version in tool_versions().items()},
            **{f"kernel.{name}": sha256 for name, sha256 in self.kernels().items()},
        }


def kernel_hashes() -> dict[str, str]:
    """Hash of every registered operator's sources."""
    from shardwright.kernels.registry import OPERATORS, source_sha256

    return {name: source_sha256(name) for name in sorted(OPERATORS)}


def checkpoints(folder: Path) -> tuple[Path, ...]:
    """Sub-folders that hold, or should hold, a checkpoint, in the order of their names. Hidden ones are left alone."""
    return tuple(sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))


def pass_over(watch: Watch, tell: Callable[[Seen], None]) -> tuple[Seen, ...]:
    """Look at every checkpoint once; adapt what is new, changed, or was left by a dead run.

    One broken checkpoint does not stop the others. What failed or was denied is not tried again until something in
    its key changes; what waits for a person is.

    Raises:
        RunError: ``locked``: another watch works on this output folder.
        ShardwrightError: recipe, cluster, calibration or a file of times cannot be read: that stops all.
    """
    with RunLock(watch.out / ".watch"):
        world = watch.world()
        found = []
        for folder in checkpoints(watch.folder):
            seen = _one(watch, folder, world)
            found.append(seen)
            tell(seen)
        return tuple(found)


def _one(watch: Watch, folder: Path, world: dict[str, str]) -> Seen:
    key = sha256_of({**world, "checkpoint": folder.name, "files": _files(folder)})
    record = watch.out / ".watch" / f"{sha256_of(folder.name)[:16]}.json"
    before = _recorded(record)
    if before is not None and before.key == key and before.status != "waiting":
        status = "unchanged" if before.status in ("adapted", "unchanged") else before.status
        return before.model_copy(update={"status": status})
    seen = _adapt(watch, folder, key)
    write_atomic(record, json.dumps(seen.model_dump(), sort_keys=True).encode())
    return seen


def _adapt(watch: Watch, folder: Path, key: str) -> Seen:
    run_dir = watch.out / f"{folder.name}-{key[:12]}"
    try:
        search = search_request(watch.calibration, None)
        request = fresh_request(
            "adapt",
            folder,
            watch.cluster,
            watch.recipe,
            watch.trials,
            watch.stages,
            search=search,
            evidence=list(watch.evidence),
        )
        stages = watch.stages if search is None else stages_for(request)
        drive(request, run_dir, stages=stages, policy=watch.policy, cache=watch.cache)
    except ShardwrightError as error:
        status = {ExitCode.NEEDS_APPROVAL: "waiting", ExitCode.POLICY_DENIED: "denied"}.get(error.exit_code, "failed")
        return Seen.model_validate(
            {
                "checkpoint": folder.name,
                "key": key,
                "status": status,
                "code": error.code,
                "what": error.what,
                "next": error.next_action,
                "run_dir": str(run_dir),
            }
        )
    return Seen(checkpoint=folder.name, key=key, status="adapted", run_dir=str(run_dir))


def _files(folder: Path) -> dict[str, str]:
    """Name → size and time of change of every file: what says that a checkpoint is another one without reading it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            facts = path.stat()
            found[str(path.relative_to(folder))] = f"{facts.st_size} {facts.st_mtime_ns}"
    return found


def _recorded(path: Path) -> Seen | None:
    if not path.is_file():
        return None
    return Seen.model_validate_json(path.read_bytes())


def worst(found: tuple[Seen, ...]) -> ExitCode:
    """The exit code of a pass: a failure before a denial before one that waits."""
    codes = {seen.exit_code for seen in found}
    for code in (ExitCode.ERROR, ExitCode.POLICY_DENIED, ExitCode.NEEDS_APPROVAL):
        if code in codes:
            return code
    return ExitCode.OK
