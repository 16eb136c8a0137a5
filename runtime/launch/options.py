"""Where and how a run's workers are started; kept beside the run, so that ``resume`` uses the same engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationError

from shardwright.runtime.launch.registry import NAMES, engine, engines
from shardwright.schemas.base import CountInt, Model, PositiveInt
from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.errors import UsageError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.validation import explain, parse_yaml

FILE = "launch_options.json"
COMMON = frozenset({"engine", "max_restarts", "preflight"})
"""What every engine reads; the rest is for those that name it in their ``Engine.options``."""


def _registered(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}")
    return name


class LaunchOptions(Model):
    """What an engine is told beyond the plan. None of it changes what is computed."""

    engine: Annotated[str, AfterValidator(_registered)] = "local"
    max_restarts: CountInt = 3
    """How often killed workers are started again from the newest save."""
    preflight: bool = False
    """Test versions, devices, network, clocks and disks on all ranks before weights are read."""
    partition: str = ""
    """Slurm: the partition; empty for the default one."""
    account: str = ""
    qos: str = ""
    time_limit: str = ""
    """Slurm: ``HH:MM:SS``; empty for the partition's own."""
    extra: tuple[str, ...] = ()
    """Slurm: further ``#SBATCH`` options, as they are."""
    setup: tuple[str, ...] = ()
    """Shell lines before the workers start: modules, virtual environments."""
    address: str = ""
    """Ray: the cluster's address; empty for one that is found or started here."""
    image: str = ""
    """Kubernetes, SkyPilot: a container image with this program in it."""
    namespace: str = "default"
    runtime: str = "torch-distributed"
    """Kubernetes: the ClusterTrainingRuntime that a TrainJob refers to."""
    volume_claim: str = "shardwright"
    """Kubernetes: the persistent volume claim with checkpoint, data and runs, mounted at their common parent."""
    accelerator: str = ""
    """SkyPilot: for example ``H200``; empty takes the plan's device name."""
    port: PositiveInt = 29500
    """Kubernetes: the rendezvous port of the first pod."""


def parse_options(text: str) -> LaunchOptions:
    """An engine's name, or a YAML file with these options.

    Raises:
        UsageError: ``unreadable``, ``invalid``, ``unknown-engine``, ``option-not-read``.
    """
    if text in NAMES:
        return LaunchOptions.model_validate({"engine": text})
    if not Path(text).is_file():
        raise UsageError(
            "unknown-engine",
            f"{text!r} is neither an engine ({', '.join(NAMES)}) nor a file",
            where="--launch",
            next_action="name one of these, or a YAML file with launch options",
        )
    options = parse_yaml(LaunchOptions, Path(text).read_bytes(), where=text, error=UsageError)
    unread = sorted(options.model_fields_set - COMMON - engine(options.engine).options)
    if unread:
        raise UsageError(
            "option-not-read",
            f"{options.engine} does not read {', '.join(unread)}",
            where=text,
            next_action="take it out; an engine that reads it: "
            + (", ".join(one.name for one in engines() if one.options.issuperset(unread)) or "none"),
        )
    return options


def write_options(run_dir: Path, options: LaunchOptions) -> None:
    """Keep the options beside the run."""
    write_atomic(run_dir / FILE, pretty_bytes(options))


def read_options(run_dir: Path) -> LaunchOptions:
    """The run's options; the defaults where none were kept.

    Raises:
        UsageError: ``launch-options``.
    """
    path = run_dir / FILE
    if not path.is_file():
        return LaunchOptions()
    try:
        return LaunchOptions.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(
            "launch-options", explain(error), where=str(path), next_action="correct or remove the file"
        ) from error
