"""``hf://org/model@revision``: a checkpoint's configuration and headers by range reads; no weight is fetched.

What arrives is a folder in Hugging Face layout whose weight files are holes behind their headers, so that everything
that reads headers works on it as on a full copy, with the same fingerprint. A marker keeps anyone from reading zeros
as weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoints.config import CONFIG_FILE, MAX_CONFIG_BYTES
from shardwright.checkpoints.fingerprint import TOKENIZER_FILES
from shardwright.checkpoints.headers import MAX_HEADER_BYTES
from shardwright.checkpoints.index import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE, read_index
from shardwright.checkpoints.marker import HEADERS_ONLY
from shardwright.schemas.errors import CheckpointError

SCHEME = "hf://"
_ADDRESS = re.compile(
    r"hf://(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[A-Za-z0-9][\w.-]{0,250}))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_TOKENIZER_BYTES = 256 << 20
_FIRST_BYTES = 256 << 10
"""Read at first from each weight file: the header of a usual shard, and no more than 25 MB for 96 of them."""
_CONNECTIONS = 8


@dataclass(frozen=True)
class HubAddress:
    """One repository at one revision."""

    repo: str
    revision: str

    def text(self) -> str:
        return f"{SCHEME}{self.repo}@{self.revision}"


def resolve_checkpoint(checkpoint: Path, *, cache: Path | None = None, endpoint: str | None = None) -> Path:
    """A local folder for a checkpoint that may be named by address.

    Args:
        checkpoint: a folder, or an address (a path type may have folded its two slashes into one).
        cache: where fetched headers are kept; by default ``shardwright/hub`` in the user's cache folder.

    Raises:
        CheckpointError: as :func:`fetch_headers`.
    """
    text = str(checkpoint)
    if not text.startswith("hf:/"):
        return Path(checkpoint)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    address = SCHEME + text.removeprefix("hf:").lstrip("/")
    return fetch_headers(address, cache or home / "shardwright" / "hub", endpoint=endpoint)


def parse_address(text: str) -> HubAddress:
    """``hf://org/model`` or ``hf://org/model@revision``; without a revision ``main`` is meant.

    Raises:
        CheckpointError: ``bad-address``.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or ".." in text or "--" in text:
        raise CheckpointError(
            "bad-address",
            "expected hf://org/model or hf://org/model@revision",
            where=text[:300],
            next_action="correct the address, or give a local folder",
        )
    return HubAddress(match["repo"], match["revision"] or "main")


def fetch_headers(text: str, cache: Path, *, endpoint: str | None = None) -> Path:
    """Fetch config.json, index, tokenizer files and weight-file headers of an address.

    Args:
        text: the address.
        cache: where folders of fetched headers are kept, one for each commit; one that is there is used again.
        endpoint: base URL of the hub; by default that of huggingface_hub (``HF_ENDPOINT``).

    Returns:
        The folder ``cache/org--model/commit``.

    Raises:
        CheckpointError: ``bad-address``, ``hub-unreachable``, ``not-on-hub``, ``missing-config``, ``missing-weights``,
            ``missing-shard``, ``truncated-shard``, ``corrupt-header``, ``corrupt-index``, ``unsafe-path``.
    """
    address = parse_address(text)
    source = _Source(address, endpoint)
    folder = Path(cache) / address.repo.replace("/", "--") / source.commit
    if (folder / HEADERS_ONLY).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".fetching-", dir=folder.parent))
    try:
        _fill(partial, source)
        facts = {"address": address.text(), "commit": source.commit}
        (partial / HEADERS_ONLY).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _fill(folder: Path, source: _Source) -> None:
    """Copy the small files whole and the weight files' headers."""
    if CONFIG_FILE not in source.sizes:
        raise source.error("missing-config", "the repository has no config.json", "give a repository in this layout")
    small = [(CONFIG_FILE, MAX_CONFIG_BYTES), (INDEX_FILE, MAX_INDEX_BYTES)]
    small += [(name, _MAX_TOKENIZER_BYTES) for name in TOKENIZER_FILES]
    for name, limit in small:
        if name not in source.sizes:
            continue
        size = source.sizes[name]
        if size > limit:
            raise source.error("corrupt-config", f"{name} has {size} bytes, more than {limit}", "check the repository")
        (folder / name).write_bytes(source.read(name, 0, size))
    if (folder / INDEX_FILE).is_file():
        files = sorted(set(read_index(folder).values()))
    elif SINGLE_FILE in source.sizes:
        files = [SINGLE_FILE]
    else:
        raise source.error("missing-weights", "the repository has no safetensors weights", "give one that has them")
    for name in files:
        if name not in source.sizes:
            raise source.error("missing-shard", f"the index names {name}; the repository has no such file", "try later")
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        for done in [pool.submit(_header, folder, source, name) for name in files]:
            done.result()


