"""config.json as data: read with limits, nested text configs resolved, and only inert keys passed on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.schemas.errors import CheckpointError

MAX_CONFIG_BYTES = 16 << 20
CONFIG_FILE = "config.json"

PARTS = ("ffn_config", "attn_config")
"""Groups in which some families give the sizes of their MLP and their attention."""
TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal configurations keep their language model, in order of preference."""

EXECUTABLE_KEYS = frozenset(
    {
        "auto_map",
        "custom_pipelines",
        "trust_remote_code",
        "attn_implementation",
        "experts_implementation",
        "use_kernels",
        "kernel_config",
        "quantization_config",
        "compression_config",
        "dtype",
        "torch_dtype",
        "architectures",
        "transformers_version",
        "transformers_weights",
        "name_or_path",
    }
)
"""Keys that choose code, kernels or formats. The caller decides these; the file never does.

Keys that begin with an underscore (``_attn_implementation``, ``_name_or_path``) are dropped as well.
"""


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's config.json.

    Attributes:
        raw: the whole document.
        text: the language model's part of it (the document itself when nothing is nested).
        model_type: the outer ``model_type``.
        architecture: first of ``architectures``, or an empty string.
    """

    folder: Path
    raw: dict[str, Any]
    text: dict[str, Any]
    model_type: str
    architecture: str

    @property
    def text_model_type(self) -> str:
        return str(self.text.get("model_type") or self.model_type)

    @property
    def tie_word_embeddings(self) -> bool:
        """As transformers reads it: absent counts as untied; the outer document wins where both speak."""
        value = self.raw.get("tie_word_embeddings", self.text.get("tie_word_embeddings", False))
        return bool(value)

    @property
    def quantization(self) -> dict[str, Any]:
        """``quantization_config`` (outer or nested), or an empty mapping."""
        for place in (self.raw, self.text):
            for key in ("quantization_config", "compression_config"):
                if isinstance(place.get(key), dict):
                    return dict(place[key])
        return {}

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of several spellings that the language model's config holds, ``null`` counting as absent.

        A family that gives attention and MLP a group of their own (:data:`PARTS`) has the other sizes there.
        """
        parts = [self.text, *(part for part in map(self.text.get, PARTS) if isinstance(part, dict))]
        return next((part[name] for part in parts for name in names if part.get(name) is not None), default)

    def count(self, *names: str, default: int = 0) -> int:
        """Like :meth:`get`, for a non-negative integer.

        Raises:
            CheckpointError: ``config-contradiction`` when the value is not one.
        """
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
            raise CheckpointError(
                "config-contradiction",
                f"{names[0]} should be a non-negative integer, found {value!r}"[:300],
                where=str(self.folder / CONFIG_FILE),
                next_action="correct config.json or fetch it again",
            )
        return value


def read_json(path: Path, *, code: str, max_bytes: int, constants: bool = False) -> Any:
    """Parse a JSON file within limits: size, and those of :func:`parse_json`.

    Raises:
        CheckpointError: ``code`` when the file cannot be parsed within them.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= max_bytes else b""
    except OSError as error:
        raise CheckpointError(
            code, f"cannot read: {error.strerror}", where=str(path), next_action="check the file and its permissions"
        ) from error
    if size > max_bytes:
        raise CheckpointError(
            code,
            f"{size} bytes, more than the limit of {max_bytes}",
            where=str(path),
            next_action="this is not a file of this kind; fetch it again",
        )
    return parse_json(data, code=code, where=str(path), constants=constants)


def parse_json(data: bytes, *, code: str, where: str, constants: bool = False) -> Any:
    """Parse JSON bytes; duplicate keys, NaN, bad UTF-8 and bottomless nesting are refused with ``code``.

    Args:
        constants: accept ``Infinity`` and ``NaN`` (configurations hold unbounded limits such as a time step's).
    """
    hook = float if constants else _no_constant
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=hook)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            code, f"not valid JSON: {error}"[:300], where=where, next_action="fetch the file again"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:200]!r} occurs twice")
    return table


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a checkpoint folder.

    Raises:
        CheckpointError: ``missing-folder``, ``missing-config``, ``corrupt-config``.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            "missing-folder",
            "no such folder" if not folder.exists() else "not a folder",
            where=str(folder),
            next_action="give the folder that holds config.json and the safetensors files",
        )
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            "missing-config",
            "the folder has no config.json",
            where=str(folder),
            next_action="give a folder in Hugging Face layout; fetch config.json if it was left out",
        )
    raw = read_json(path, code="corrupt-config", max_bytes=MAX_CONFIG_BYTES, constants=True)
    return config_of(raw, folder)


def config_of(raw: Any, folder: Path) -> ModelConfig:
    """A :class:`ModelConfig` from a parsed document.

    Raises:
        CheckpointError: ``corrupt-config`` when the document has no usable ``model_type``.
    """

    def corrupt(what: str) -> CheckpointError:
        return CheckpointError(
            "corrupt-config", what, where=str(folder / CONFIG_FILE), next_action="fetch config.json again"
        )

    if not isinstance(raw, dict):
        raise corrupt(f"expected an object, found {type(raw).__name__}")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type or len(model_type) > 100:
        raise corrupt(f"model_type should name the architecture, found {model_type!r}"[:300])
    architectures = raw.get("architectures")
    if architectures is None:
        architectures = []
    if not isinstance(architectures, list) or any(not isinstance(name, str) for name in architectures):
        raise corrupt(f"architectures should be a list of names, found {architectures!r}"[:300])
    return ModelConfig(folder, raw, _text_part(raw), model_type, architectures[0][:200] if architectures else "")


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    for key in TEXT_CONFIG_KEYS:
        nested = raw.get(key)
        if isinstance(nested, dict) and nested:
            return _text_part(nested) if key == "thinker_config" else nested
    return raw


def inert_config(raw: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The part of a configuration that may reach a model class.

    Args:
        raw: a parsed config.json (or a nested part of one).
        known: field names that the configuration class declares.

    Returns:
        A deep copy without :data:`EXECUTABLE_KEYS`, without names that begin with an underscore, and without
        undeclared keys whose values hold anything but numbers and plain words (a repository name or a code
        reference cannot pass).
    """
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        if key.startswith("_") or key in EXECUTABLE_KEYS:
            continue
        if isinstance(value, dict) and "model_type" in value:
            kept[key] = inert_config(value, known)
        elif key in known or _is_inert(value):
            kept[key] = _without_executable(value)
    return kept


def _without_executable(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"]) if value["__float__"] in ("Infinity", "-Infinity", "NaN") else value
    if isinstance(value, dict):
        return {
            key: _without_executable(item)
            for key, item in value.items()
            if not key.startswith("_") and key not in EXECUTABLE_KEYS
        }
    if isinstance(value, list):
        return [_without_executable(item) for item in value]
    return value


def _is_inert(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_inert(key) and _is_inert(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_inert(item) for item in value)
    if isinstance(value, str):
        return len(value) <= 64 and value.replace("_", "").replace("-", "").replace(".", "").isalnum()
    return True
