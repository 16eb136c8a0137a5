"""Build an example's folder whole or not at all, and verify it by hash afterwards.

Two kinds of output:

* **exact**: bytes that are the same on every machine; their hashes are committed in ``manifest.json`` and a
  build that gives others fails.
* **recorded**: bytes that depend on the machine (the standard library of the Python in use); their hashes are
  written to ``built.json`` at the build and verified against it afterwards.

``built.json`` also keys the build by its sources, so an edited recipe or builder is built again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.schemas.canonical import pretty_bytes, sha256_file, sha256_of
from shardwright.schemas.errors import CheckpointError, ShardwrightError, UsageError
from shardwright.schemas.files import write_atomic

RECORD = "built.json"
RECIPE = "recipe.yaml"
MANIFEST = "manifest.json"
ROOT = Path(__file__).resolve().parents[2]

log = logging.getLogger("examples")


def file_hashes(folder: Path) -> dict[str, str]:
    """Relative name → SHA-256 of every file but the record, sorted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def source_key(source: Path, identity: dict[str, str]) -> str:
    """Hash of what a build is made from: the builders, the recipe and ``identity``.

    Args:
        source: the example's folder in the repository.
        identity: further inputs, for example the Python version.
    """
    files = [*sorted(source.glob("*.py")), *sorted((source.parent / "common").glob("*.py")), source / RECIPE]
    hashes = {f"{path.parent.name}/{path.name}": sha256_file(path) for path in files}
    return sha256_of({"files": hashes, "identity": identity})


def is_verified(out: Path, source: Path, identity: dict[str, str]) -> bool:
    """Whether ``out`` is a whole build of these sources with the bytes that its record and the manifest name."""
    try:
        record = json.loads((out / RECORD).read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    if record["sources"] != source_key(source, identity):
        log.info("%s: made from other sources", out)
        return False
    exact = json.loads((source / MANIFEST).read_bytes())["exact"]
    if {name: record["files"].get(name) for name in exact} != exact:
        log.info("%s: its record does not agree with %s", out, MANIFEST)
        return False
    found = file_hashes(out)
    if found != record["files"]:
        changed = sorted(name for name in {*found, *record["files"]} if found.get(name) != record["files"].get(name))
        log.info("%s: changed since it was built: %s", out, ", ".join(changed))
        return False
    return True


def build(out: Path, source: Path, make: Callable[[Path], None], identity: dict[str, str]) -> bool:
    """Make ``out`` unless a verified build is there.

    Builders that run at once wait for each other; a killed build leaves only ``.<name>.partial`` behind, which
    the next one clears.

    Args:
        out: the folder to make.
        source: the example's folder: ``manifest.json``, ``recipe.yaml`` and the builder.
        make: fills an empty folder.
        identity: further inputs of the build (see ``source_key``).

    Returns:
        True if it was built, False if the build there was verified.

    Raises:
        UsageError: ``not-a-build``, ``out`` holds something that no build made.
        CheckpointError: ``manifest-mismatch``, the built bytes are not those of the manifest.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.parent / f".{out.name}.lock"):
        if is_verified(out, source, identity):
            return False
        if out.exists() and any(out.iterdir()) and not (out / RECORD).exists():
            raise UsageError(
                "not-a-build",
                "the folder is not empty and was not made by this builder",
                where=str(out),
                next_action="give --out a new or empty folder",
            )
        partial = out.parent / f".{out.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        shutil.copyfile(source / RECIPE, partial / RECIPE)
        files = file_hashes(partial)
        _require_manifest(files, source / MANIFEST)
        record = {"sources": source_key(source, identity), "identity": identity, "files": files}
        write_atomic(partial / RECORD, pretty_bytes(record))
        shutil.rmtree(out, ignore_errors=True)
        os.replace(partial, out)
        return True


def _require_manifest(files: dict[str, str], manifest: Path) -> None:
    expected = json.loads(manifest.read_bytes())
    named = {*expected["exact"], *expected["recorded"], RECIPE}
    wrong = sorted(name for name, sha256 in expected["exact"].items() if files.get(name) != sha256)
    strays = sorted(set(files) - named)
    if wrong or strays:
        raise CheckpointError(
            "manifest-mismatch",
            f"built files differ from the manifest: {wrong or 'none'}; files it does not name: {strays or 'none'}",
            where=str(manifest),
            next_action="a builder was changed on purpose: run it with --write-manifest and review the difference",
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def main(source: Path, make: Callable[[Path], None], identity: dict[str, str], recorded: tuple[str, ...] = ()) -> int:
    """The command line of a builder: ``build.py [--out DIR] [--write-manifest]``.

    Args:
        source: the example's folder.
        make: fills an empty folder.
        identity: further inputs of the build.
        recorded: outputs that depend on the machine; all others are exact.

    Returns:
        The exit code: 0, or the error's.
    """
    parser = argparse.ArgumentParser(prog=f"{source.name}/build.py", description=f"Build the example {source.name}.")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "examples" / source.name)
    parser.add_argument("--write-manifest", action="store_true", help="rewrite manifest.json from a fresh build")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    started = time.monotonic()
    try:
        if arguments.write_manifest:
            write_manifest(source, make, recorded, arguments.out)
        built = build(arguments.out, source, make, identity)
    except ShardwrightError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    log.info("%s: %s in %.1f s", arguments.out, "built" if built else "verified", time.monotonic() - started)
    return 0


def write_manifest(source: Path, make: Callable[[Path], None], recorded: tuple[str, ...], out: Path) -> None:
    """Rewrite ``manifest.json`` from a throw-away build beside ``out``."""
    scratch = out.parent / f".{out.name}.manifest"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    make(scratch)
    exact = {name: sha256 for name, sha256 in file_hashes(scratch).items() if name not in recorded}
    write_atomic(source / MANIFEST, pretty_bytes({"exact": exact, "recorded": sorted(recorded)}))
    shutil.rmtree(scratch)
