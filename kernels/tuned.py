"""Launch choices as data: one file a device, looked up by operators at call time. Nothing is tuned here.

How an operator uses it, in its ``configs.py`` (no torch is imported by this module)::

    @dataclass(frozen=True)
    class Tile:                      # integers and booleans only
        BN: int
        BK: int
        warps: int

    def gate_up(value_bytes: int, rows: int, experts: int) -> Tile:
        default = Tile(BN=128, BK=64, warps=8)
        return tuned.lookup("grouped_lora_mlp", "gate_up", tuned.bucket(R=rows, E=experts), default)

``lookup(op, kernel, bucket, default)`` gives the default with the fields that the device's file names for
exactly this key; the default itself where the file has no such entry, where the entry was chosen for other
sources of the operator, or where there is no device. Each distinct outcome is recorded (``decisions``), so a
default is a recorded fallback. Answers are cached: a repeated call costs about a microsecond.

``override`` puts a choice in force inside a ``with`` block: that is how ``kernels.tune`` tries candidates
without knowing an operator's launches. Files: ``kernels/tuned/DEVICE.json`` (``schemas.tuned.TunedFile``),
written by ``shardwright kernels tune`` on a GPU. An operator's entries are part of ``registry.source_sha256``,
so a plan pins them with the code, and evidence is bound to them.

An operator that calls ``lookup`` must list ``tuned.py`` in ``registry.OPERATORS[...].borrowed``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import ValidationError

from shardwright.kernels.admitted import apart
from shardwright.kernels.evidence import shape_bucket
from shardwright.schemas.errors import KernelError
from shardwright.schemas.tuned import TunedFile

FOLDER = Path(__file__).parent / "tuned"

Choice = TypeVar("Choice")
Source = Literal["file", "no-device", "no-file", "no-entry", "stale"]


@dataclass(frozen=True)
class TunedDecision:
    """Where one launch choice came from."""

    op: str
    kernel: str
    bucket: str
    source: Source
    choice: Any


_decisions: dict[tuple[str, str, str], TunedDecision] = {}
_answers: dict[tuple[str, str, str, Any], Any] = {}
_overrides: dict[tuple[str, str], Any] = {}
_forced: list[str | None] = []
_files: dict[str, TunedFile | None] = {}
_found_device: list[str | None] = []


def bucket(**sizes: int) -> str:
    """The key of a shape: rows (T, R) rounded up to a power of two, other sizes exact, names sorted."""
    return shape_bucket(sizes)


def lookup(op: str, kernel: str, bucket: str, default: Choice) -> Choice:
    """The launch choice of one kernel at one shape bucket on the device in use.

    Args:
        op: registered operator name.
        kernel: the kernel's name inside the operator.
        bucket: what ``bucket`` gives for the sizes that the choice depends on.
        default: the choice in code: a frozen dataclass of integers and booleans.

    Raises:
        KernelError: ``tuned-mismatch`` where the file names a field that the default does not have, or has a
            value of another kind; ``corrupt-tuned-file``.
    """
    if _overrides and (op, kernel) in _overrides:
        return cast(Choice, _overrides[op, kernel])
    key = (op, kernel, bucket, default)
    if key not in _answers:
        source, found = _find(op, kernel, bucket)
        choice = default if found is None else _applied(op, kernel, bucket, default, found)
        _answers[key] = choice
        _decisions[op, kernel, bucket] = TunedDecision(op, kernel, bucket, source, choice)
    return cast(Choice, _answers[key])


def _find(op: str, kernel: str, bucket: str) -> tuple[Source, Mapping[str, int | bool] | None]:
    name = device()
    if name is None:
        return "no-device", None
    file = read(name)
    if file is None:
        return "no-file", None
    for entry in file.entries:
        if (entry.op, entry.kernel, entry.bucket) == (op, kernel, bucket):
            from shardwright.kernels.registry import code_sha256

            return ("file", entry.choice) if entry.code_sha256 == code_sha256(op) else ("stale", None)
    return "no-entry", None


def _applied(op: str, kernel: str, bucket: str, default: Choice, found: Mapping[str, int | bool]) -> Choice:
    fields: dict[str, Any] = {f.name: getattr(default, f.name) for f in dataclasses.fields(cast(Any, default))}
    for name, value in found.items():
        if name not in fields or type(value) is not type(fields[name]):
            raise KernelError(
                "tuned-mismatch",
                f"{name} = {value!r} is no field of {type(default).__name__}",
                where=f"{op}/{kernel}/{bucket}",
                next_action="run `shardwright kernels tune` for this operator again",
            )
    return cast(Choice, dataclasses.replace(cast(Any, default), **found))


def device() -> str | None:
    """File name of the device in use (``nvidia-h200``); ``None`` without CUDA. Never imports torch."""
    if _forced:
        return _forced[-1]
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return None
    if not _found_device:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        _found_device.append(None if name is None else slug(name))
    return _found_device[0]


def slug(device_name: str) -> str:
    """``NVIDIA H200`` becomes ``nvidia-h200``."""
    return device_name.lower().replace(" ", "-")


def path(name: str) -> Path:
    """The file of a device."""
    return FOLDER / f"{name}.json"


def read(name: str) -> TunedFile | None:
    """A device's file, read once; ``None`` where there is none.

    Raises:
        KernelError: ``corrupt-tuned-file``.
    """
    if name not in _files:
        _files[name] = parse(path(name)) if path(name).is_file() else None
    return _files[name]


def parse(file: Path) -> TunedFile:
    """Read one file.

    Raises:
        KernelError: ``corrupt-tuned-file``, naming what is wrong.
    """
    try:
        return TunedFile.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise KernelError(
            "corrupt-tuned-file",
            str(error.errors()[0]["msg"]),
            where=str(file),
            next_action="restore the file, or write it again with `shardwright kernels tune`",
        ) from error


def decisions() -> tuple[TunedDecision, ...]:
    """Every distinct choice made so far in this process and where it came from, sorted."""
    return tuple(_decisions[key] for key in sorted(_decisions))


def forget() -> None:
    """Drop everything cached: after a file was written, or between tests."""
    for store in (_answers, _decisions, _files, _found_device):
        store.clear()


@contextmanager
def override(op: str, kernel: str, choice: Any) -> Iterator[None]:
    """Put one choice in force for all buckets of a kernel. For tuning and tests; not for workers."""
    before = _overrides.get((op, kernel))
    _overrides[op, kernel] = choice
    try:
        with apart():
            yield
    finally:
        if before is None:
            del _overrides[op, kernel]
        else:
            _overrides[op, kernel] = before


@contextmanager
def on(name: str | None) -> Iterator[None]:
    """Take a device's choices without having it (compiling ahead), or none at all."""
    _forced.append(name)
    _answers.clear()
    try:
        with apart():
            yield
    finally:
        _forced.pop()
        _answers.clear()
