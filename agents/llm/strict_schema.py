"""A strict JSON Schema of a pydantic model: the subset that all servers take.

Objects are closed and all their keys required, an optional value may be null, and bounds, patterns and defaults are
left out: pydantic checks those when the reply is read.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_KEPT = ("type", "enum", "const", "items", "anyOf", "description")


def strict_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a model without open objects or references.

    Raises:
        TypeError: the model has a mapping with free keys, which strict servers refuse.
    """
    whole = model.model_json_schema()
    return _closed(whole, whole.get("$defs", {}), model.__name__)


def _closed(node: dict[str, Any], definitions: dict[str, Any], where: str) -> dict[str, Any]:
    if "$ref" in node:
        return _closed(definitions[node["$ref"].rsplit("/", 1)[1]], definitions, where)
    kept = {key: node[key] for key in _KEPT if key in node}
    if node.get("type") == "object":
        if "properties" not in node:
            raise TypeError(f"{where} has a mapping with free keys; use a list of named entries")
        properties = {name: _closed(one, definitions, f"{where}.{name}") for name, one in node["properties"].items()}
        return kept | {"properties": properties, "required": list(properties), "additionalProperties": False}
    if "items" in kept:
        kept["items"] = _closed(kept["items"], definitions, where)
    if "anyOf" in kept:
        kept["anyOf"] = [_closed(one, definitions, where) for one in kept["anyOf"]]
    return kept
