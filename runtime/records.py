"""Records of data files before any tokenizer: lines, texts, conversations, packed ids; and a first look at a file.

Legend: T tokens of a file.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import DataSpec

LOOKED_AT = 1_000
"""Records that a first look parses, and on until one holds text."""
MAX_RECORD_BYTES = 64 << 20
"""A longer line is refused: it is a file that is no JSON lines, or a record that no tokenizer's memory holds."""


def look(path: Path, spec: DataSpec) -> None:
    """Refuse a file that cannot be what the recipe says of it, before a plan is made of it.

    JSON lines: the first records; parquet: that the column is there; packed ids: the array's form. Tokens are counted
    only when a run reads the file.

    Raises:
        RecipeError: ``missing-data``, ``empty-data``, ``bad-record``, ``packed-borders``, ``no-pyarrow``.
    """
    if spec.format == "parquet-text":
        column_of(path, spec.text_field, read=False)
    elif spec.format == "packed":
        open_packed(path, spec)
    else:
        _look_at_lines(path, spec)


def _look_at_lines(path: Path, spec: DataSpec) -> None:
    filled = False
    for number, (where, line) in enumerate(lines_of(path)):
        if number >= LOOKED_AT and filled:
            return
        if spec.format == "jsonl-messages":
            messages = messages_of(line, spec.messages_field, where)
            filled = any(one["content"] or one.get("tool_calls") for one in messages) or filled
        else:
            filled = bool(text_of(line, spec.text_field, where)) or filled
    if not filled:
        raise RecipeError(
            "empty-data",
            "the file holds no text",
            where=str(path),
            next_action="give a file with at least one document",
        )


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """(file:number, line) of each line that is not blank; a byte order mark before the first is none of its text.

    Raises:
        RecipeError: ``missing-data``; ``unreadable-data``; ``bad-record`` for bytes that are no UTF-8, or too many.
    """
    if not path.is_file():
        raise RecipeError("missing-data", "no such file", where=str(path), next_action="correct recipe.data")
    try:
        with open(path, "rb") as stream:
            for number, raw in enumerate(iter(partial(stream.readline, MAX_RECORD_BYTES + 1), b""), start=1):
                line = _line(raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw, f"{path}:{number}")
                if line:
                    yield f"{path}:{number}", line
    except OSError as error:
        raise RecipeError(
            "unreadable-data", f"{error.strerror}", where=str(path), next_action="let this user read the file"
        ) from error


def _line(raw: bytes, where: str) -> str:
    """The text of a line, empty where it is blank."""
    if len(raw) > MAX_RECORD_BYTES:
        raise RecipeError(
            "bad-record",
            f"a line of more than {MAX_RECORD_BYTES >> 20} MiB",
            where=where,
            next_action="write one record a line, and split this one if it is one",
        )
    try:
        return raw.decode("utf-8") if raw.strip() else ""
    except UnicodeDecodeError as error:
        raise RecipeError(
            "bad-record",
            f"byte {error.start} of the line is no UTF-8 ({error.reason})",
            where=where,
            next_action="convert the file to UTF-8, or remove this line",
        ) from error


def shared_records(train: Path, held_out: Path, spec: DataSpec) -> tuple[str, ...]:
    """A note where held-out records are among those trained on, byte for byte; none for packed ids, which have none.

    Raises:
        RecipeError: as :func:`lines_of` and :func:`column_of`.
    """
    if spec.format == "packed":
        return ()
    held = {_digest(record): where for where, record in _records(held_out, spec)}
    seen = {digest: where for where, record in _records(train, spec) if (digest := _digest(record)) in held}
    if not seen:
        return ()
    digest, where = next(iter(seen.items()))
    return (
        f"{len(seen)} of {len(held)} different held-out records are trained on too, first {held[digest]} = {where}: "
        "the held-out loss is lower than that of new text; take them out of one of the files",
    )


def _records(path: Path, spec: DataSpec) -> Iterator[tuple[str, str]]:
    if spec.format == "parquet-text":
        return ((f"{path}, row {row}", str(text)) for row, text in enumerate(column_of(path, spec.text_field), start=1))
    return ((where, line.strip()) for where, line in lines_of(path))


def _digest(record: str) -> bytes:
    return hashlib.sha256(record.encode("utf-8", "surrogatepass")).digest()


def text_of(line: str, field: str, where: str) -> str:
    """The text of a record.

    Raises:
        RecipeError: ``bad-record``, naming the field asked for and those found.
    """
    record = _record(line, where)
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise RecipeError(
            "bad-record",
            f"no text under {field!r}: {_found(record, field)}",
            where=where,
            next_action="correct this line, or recipe.data.text_field",
        )
    return text


