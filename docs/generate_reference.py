"""Write docs/reference and the README's table of measurements: ``python docs/generate_reference.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from shardwright.schemas.registry import SHIPPED
from shardwright.workflows.cli.examples import EXAMPLES
from shardwright.workflows.cli.main import EXIT_CODES, app

FOLDER = Path(__file__).parent / "reference"
README = FOLDER.parents[1] / "README.md"
RESULTS = FOLDER.parents[1] / "benchmarks" / "results"
FRAME = "<!-- measured: written by docs/generate_reference.py -->\n", "<!-- /measured -->\n"
MEASURED = (
    ("LoRA step of Qwen3-30B-A3B, attention and experts", "train-step", "train-step/qwen3-30b-experts", "step"),
    (
        "LoRA step of Kimi-Linear-48B-A3B, attention and experts",
        "train-step",
        "train-step/kimi-linear-48b-experts",
        "step",
    ),
    ("experts with LoRA, 128 of which 8 a token", "kernels", "moe-lora/128e8", "fwd+dx"),
    ("delta-rule attention, 8k tokens", "kernels", "kda/T8k-H32", "fwd+bwd"),
    ("linear + cross-entropy, 8k tokens", "kernels", "linear-ce/8k", "fwd+dx"),
    ("RMSNorm, 16k × 7168", "kernels", "rmsnorm/16kx7168", "fwd"),
    ("latent norm, 64k × 576", "kernels", "latent-norm/64kx576", "fwd"),
)
"""Row of the README's table → bench, case and passes of its line; wins, a draw and a loss."""


def measured_table() -> str:
    """The README's measurements, each the newest line of its case."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for text in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
            line = json.loads(text)
            key = (line["bench"], line["case"], line["passes"])
            wanted = line["device"] == "NVIDIA H200" or line["bench"] == "cost-model"
            if wanted and (key not in found or line["date"] >= found[key]["date"]):
                found[key] = line
    rows = ["| on one NVIDIA H200 | ours | beside | theirs | ratio |", "|---|---:|---|---:|---:|"]
    for words, *key in MEASURED:
        line = found[tuple(key)]
        ours, theirs = (_amount(line[name], line["unit"]) for name in ("ours", "rival_value"))
        passes = "" if key[2] == "step" else f" ({key[2]})"
        rows.append(f"| {words}{passes} | {ours} | {line['rival']} | {theirs} | ×{line['ratio']:.2f} |")
    memory = found["cost-model", "cost/memory", ""]["metrics"]
    time = found["cost-model", "cost/time", ""]["metrics"]
    said = (
        f"The cost model beside {memory['points']:.0f} measurements on one H200, whole steps and cut models: memory "
        f"within 3% for {memory['share_within_3pct']:.0%} of them and at most "
        f"{memory['worst_under_pct']:.1f}% too low, "
        f"step time off by {time['mean_abs_pct']:.1f}% on average."
    )
    return "\n".join(rows) + f"\n\n{said}\n"


def _amount(value: float, unit: str) -> str:
    return f"{value:,.0f} tokens/s" if unit == "tok/s" else f"{value:.3g} {unit}"


def readme() -> str:
    """The README with its table as the results say."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(FRAME[0])
    return f"{before}{FRAME[0]}{measured_table()}{FRAME[1]}{rest.split(FRAME[1])[1]}"


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
        if path in EXAMPLES:
            parts.append(f"```\n{EXAMPLES[path]}\n```")
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
    README.write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
