"""The shipped JSON Schemas are current and are valid schemas."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from shardwright.schemas.registry import FOLDER, SHIPPED, schema_path, schema_text


@pytest.mark.parametrize("model", SHIPPED, ids=lambda m: m.__name__)
def test_shipped_schema_is_current(model: type[BaseModel]) -> None:
    assert schema_path(model).read_text() == schema_text(model), "run `make schemas`"
    Draft202012Validator.check_schema(json.loads(schema_text(model)))


def test_nothing_else_is_shipped() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {schema_path(model).name for model in SHIPPED}


@pytest.mark.parametrize("model", SHIPPED, ids=lambda m: m.__name__)
def test_top_level_is_closed(model: type[BaseModel]) -> None:
    assert model.model_json_schema()["additionalProperties"] is False
