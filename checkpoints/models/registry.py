"""Which checkpoints have a model here: one explicit table, imported when a row is used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OwnModel:
    """A model of ours: paths are ``module:name`` below this package."""

    model_path: str
    config_path: str

    def model_class(self) -> Any:
        return _load(self.model_path)

    def config_class(self) -> Any:
        return _load(self.config_path)


OWN_MODELS: dict[str, OwnModel] = {
    "kimi_k3": OwnModel("kimi_k3.model:KimiK3ForConditionalGeneration", "kimi_k3.configuration:KimiK3Config"),
}
"""Outer ``model_type`` of config.json → model."""


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"shardwright.checkpoints.models.{module}"), name)
