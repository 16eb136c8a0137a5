"""hf:// addresses against a hub of our own on loopback: what is asked for, what arrives, what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.hub import fetch_headers, parse_address, resolve_checkpoint
from shardwright.checkpoints.marker import HEADERS_ONLY
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.checkpoints.reader import ShardReader
from shardwright.schemas.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """One repository, ``org/model``, whose files are a folder; counts the bytes of each file that it sends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.sent: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path in (
            "/api/models/org/model",
            f"/api/models/org/model/revision/{COMMIT}",
            "/api/models/org/model/revision/main",
        ):
            self._json({"id": "org/model", "sha": COMMIT, "siblings": []})
        elif path.startswith(f"/api/models/org/model/tree/{COMMIT}"):
            files = sorted(p for p in self.server.folder.iterdir() if p.is_file())
            self._json([{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in files])
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self._file(self.server.folder / path.rsplit("/", 1)[-1])
        else:
            self._json({"error": "not found"}, status=404, code="RepoNotFound")

    def _json(self, value: Any, *, status: int = 200, code: str = "") -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, path: Path) -> None:
        data = path.read_bytes()
        asked = self.headers.get("Range", "")
        start, stop = 0, len(data)
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1, len(data))
        part = data[start:stop]
        self.server.sent[path.name] = self.server.sent.get(path.name, 0) + len(part)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    running: list[Hub] = []

    def start(folder: Path) -> Hub:
        hub = Hub(folder)
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        running.append(hub)
        return hub

    yield start
    for hub in running:
        hub.shutdown()
        hub.server_close()


def test_the_profile_is_the_local_one_and_weights_are_not_fetched(
    serve: Any, mixtral: tuple[Path, Any], tmp_path: Path
) -> None:
    source = tmp_path / "repository"
    source.mkdir()
    for path in mixtral[0].iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    hub = serve(source)
    folder = fetch_headers("hf://org/model@main", tmp_path / "cache", endpoint=hub.endpoint)
    assert folder == tmp_path / "cache" / "org--model" / COMMIT
    assert profile_checkpoint(folder) == profile_checkpoint(source)
    weights = next(name for name in hub.sent if name.endswith(".safetensors"))
    assert hub.sent[weights] <= 256 << 10


def test_headers_of_a_commit_are_fetched_once(serve: Any, published: Any, tmp_path: Path) -> None:
    """Three files of holes: the second call finds the headers of the commit in the cache."""
    source = published.write(tmp_path / "repository", published.qwen3_moe(2, 64, 4, 2, 32), files=3)
    hub = serve(source)
    folder = fetch_headers("hf://org/model", tmp_path / "cache", endpoint=hub.endpoint)
    assert profile_checkpoint(folder).fingerprint == profile_checkpoint(source).fingerprint
    sent = dict(hub.sent)
    assert fetch_headers("hf://org/model", tmp_path / "cache", endpoint=hub.endpoint) == folder
    assert hub.sent == sent


def test_holes_are_never_read_as_weights(serve: Any, mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    hub = serve(mixtral[0])
    folder = fetch_headers("hf://org/model", tmp_path, endpoint=hub.endpoint)
    assert (folder / HEADERS_ONLY).is_file()
    with pytest.raises(CheckpointError) as caught:
        ShardReader(folder, read_headers(folder))
    assert caught.value.code == "checkpoint/headers-only"


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://model", "hf://org/../x", "hf://org/model@../x", "hf://org/model/extra", "hf://-a/b", "hf://a/b@-x",
     "hf://org/model@main/../..", "hf://org/mo del", "https://example.org/model"],
)  # fmt: skip
def test_bad_addresses_are_refused_before_anything_is_asked(text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        fetch_headers(text, tmp_path)
    assert caught.value.code == "checkpoint/bad-address"
    assert not list(tmp_path.iterdir())


def test_a_path_with_folded_slashes_is_still_an_address(serve: Any, mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    hub = serve(mixtral[0])
    folder = resolve_checkpoint(Path("hf://org/model@main"), cache=tmp_path, endpoint=hub.endpoint)
    assert folder == tmp_path / "org--model" / COMMIT
    assert resolve_checkpoint(tmp_path) == tmp_path


def test_addresses() -> None:
    assert parse_address("hf://org/model@v1.0").text() == "hf://org/model@v1.0"
    assert parse_address("hf://org/model").revision == "main"


def break_index(folder: Path) -> None:
    table = {"weight_map": {"a": "../../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


def forget_shard(folder: Path) -> None:
    table = {"weight_map": {"a": "absent.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


def one_file(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)


FAULTS: dict[str, tuple[Any, str]] = {
    "no-config": (lambda f: (f / "config.json").unlink(), "missing-config"),
    "no-weights": (lambda f: None, "missing-weights"),
    "short": (lambda f: one_file(f, b"abc"), "truncated-shard"),
    "cut": (lambda f: one_file(f, (1 << 20).to_bytes(8, "little") + b"{}"), "truncated-shard"),
    "junk": (lambda f: one_file(f, b"\xff" * 64), "corrupt-header"),
    "path-trick": (break_index, "unsafe-path"),
    "missing-shard": (forget_shard, "missing-shard"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_repositories_are_refused_and_leave_nothing(
    serve: Any, mixtral: tuple[Path, Any], tmp_path: Path, fault: str
) -> None:
    source = tmp_path / "repository"
    source.mkdir()
    (source / "config.json").write_bytes((mixtral[0] / "config.json").read_bytes())
    change, code = FAULTS[fault]
    change(source)
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError) as caught:
        fetch_headers("hf://org/model", cache, endpoint=serve(source).endpoint)
    assert caught.value.code == f"checkpoint/{code}"
    assert not [p for p in cache.rglob("*") if p.is_file()]


def test_an_unknown_repository_and_a_dead_hub(serve: Any, mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    hub = serve(mixtral[0])
    with pytest.raises(CheckpointError) as caught:
        fetch_headers("hf://org/other", tmp_path, endpoint=hub.endpoint)
    assert caught.value.code == "checkpoint/not-on-hub"
    with pytest.raises(CheckpointError) as caught:
        fetch_headers("hf://org/model", tmp_path, endpoint="http://127.0.0.1:9")
    assert caught.value.code == "checkpoint/hub-unreachable"
