"""Does the world still look as the plan says? Each field that differs is named, with both sides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.fingerprint import fingerprint
from shardwright.checkpoints.headers import Headers, read_headers
from shardwright.checkpoints.remote_code import read_code, trust
from shardwright.checkpoints.sampled import weights_pin
from shardwright.checkpoints.targets import parameter_shapes, resolve_targets
from shardwright.kernels.registry import source_sha256
from shardwright.runtime.device import available
from shardwright.runtime.record import versions
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import RecipeError, StalePlanError
from shardwright.schemas.plan import AdaptationPlan, Decision
from shardwright.search_spaces.executable import EXECUTABLE

ALTERING = {
    "TRITON_INTERPRET": "cuda",
    "TRITON_KERNEL_OVERRIDE": "cuda",
    "NVIDIA_TF32_OVERRIDE": "cuda",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "cuda",
    "TORCHDYNAMO_DISABLE": "",
    "TORCH_COMPILE_DISABLE": "",
}
"""Variables that put other arithmetic or other kernels in the place of what a plan names → the device type on which
they do; empty: on any, where the plan has a compiled region."""


def verify_plan_against_world(plan: AdaptationPlan, checkpoint: Path, recipe_root: Path) -> None:
    """Recompute everything that the decision pins. Code of the checkpoint is trusted in this process from then on.

    Args:
        plan: parsed, its hashes verified.
        checkpoint: the folder that will be loaded.
        recipe_root: what the recipe's data paths are relative to.

    Raises:
        StalePlanError: ``changed``, one line for each field that differs.
        CheckpointError, RecipeError: where the files cannot be read at all.
    """
    decision = plan.decision
    differences = [
        *_checkpoint(decision, checkpoint),
        *_data(decision, recipe_root),
        *_environment(decision),
        *_variables(decision),
        *_kernels(decision),
        *_devices(decision),
    ]
    if not differences and decision.remote_code is not None:
        trust(checkpoint, decision.remote_code.sha256)
    if not differences:
        differences = [*_strategy(decision), *_targets(decision, checkpoint)]
    if differences:
        raise StalePlanError(
            "changed",
            "; ".join(differences),
            where="; ".join(sorted({line.split(":", 1)[0] for line in differences})),
            next_action="make the plan again with `shardwright plan`, or restore what it was made for",
        )


def _differ(field: str, planned: object, found: object) -> Iterator[str]:
    if planned != found:
        yield f"{field}: the plan says {_short(planned)}, found {_short(found)}"


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:16]}…" if len(text) == 64 else text


def _checkpoint(decision: Decision, folder: Path) -> Iterator[str]:
    config = read_config(folder)
    yield from _differ("decision.model_type", decision.model_type, config.model_type)
    yield from _differ("decision.architecture", decision.architecture, config.architecture)
    headers = read_headers(folder)
    found, pinned = fingerprint(folder, headers).model_dump(), decision.checkpoint.model_dump()
    for field, planned in pinned.items():
        if field != "digest":
            yield from _differ(f"decision.checkpoint.{field}", planned, found[field])
    if found["headers_sha256"] == pinned["headers_sha256"]:
        yield from _weights(decision, folder, headers)
    if decision.remote_code is not None:
        seen, wanted = read_code(folder)[0], decision.remote_code
        for name in sorted({*seen.files, *wanted.files}):
            kept = wanted.files.get(name, "no such file")
            yield from _differ(f"decision.remote_code.files[{name}]", kept, seen.files.get(name, "no such file"))
        yield from _differ("decision.remote_code.sha256", wanted.sha256, seen.sha256)


def _weights(decision: Decision, folder: Path, headers: Headers) -> Iterator[str]:
    """Files whose values differ. Ranks of one node share the files out: each node reads all that it will load from."""
    if decision.weights is None or not decision.weights.files:
        return
    shared = "LOCAL_WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ
    rank, ranks = (int(os.environ[f"LOCAL_{word}"]) for word in ("RANK", "WORLD_SIZE")) if shared else (0, 1)
    mine: dict[str, str] = dict(sorted(decision.weights.files.items())[rank::ranks])
    found = weights_pin(folder, headers, mine).files
    for name, sha256 in mine.items():
        yield from _differ(f"decision.weights.files[{name}]", sha256, found.get(name, "no values"))


def unpinned(decision: Decision) -> tuple[str, ...]:
    """What to say where the plan does not tell what the weights' values are."""
    if decision.weights is not None and decision.weights.files:
        return ()
    why = "it was made before values were pinned" if decision.weights is None else "it was made from headers alone"
    return (
        f"the plan does not pin the weights' values ({why}): weights of another revision with equal headers are only "
        "told from those of this run's first start when it is resumed",
    )


