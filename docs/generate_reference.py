"""Write docs/reference from the command line and the shipped schemas: ``python docs/generate_reference.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from shardwright.schemas.registry import SHIPPED
from shardwright.workflows.cli.main import EXIT_CODES, app

FOLDER = Path(__file__).parent / "reference"


def cli_reference() -> str:
    """Every verb with its words, options and defaults."""
    parts = [
        "# Command line",
        "Written from the program itself by `docs/generate_reference.py`.",
        EXIT_CODES.strip("\b\n"),
    ]
    for path, command in _verbs(typer.main.get_command(app), ""):
        parts.append(f"## shardwright {path}")
        parts.append(_words(command.help or ""))
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            parts.append("\n".join(["| word | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _verbs(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if path and (not children or command.params):
        yield path, command
    for name in sorted(children):
        yield from _verbs(children[name], f"{path} {name}".strip())


def _row(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    name = ", ".join(f"`{word}`" for word in parameter.opts) if option else f"`{parameter.metavar or parameter.name}`"
    default = parameter.default
    shown = "" if default in (None, False, "", ()) or callable(default) else f"`{getattr(default, 'value', default)}`"
    if parameter.required:
        shown = "required"
    return f"| {name} | {shown} | {_words(parameter.help or '')} |"


def schema_reference() -> str:
    """Every shipped schema with its keys."""
    parts = [
        "# Schemas",
        "Written from the models themselves by `docs/generate_reference.py`. Unknown keys are errors. The JSON Schemas "
        "are in `schemas/json/`; `shardwright show --schema NAME` prints one.",
    ]
    done: set[str] = set()
    for model in SHIPPED:
        schema = model.model_json_schema()
        for name, body in [(model.__name__, schema), *sorted(schema.get("$defs", {}).items())]:
            if name in done or "properties" not in body:
                continue
            done.add(name)
            parts.append(f"## {name}")
            parts.append(_words(body.get("description", "").split("\n\n")[0]))
            required = set(body.get("required", ()))
            rows = [
                f"| `{key}` | {_kind(value)} | {'required' if key in required else _default(value)} | "
                f"{_words(value.get('description', ''))} |"
                for key, value in body["properties"].items()
            ]
            parts.append("\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _kind(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[1]
        if name == "JsonValue":  # pydantic's own: no section of the page is about it
            return "any JSON value"
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(item) for item in value["anyOf"]))
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        return f"list of {_kind(value['items'])}" if isinstance(value.get("items"), dict) else "list"
    if value.get("type") == "object":
        inner = value.get("additionalProperties")
        return f"map to {_kind(inner)}" if isinstance(inner, dict) and inner else "map"
    return str(value.get("type", "any"))


def _default(value: dict[str, Any]) -> str:
    if "default" not in value:
        return ""
    text = json.dumps(value["default"], ensure_ascii=False)
    return f"`{text}`" if len(text) <= 60 else "see the schema"


def _words(text: str) -> str:
    """One line that cannot break out of a table."""
    return " ".join(text.replace("\b", "").split()).replace("``", "`").replace("|", "\\|")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "cli.md").write_text(cli_reference(), encoding="utf-8")
    (FOLDER / "schemas.md").write_text(schema_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
