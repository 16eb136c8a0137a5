"""Turn pydantic's complaints into one plain sentence per field."""

from __future__ import annotations

from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from shardwright.schemas.errors import ShardwrightError

M = TypeVar("M", bound=BaseModel)


def explain(error: ValidationError, limit: int = 5) -> str:
    """``links.0.bandwidth: must be greater than 0 (got -1)``, joined by semicolons."""
    lines = []
    problems = error.errors(include_url=False)
    for problem in problems[:limit]:
        place = ".".join(str(part) for part in problem["loc"]) or "(whole document)"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{place}: unknown key")
            continue
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        given = problem.get("input")
        shown = f" (got {given!r})" if isinstance(given, (int, float, str, bool)) and len(repr(given)) < 60 else ""
        lines.append(f"{place}: {message}{shown}")
    if len(problems) > limit:
        lines.append(f"and {len(problems) - limit} more")
    return "; ".join(lines)


def parse_yaml(model: type[M], text: str | bytes, *, where: str, error: type[ShardwrightError]) -> M:
    """Parse YAML into a model.

    Raises:
        error: ``unreadable`` or ``invalid``, naming each field that is wrong.
    """
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise error(
            "unreadable", f"not a YAML document: {problem}", where=where, next_action="correct the file's syntax"
        ) from problem
    if not isinstance(raw, dict):
        raise error(
            "invalid",
            "the file is empty" if raw is None else f"expected a mapping of keys, found {type(raw).__name__}",
            where=where,
            next_action=f"see the JSON Schema of {model.__name__}: `shardwright show --schema {model.__name__}`",
        )
    try:
        return model.model_validate(raw)
    except ValidationError as problem:
        raise error(
            "invalid", explain(problem), where=where, next_action="correct these fields; nothing was written"
        ) from problem