def messages_of(line: str, field: str, where: str) -> list[dict[str, Any]]:
    """The messages of a record, each with a role and text content; one that calls tools may have ``null`` for text.

    Raises:
        RecipeError: ``bad-record``.
    """
    record = _record(line, where)
    messages = record.get(field) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise RecipeError(
            "bad-record",
            f"no messages under {field!r}: {_found(record, field)}",
            where=where,
            next_action="correct this line, or recipe.data.messages_field",
        )
    for place, one in enumerate(messages):
        sound = isinstance(one, dict) and isinstance(one.get("role"), str)
        if sound and one.get("content") is None and _calls(one):
            one["content"] = None
        elif not sound or not isinstance(one.get("content"), str):
            raise RecipeError(
                "bad-record",
                f"message {place} of {field!r} has no role and content as text: {_found(one, 'content')}",
                where=where,
                next_action="correct this line",
            )
    return messages


def _calls(message: dict[str, Any]) -> bool:
    calls = message.get("tool_calls")
    return isinstance(calls, list) and bool(calls)


def _record(line: str, where: str) -> Any:
    try:
        record = json.loads(line)
        if "\\ud" in line or "\\uD" in line:
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecipeError(
            "bad-record", "half of a surrogate pair is no text", where=where, next_action="correct or remove this line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            "bad-record", f"not JSON: {error}", where=where, next_action="correct or remove this line"
        ) from error
    return record


def _found(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        return f"the record is of type {type(record).__name__}, not an object"
    if field in record:
        return f"its value is of type {type(record[field]).__name__}"
    return f"the record has {', '.join(map(repr, list(record)[:8])) or 'no key'}"


def json_of(path: Path, code: str) -> dict[str, Any]:
    """The object in a checkpoint's JSON file.

    Raises:
        RecipeError: ``code`` where the file holds no JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(code, f"not JSON: {error}", where=str(path), next_action="fetch this file again") from error
    if not isinstance(value, dict):
        raise RecipeError(
            code, f"a {type(value).__name__}, not an object", where=str(path), next_action="fetch this file again"
        )
    return value


def column_of(path: Path, field: str, *, read: bool = True) -> list[Any]:
    """The values of a parquet file's column; none where only its presence is asked for.

    Raises:
        RecipeError: ``no-pyarrow``, ``bad-record``.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise RecipeError(
            "no-pyarrow",
            "parquet is read by pyarrow, which is not installed",
            where=str(path),
            next_action="install pyarrow, or convert the data to JSON lines",
        )
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        names = parquet.read_schema(path).names
        if field in names:
            return list(parquet.read_table(path, columns=[field]).column(field).to_pylist()) if read else []
    except (arrow.ArrowException, OSError) as error:
        raise RecipeError(
            "bad-record", f"not read as parquet: {error}"[:500], where=str(path), next_action="correct the file"
        ) from error
    raise RecipeError(
        "bad-record",
        f"no column {field!r}: the file has {', '.join(map(repr, names[:8])) or 'none'}",
        where=str(path),
        next_action="correct recipe.data.text_field, or the file",
    )


def open_packed(path: Path, spec: DataSpec) -> np.ndarray:
    """[T] token ids that the user made, from a ``.npy`` file, mapped and not read.

    Raises:
        RecipeError: ``missing-data``, ``empty-data``; ``bad-record`` for another form; ``packed-borders`` where the
            recipe wants documents told apart.
    """
    if spec.document_mask or spec.images_field or not spec.packing:
        raise RecipeError(
            "packed-borders",
            "packed ids are one stream without borders; the recipe asks for document_mask, images or packing: false",
            where="recipe.data",
            next_action="give the texts themselves, or drop these keys",
        )
    if not path.is_file():
        raise RecipeError("missing-data", "no such file", where=str(path), next_action="correct recipe.data")
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _not_packed(path, f"no .npy file: {error}"[:500]) from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _not_packed(
            path, f"found {getattr(ids, 'dtype', type(ids).__name__)} of shape {getattr(ids, 'shape', ())}"
        )
    if not len(ids):
        raise RecipeError(
            "empty-data", "the file holds no token", where=str(path), next_action="give a file with tokens"
        )
    return ids


def _not_packed(path: Path, what: str) -> RecipeError:
    return RecipeError(
        "bad-record",
        f"packed data is one array of whole numbers, [tokens]; {what}",
        where=str(path),
        next_action="write the ids with numpy.save, one stream, documents separated by the end-of-text id",
    )