def _header(folder: Path, source: _Source, name: str) -> None:
    """One weight file: its header, then a hole of the rest's size."""
    size = source.sizes[name]
    data = source.read(name, 0, min(size, _FIRST_BYTES))
    length = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if length < 0 or (2 <= length <= MAX_HEADER_BYTES and 8 + length > size):
        raise source.error("truncated-shard", f"{name} has {size} bytes, too few for its header", "check the file")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise source.error("corrupt-header", f"{name} claims a header of {length} bytes", "this is not safetensors")
    data = data[: 8 + length]
    if len(data) < 8 + length:
        data += source.read(name, len(data), 8 + length)
    with open(folder / name, "wb") as stream:
        stream.write(data)
        stream.truncate(size)


class _Source:
    """Files of one commit: sizes at once, bytes by range."""

    def __init__(self, address: HubAddress, endpoint: str | None) -> None:
        self.address = address
        self._files = self._guard(lambda: _filesystem(endpoint))
        info = self._guard(lambda: self._files._api.repo_info(address.repo, revision=address.revision))
        self.commit = str(info.sha or "")
        if not _COMMIT.fullmatch(self.commit):
            raise self.error("not-on-hub", f"the hub gives no commit for {address.revision!r}", "name another revision")
        self._root = f"{address.repo}@{self.commit}"
        listed = self._guard(lambda: self._files.ls(self._root, detail=True))
        self.sizes = {
            str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"]) for entry in listed if entry["type"] == "file"
        }

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of a file.

        Raises:
            CheckpointError: ``hub-unreachable``, ``truncated-shard`` when the hub sends fewer.
        """

        def ranged() -> bytes:
            with self._files.open(f"{self._root}/{name}", "rb", block_size=_FIRST_BYTES, cache_type="none") as stream:
                stream.seek(start)
                return bytes(stream.read(stop - start))

        data: bytes = self._guard(ranged)
        if len(data) != stop - start:
            raise self.error("truncated-shard", f"{name}: {len(data)} of {stop - start} bytes came", "try again")
        return data

    def error(self, code: str, what: str, next_action: str) -> CheckpointError:
        return CheckpointError(code, what, where=self.address.text(), next_action=next_action)

    def _guard(self, call: Any) -> Any:
        """Run a call to the hub; what it raises becomes one of our errors."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        unreachable: tuple[type[Exception], ...] = (OfflineModeIsEnabled, OSError, ValueError, *_transport_errors())
        try:
            return call()
        except (FileNotFoundError, HFValidationError) as error:
            raise self.error("not-on-hub", str(error)[:300], "check the name, the revision and your access") from error
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            code = "not-on-hub" if status in (401, 403, 404) else "hub-unreachable"
            raise self.error(code, str(error)[:300], "check the name, the revision and HF_TOKEN") from error
        except unreachable as error:
            what = f"{type(error).__name__}: {error}"[:300]
            raise self.error("hub-unreachable", what, "check the network, HF_ENDPOINT and HF_HUB_OFFLINE") from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the HTTP libraries that huggingface_hub has used raise when a connection fails."""
    found = []
    for name in ("httpx2", "httpx", "requests"):
        if importlib.util.find_spec(name) is not None:
            found.append(importlib.import_module(name).HTTPError)
    return tuple(found)


def _filesystem(endpoint: str | None) -> Any:
    """The hub as an fsspec file system; a fresh one, so that no listing of an earlier call is reused."""
    return importlib.import_module("fsspec").filesystem("hf", endpoint=endpoint, skip_instance_cache=True)