def _data(decision: Decision, root: Path) -> Iterator[str]:
    data = decision.recipe.data
    for field, name, planned in (
        ("train_sha256", data.train, decision.data.train_sha256),
        ("held_out_sha256", data.held_out, decision.data.held_out_sha256),
    ):
        path = root / name
        if not path.is_file():
            raise RecipeError(
                "missing-data", "no such file", where=str(path), next_action="restore the data file the plan names"
            )
        yield from _differ(f"decision.data.{field}", planned, sha256_file(path))


def _environment(decision: Decision) -> Iterator[str]:
    found = versions()
    for name, planned in decision.environment.items():
        yield from _differ(f"decision.environment.{name}", planned.split("+")[0], found.get(name, "not known"))


def _variables(decision: Decision) -> Iterator[str]:
    compiled = any(one.provider == "compile" and not one.rejected for one in decision.fusions)
    for name, kind in ALTERING.items():
        applies = kind == decision.cluster.device_type or (not kind and compiled)
        value = os.environ.get(name, "")
        if applies and value.lower() not in ("", "0", "false", "off", "no"):
            yield f"environment.{name}: the plan was made with it unset, found {value}"


def _kernels(decision: Decision) -> Iterator[str]:
    for place, fusion in enumerate(decision.fusions):
        if fusion.source_sha256 is not None and not fusion.rejected:
            found = source_sha256(fusion.op)
            yield from _differ(f"decision.fusions[{place}].source_sha256 ({fusion.op})", fusion.source_sha256, found)
            for op, planned in fusion.beside.items():
                yield from _differ(f"decision.fusions[{place}].beside ({op})", planned, source_sha256(op))


def _devices(decision: Decision) -> Iterator[str]:
    kind = decision.cluster.device_type
    if not available(kind):
        yield f"decision.cluster.device_type: the plan says {kind}, this machine has none"
    if kind == "cuda" and available(kind):
        import torch

        yield from _differ("decision.cluster.device_name", decision.cluster.device_name, torch.cuda.get_device_name(0))
    planned = decision.strategy.mesh.world_size
    if "WORLD_SIZE" in os.environ:
        yield from _differ("decision.strategy.mesh (world size)", planned, int(os.environ["WORLD_SIZE"]))
    if planned > decision.cluster.world_size:
        yield (
            f"decision.strategy.mesh: needs {planned} ranks, decision.cluster.world_size is "
            f"{decision.cluster.world_size}"
        )


def _strategy(decision: Decision) -> Iterator[str]:
    strategy, batch = decision.strategy, decision.recipe.batch
    yield from _differ(
        "decision.strategy: sequences a step", batch.global_batch_sequences, strategy.global_batch_sequences()
    )
    values = {**dict(strategy), **dict(strategy.mesh)}
    for axis, runnable in EXECUTABLE.items():
        if not runnable.runs(values[axis]):
            allowed = ", ".join(str(value) for value in runnable.values)
            yield f"decision.strategy.{axis}: the plan says {values[axis]}, this runtime runs {allowed}"


def _targets(decision: Decision, folder: Path) -> Iterator[str]:
    found = resolve_targets(parameter_shapes(folder), decision.recipe.lora, model_type=_text_type(folder))
    if len(found) != len(decision.lora_targets):
        yield from _differ("decision.lora_targets: number", len(decision.lora_targets), len(found))
        return
    for place, (planned, now) in enumerate(zip(decision.lora_targets, found, strict=True)):
        for field, value in planned.model_dump().items():
            yield from _differ(f"decision.lora_targets[{place}].{field}", value, getattr(now, field))


def _text_type(folder: Path) -> str:
    return read_config(folder).text_model_type
