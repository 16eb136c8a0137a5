"""Families whose layers mix the tokens of a sequence in a way that no mask keeps apart, refused before a plan is made.

Which families these are is found by trying them: ``tests/runtime/test_documents_apart.py`` exchanges the first of two
documents in every family. What a family unknown here does is tried on the live model before the first step.
"""

from __future__ import annotations

from pathlib import Path

from shardwright.checkpoints.config import ModelConfig, read_config
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import DataSpec

MIXES = {
    "doge": "its router splits the scores of all tokens as if they were two halves of one, so a token's experts depend "
    "on the other documents",
    "diffusion_gemma": "it answers from a random canvas with attention in both directions",
}
"""Family → why documents that share a sequence change each other in it."""


def check_documents(folder: Path, data: DataSpec) -> None:
    """Refuse documents in one sequence where the family cannot keep them apart; ``config.json`` alone is read.

    Raises:
        RecipeError: ``documents-mix``.
        CheckpointError: as ``read_config``.
    """
    if not data.documents_share_rows:
        return
    config = read_config(folder)
    family = family_that_mixes(config)
    if family:
        raise RecipeError(
            "documents-mix",
            f"the recipe puts several documents into a sequence, and {family} cannot keep them apart: {MIXES[family]}",
            where=f"recipe.data.packing with the model_type of {folder}",
            next_action="set recipe.data.packing to false: one document a sequence",
        )


def family_that_mixes(config: ModelConfig) -> str:
    """Its name in :data:`MIXES`; empty for a model that can keep documents apart. Doge without experts can."""
    names = (config.model_type, config.text_model_type)
    family = next((name.removesuffix("_text") for name in names if name.removesuffix("_text") in MIXES), "")
    return "" if family == "doge" and not config.get("is_moe", default=False) else family
