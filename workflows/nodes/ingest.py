"""ingest: read the user's files, the checkpoint's headers and samples of its weights; pin everything by hash."""

from __future__ import annotations

from pathlib import Path

from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.plan import DataPin
from shardwright.schemas.recipe import Recipe
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.environment import tool_versions
from shardwright.workflows.evidence import keep
from shardwright.workflows.licence import stated_licence
from shardwright.workflows.request import load_recipe

NODE = "ingest"


def run(context: Context, state: AdaptState) -> Output:
    """Write the recipe, cluster, profile, targets and data pins as artifacts.

    Raises:
        CheckpointError, RecipeError, ClusterError, LegalityError: with their causes.
        UsageError, RunError: a file of measured times that cannot be used, or is not the one that this run began with.
    """
    request, stages, store = context.request, context.stages, context.store
    recipe = load_recipe(Path(request.recipe))
    cluster = stages.load_cluster(request.cluster)
    pins = pin_data(recipe, context.data_root)  # cheap beside the profile, and oftener wrong
    profile = stages.profile(context.checkpoint)
    profile = profile.model_copy(update={"licence": profile.licence or stated_licence(context.checkpoint)})
    stages.documents(context.checkpoint, recipe.data)
    cluster_id, recipe_id, profile_id, data_id = map(store.put, (cluster, recipe, profile, pins))
    weights = {"weights": store.put(stages.weights(context.checkpoint))}
    evidence = {"evidence": keep(store, request.evidence, cluster)} if request.evidence else {}

    def resolve() -> Output:
        stages.balance(context.checkpoint, recipe.balance)
        targets = stages.targets(context.checkpoint, recipe.lora)
        return {"targets": store.put(targets)}

    keys = {"profile": profile_id, "recipe": recipe_id, "transformers": tool_versions()["transformers"]}
    targets = context.once(NODE, keys, resolve)
    return {
        "cluster": cluster_id,
        "recipe": recipe_id,
        "profile": profile_id,
        "data": data_id,
        **weights,
        **evidence,
        **targets,
    }


def pin_data(recipe: Recipe, root: Path) -> DataPin:
    """Look into both data files and hash them.

    Raises:
        RecipeError: ``missing-data`` or ``empty-data``, naming the file; what a first look finds wrong.
    """
    from shardwright.runtime.records import look

    hashes = {}
    for field in ("train", "held_out"):
        path = root / getattr(recipe.data, field)
        if not path.is_file():
            raise RecipeError(
                "missing-data",
                f"data.{field} names a file that is not there",
                where=str(path),
                next_action=f"correct data.{field} in the recipe; paths are relative to the recipe's folder",
            )
        if _is_empty(path):
            raise RecipeError(
                "empty-data",
                f"data.{field} holds no record",
                where=str(path),
                next_action=f"put at least one document into it, or name another file in data.{field}",
            )
        look(path, recipe.data)
        hashes[f"{field}_sha256"] = sha256_file(path)
    return DataPin(**hashes)


def _is_empty(path: Path) -> bool:
    with open(path, "rb") as stream:
        return not any(line.strip() for line in stream)
