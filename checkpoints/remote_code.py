"""A checkpoint's own modelling code, run only where its hash was named.

The code is every ``.py`` file under the checkpoint's folder; its hash covers their names and bytes, so a changed, a
missing and an additional file each give another. Bytes are read once: what was hashed is what is copied, and what is
imported is the copy, as a package of its own. Nothing here runs in a process that has not called :func:`trust`; a plan
is made in a subprocess that does (:func:`in_own_process`), and each worker does before it builds the model.
"""

from __future__ import annotations

import atexit
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from shardwright.schemas.canonical import sha256_hex, sha256_of
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.plan import RemoteCode

T = TypeVar("T")
SUFFIX = ".py"
IMPORT_ERRORS = (
    ImportError, AttributeError, SyntaxError, NameError, TypeError, ValueError, LookupError, RuntimeError, OSError,
)  # fmt: skip
"""What foreign code raises while it is imported."""
MAX_FILES, MAX_BYTES = 200, 8 << 20
"""Of all code together; a modelling file has some tens of KiB."""


@dataclass(frozen=True)
class _Trusted:
    code: RemoteCode
    package: str
    copy: Path


_trusted: dict[Path, _Trusted] = {}


def read_code(folder: Path) -> tuple[RemoteCode, dict[str, bytes]]:
    """The code of a checkpoint: its hash, and the bytes that the hash is of; nothing runs.

    Raises:
        CheckpointError: ``remote-code-size``, ``remote-code-missing``.
    """
    files: dict[str, bytes] = {}
    total = 0
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        if not path.is_file():
            continue
        total += path.stat().st_size
        if len(files) >= MAX_FILES or total > MAX_BYTES:
            what = f"more than {MAX_FILES} code files or {MAX_BYTES} bytes of code"
            raise _error("remote-code-size", what, folder, "this is no folder of a checkpoint alone; name that one")
        files[path.relative_to(folder).as_posix()] = path.read_bytes()
    if not files:
        raise _error("remote-code-missing", f"no {SUFFIX} file", folder, "leave --trust-remote-code out")
    hashes = {name: sha256_hex(data) for name, data in files.items()}
    return RemoteCode(sha256=sha256_of(hashes, floats=False), files=hashes), files


def has_code(folder: Path) -> bool:
    """Whether a checkpoint brings any code."""
    return next(folder.rglob(f"*{SUFFIX}"), None) is not None


def require_code(folder: Path, sha256: str) -> tuple[RemoteCode, dict[str, bytes]]:
    """As :func:`read_code`, if it has the hash that was named.

    Raises:
        CheckpointError: ``remote-code-changed``.
    """
    code, files = read_code(folder)
    if code.sha256 != sha256:
        raise _error(
            "remote-code-changed",
            f"its {len(files)} code files hash to {code.sha256}, trusted is {sha256}: {', '.join(sorted(files)[:8])}",
            folder,
            "read the code; then give --trust-remote-code the hash that was found, or restore the files",
        )
    return code, files


def trust(folder: Path, sha256: str) -> RemoteCode:
    """Allow this process to run a checkpoint's code, which is copied to a folder that only this process uses.

    Raises:
        CheckpointError: as :func:`require_code`.
    """
    folder = folder.resolve()
    code, files = require_code(folder, sha256)
    if folder in _trusted and _trusted[folder].code == code:
        return code
    root = Path(tempfile.mkdtemp(prefix="shardwright-code-"))
    for name, data in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    package = f"shardwright_remote_{code.sha256[:16]}"
    module = ModuleType(package)
    module.__path__ = [str(root)]
    for name in [one for one in sys.modules if one == package or one.startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = module
    importlib.invalidate_caches()
    _trusted[folder] = _Trusted(code, package, root)
    return code


def release() -> None:
    """Remove this process's copies and trust nothing any more; processes that leave without a shutdown call it."""
    for one in _trusted.values():
        shutil.rmtree(one.copy, ignore_errors=True)
    _trusted.clear()


atexit.register(release)


def is_trusted(folder: Path) -> bool:
    """Whether this process may run the code of a checkpoint."""
    return folder.resolve() in _trusted


def remote_class(folder: Path, auto_map: Any, auto_class: str) -> Any:
    """The class that ``auto_map`` of config.json names for an Auto class, from the trusted copy.

    Raises:
        CheckpointError: ``remote-code-untrusted``, ``remote-code-missing``, ``remote-code-elsewhere``,
            ``remote-code-failed``.
    """
    if not is_trusted(folder):
        raise _error(
            "remote-code-untrusted", "its code is not trusted here", folder, "give --trust-remote-code its hash"
        )
    named = auto_map.get(auto_class) if isinstance(auto_map, dict) else None
    if not isinstance(named, str) or named.count(".") < 1:
        raise _error(
            "remote-code-missing",
            f"auto_map names no {auto_class}",
            folder,
            "the checkpoint's config.json must name it",
        )
    if "--" in named:
        what = f"auto_map takes {auto_class} from another repository: {named[:200]}"
        raise _error("remote-code-elsewhere", what, folder, "copy that code into the checkpoint and name it there")
    module, _, name = named.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{_trusted[folder.resolve()].package}.{module}"), name)
    except IMPORT_ERRORS as error:
        what = f"{named} could not be imported: {type(error).__name__}: {error}"[:500]
        raise _error(
            "remote-code-failed", what, folder, "install what the code needs, or report it upstream"
        ) from error


def in_own_process(folder: Path, sha256: str, work: Callable[..., T], *arguments: Any) -> T:
    """``work(*arguments)`` in a fresh process that trusts the checkpoint's code; this one never does.

    Args:
        work: a function of a module; arguments and result are pickled.

    Raises:
        CheckpointError: as :func:`trust`; whatever ``work`` raises.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_trusting, folder, sha256, work, *arguments).result()


def _trusting(folder: Path, sha256: str, work: Callable[..., T], *arguments: Any) -> T:
    try:
        trust(folder, sha256)
        return work(*arguments)
    finally:
        release()


def _error(code: str, what: str, folder: Path, action: str) -> CheckpointError:
    return CheckpointError(code, what, where=str(folder), next_action=action)
