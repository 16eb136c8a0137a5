"""The user's own files of measured times: looked at when they are named, kept with the run, judged for the cluster.

A time counts for the device that it was measured on and for the operator's sources that it was measured with. What does
not count is named and ignored; a file of which nothing could count is refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shardwright.schemas.canonical import sha256_hex
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.errors import RunError, UsageError
from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.ops import MeasuredTime
from shardwright.schemas.plan import EvidenceFile
from shardwright.schemas.words import plural
from shardwright.workflows.artifacts import ArtifactStore
from shardwright.workflows.context import AdaptState
from shardwright.workflows.report.units import short
from shardwright.workflows.request import EvidencePin

OPTION = "--evidence"
Line = tuple[int, MeasuredTime]
"""Number of a line, from 1, and what stands there."""


@dataclass(frozen=True)
class Judged:
    """A file as a plan for one device takes it."""

    file: EvidenceFile
    stale_lines: dict[str, tuple[int, ...]]
    """Operator → numbers of the lines that were measured at other sources."""
    devices: tuple[str, ...]
    """Every device that the file names."""


def pins(paths: list[Path] | None, cluster: ClusterSpec) -> tuple[tuple[EvidencePin, ...], tuple[str, ...]]:
    """Look at the files that a command names; their hashes, and what to tell of each.

    Raises:
        UsageError: ``missing``, ``not-a-file``, ``not-evidence`` with the line, ``other-device``, ``named-twice``.
    """
    found: list[EvidencePin] = []
    told: list[str] = []
    judged: list[tuple[Path, Judged]] = []
    for path in paths or ():
        data = _bytes(path)
        one = judge(data, cluster.device.name, where=str(path))
        if one.file.sha256 in {pin.sha256 for pin in found}:
            said = "a file with the same content was named before"
            raise UsageError("named-twice", said, where=str(path), next_action="name each file once")
        found.append(EvidencePin(path=str(path.resolve()), sha256=one.file.sha256))
        judged.append((path, one))
        told += words(path, one, cluster.device.name)
    if judged and not any(one.file.times or one.file.stale for _, one in judged):
        devices = sorted({name for _, one in judged for name in one.devices})
        raise UsageError(
            "other-device",
            f"no time of {cluster.device.name}, the device of {cluster.name}; measured there: {', '.join(devices)}",
            where=", ".join(str(path) for path, _ in judged),
            next_action=f"measure on that device: `shardwright kernels bench {OPTION} FILE`; if it is the same device, "
            "give the cluster file the name that stands in the lines",
        )
    return tuple(found), tuple(told)


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise UsageError("not-a-file", "this is a folder", where=str(path), next_action=f"name a file with {OPTION}")
    if not path.exists():
        raise UsageError(
            "missing",
            "no such file",
            where=str(path),
            next_action=f"name another with {OPTION}, or write it with `shardwright kernels bench {OPTION} {path}`",
        )
    return path.read_bytes()


def lines_of(data: bytes, *, where: str) -> tuple[Line, ...]:
    """Every measured time of a file, with the number of its line.

    Raises:
        UsageError: ``not-evidence``.
    """
    advice = f"name a file that `shardwright kernels bench {OPTION} FILE` wrote"
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        byte = f"byte {data[problem.start]:#04x} at offset {problem.start}"
        raise UsageError("not-evidence", f"not UTF-8 text: {byte}", where=where, next_action=advice) from problem
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append((number, MeasuredTime.model_validate_json(line)))
        except ValidationError as problem:
            first = problem.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise UsageError(
                "not-evidence",
                f"not a measured time: {f'{field}: ' if field else ''}{first['msg']}",
                where=f"{where}:{number}",
                next_action=f"{advice}, or remove the line",
            ) from problem
    if not found:
        raise UsageError("not-evidence", "the file holds no measured time", where=where, next_action=advice)
    return tuple(found)


def judge(data: bytes, device: str, *, where: str) -> Judged:
    """Which times of a file count on a device, with the sources that the installed operators have.

    Raises:
        UsageError: ``not-evidence``.
    """
    from shardwright.kernels.registry import OPERATORS, source_sha256

    lines = lines_of(data, where=where)
    mine = [(number, time) for number, time in lines if time.device == device]
    present = {op: source_sha256(op) if op in OPERATORS else "" for op in {time.op for _, time in mine}}
    counting = {_case(time) for _, time in mine if time.source_sha256 == present[time.op]}
    stale: dict[str, tuple[int, ...]] = {}
    for number, time in mine:
        if time.source_sha256 != present[time.op] and _case(time) not in counting:
            stale[time.op] = (*stale.get(time.op, ()), number)
    file = EvidenceFile(
        sha256=sha256_hex(data),
        times=len(counting),
        stale={op: len(numbers) for op, numbers in sorted(stale.items())},
        elsewhere=len(lines) - len(mine),
    )
    return Judged(file, stale, tuple(sorted({time.device for _, time in lines})))


def _case(time: MeasuredTime) -> tuple[str, ...]:
    return (time.op, time.provider, time.pass_name, time.shape_bucket, time.dtype)


def words(path: Path, judged: Judged, device: str) -> tuple[str, ...]:
    """What a command says of a file as soon as it has looked at it: what counts, and by line what does not."""
    from shardwright.kernels.registry import OPERATORS

    file = judged.file
    told = [f"{OPTION} {path} ({short(file.sha256)}): {plural(file.times, 'time')} of {device}"]
    for op, numbers in sorted(judged.stale_lines.items()):
        at = f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}"
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        because = f"no operator {op} is installed here"
        if op in OPERATORS:
            because = (
                f"{op} was measured with other sources or launch choices than are installed here; "
                f"time it again with `shardwright kernels bench {op} {OPTION} {path}`"
            )
        told.append(f"  ignored: {at}{more}: {because}")
    if file.elsewhere:
        others = ", ".join(name for name in judged.devices if name != device)
        told.append(f"  ignored: {plural(file.elsewhere, 'time')} of {others}")
    return tuple(told)


def keep(store: ArtifactStore, asked: tuple[EvidencePin, ...], cluster: ClusterSpec) -> str:
    """Put the files into the run, where they stay as they are; the artifact that says what counts in each.

    Raises:
        RunError: ``changed-input``: a file is not the one that the run began with, and the run does not hold that yet.
        UsageError: ``missing``, ``not-a-file``, ``not-evidence``.
    """
    for pin in asked:
        if store.path(pin.sha256).is_file():
            continue
        data = _bytes(Path(pin.path))
        if sha256_hex(data) != pin.sha256:
            raise RunError(
                "changed-input",
                "the file is not the one that this run began with",
                where=pin.path,
                next_action="restore it, or start a new run with the file as it is now",
            )
        store.put_bytes(data)
    device = cluster.device.name
    return store.put(tuple(judge(store.get_bytes(pin.sha256), device, where=pin.path).file for pin in asked))


def own_files(store: ArtifactStore, state: AdaptState) -> tuple[Path, ...]:
    """The run's own copies of the files, hashes verified, in the order in which they were named."""
    if "evidence" not in state:
        return ()
    files = store.get(state["evidence"], tuple[EvidenceFile, ...])
    for file in files:
        store.get_bytes(file.sha256)
    return tuple(store.path(file.sha256) for file in files)


