"""Content-addressed artifacts of a run, and the memory of what each node has already done.

Everything large lives here as JSON under its own hash; the workflow's state holds hashes only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from shardwright import __version__
from shardwright.schemas.canonical import sha256_hex, sha256_of
from shardwright.schemas.errors import RunError
from shardwright.schemas.files import write_atomic

T = TypeVar("T")


def exact_json(value: Any) -> bytes:
    """Sorted JSON that keeps floats exactly; models and tuples of models are dumped first."""
    plain = TypeAdapter(Any).dump_python(value, mode="json")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


class ArtifactStore:
    """``RUN_DIR/artifacts/<sha256>.json``: written once, verified on every read."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "artifacts"
        self.memo_folder = run_dir / "memo"

    def path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.json"

    def put_bytes(self, data: bytes) -> str:
        sha256 = sha256_hex(data)
        if not self.path(sha256).exists():
            write_atomic(self.path(sha256), data)
        return sha256

    def put(self, value: BaseModel | tuple[BaseModel, ...]) -> str:
        """Store a model, or a tuple of them, and return its hash."""
        return self.put_bytes(exact_json(value))

    def get_bytes(self, sha256: str) -> bytes:
        """The artifact's bytes.

        Raises:
            RunError: ``missing-artifact`` or ``damaged-artifact``.
        """
        path = self.path(sha256)
        advice = "delete the run folder and start again: what it holds can no longer be trusted"
        if not path.is_file():
            raise RunError(
                "missing-artifact", "the state names an absent artifact", where=str(path), next_action=advice
            )
        data = path.read_bytes()
        if sha256_hex(data) != sha256:
            raise RunError("damaged-artifact", "its bytes have another hash", where=str(path), next_action=advice)
        return data

    def get(self, sha256: str, kind: type[T]) -> T:
        """Read an artifact back as the type it was stored from."""
        return TypeAdapter(kind).validate_json(self.get_bytes(sha256))

    def once(
        self, node: str, inputs: Mapping[str, str], compute: Callable[[], dict[str, str]], mark: Callable[[str], None]
    ) -> dict[str, str]:
        """Run ``compute`` unless this node has already finished on the same inputs.

        Args:
            node: name of the node; part of the key.
            inputs: everything the result depends on, as hashes and plain text.
            compute: does the work, returns state fields.
            mark: told ``cached``, or ``computed`` between the work and its being recorded.
        """
        key = sha256_of({"node": node, "inputs": dict(inputs), "shardwright": __version__})
        path = self.memo_folder / f"{node}-{key[:32]}.json"
        if path.is_file():
            recorded = json.loads(path.read_bytes())
            if recorded["key"] == key:
                mark("cached")
                return {str(k): str(v) for k, v in recorded["outputs"].items()}
        outputs = compute()
        mark("computed")
        write_atomic(path, exact_json({"key": key, "outputs": outputs}))
        return outputs