def behind(proposals: tuple[FusionProposal, ...]) -> Counter[str]:
    """SHA-256 of a file → how many proposals it gave a time to."""
    return Counter(
        sha256
        for proposal in proposals
        for sha256 in {name for v in proposal.variants if v.gain is not None for name in v.gain.evidence}
    )


def believed(files: tuple[EvidenceFile, ...], proposals: tuple[FusionProposal, ...], device: str) -> tuple[str, ...]:
    """One sentence a file: what of it was believed, what it decided, and what was ignored."""
    used = behind(proposals)
    told = []
    for file in files:
        said = f"Evidence file {short(file.sha256)}: {plural(file.times, 'time')} of {device} believed"
        if file.times and used[file.sha256]:
            said += f", which rank {plural(used[file.sha256], 'proposal')}"
        elif file.times:
            said += (
                ", none of them at a size and format of this model, "
                f"whose own `shardwright kernels bench --plan PLAN {OPTION} FILE` times"
            )
        ignored = [f"{count:,} of {op}, measured with other sources" for op, count in sorted(file.stale.items())]
        ignored += [f"{file.elsewhere:,} of other devices"] if file.elsewhere else []
        told.append(f"{said}; ignored: {'; '.join(ignored)}." if ignored else f"{said}.")
    return tuple(told)
