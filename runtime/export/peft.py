"""An adapter in PEFT's own format, with experts in its fused-parameter layout (``checkpoints.peft_layout``)."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from shardwright.checkpoints.build import build_from_config
from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.peft_layout import peft_keys, peft_selection, to_peft
from shardwright.checkpoints.targets import parameter_shapes
from shardwright.runtime import record, state
from shardwright.runtime.export.router_biases import routers_of, saved_routers
from shardwright.runtime.lora.inject import adapter_names, adapter_shapes
from shardwright.runtime.lora.shared import for_each_expert
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import CheckFailed, RunError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.run import AdapterFacts

FOLDER, WEIGHTS, CONFIG = "adapter", "adapter_model.safetensors", "adapter_config.json"
REWRITTEN = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Last names of target modules that PEFT maps to expert stacks."""


def export_adapter(run_dir: Path, checkpoint: Path) -> AdapterFacts:
    """Write ``adapter/`` from the newest save, whole or not at all, and note it in run.json.

    Args:
        run_dir: of a trained run.
        checkpoint: the base, named in the adapter's configuration by its path.

    Raises:
        RunError: ``no-save``, ``not-trained``, ``damaged-save``, ``other-plan``, ``adapter-shape``,
            ``router-biases``.
        CheckFailed: ``failed``: a check of the run did not hold.
    """
    plan = require_trained(run_dir, proving=True)
    save = state.final(run_dir, plan)
    saved, biases = state.read_adapters(save), state.read_biases(save)
    order = tuple(parameter_shapes(checkpoint))
    targets = plan.decision.lora_targets
    tensors = peft_tensors(targets, saved, order, mirrored_targets(checkpoint, targets))
    tensors |= saved_routers(checkpoint, biases, targets)
    config = peft_config(plan, checkpoint)
    config |= {"modules_to_save": routers_of(biases)} if biases else {}
    work, final = run_dir / f".{FOLDER}.tmp", run_dir / FOLDER
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_atomic(work / WEIGHTS, safetensors_bytes(tensors, metadata={"format": "pt"}))
    write_atomic(work / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
    if final.exists():
        shutil.rmtree(final)
    os.replace(work, final)
    facts = AdapterFacts(
        path=str(final),
        format="peft",
        tensors=len(tensors),
        bytes=(final / WEIGHTS).stat().st_size,
        sha256=sha256_file(final / WEIGHTS),
    )
    record.update(run_dir, status="exported", adapter=facts)
    return facts


def require_trained(run_dir: Path, *, proving: bool = False) -> AdaptationPlan:
    """The plan of a run that has ended and whose checks held.

    Args:
        proving: for the adapter that the export's own checks are about: those may have failed before.

    Raises:
        RunError: ``not-trained``.
        CheckFailed: ``failed``.
    """
    kept = record.read(run_dir)
    status = kept.status
    if status not in ("trained", "exported"):
        raise RunError(
            "not-trained",
            f"the run's status is {status!r}",
            where=str(run_dir),
            next_action="finish it with `shardwright resume`",
        )
    failed = [one for one in kept.checks if not one.passed and not (proving and one.stage == "export")]
    if failed:
        raise CheckFailed(
            "failed",
            "; ".join(f"{one.stage}/{one.name}: {one.evidence}" for one in failed),
            where=str(run_dir),
            next_action="do not use this run's weights; where only the export failed, `shardwright resume` makes the "
            "adapter again and checks it",
        )
    return load_plan(run_dir / "plan.json")


def peft_tensors(
    targets: tuple[LoraTarget, ...],
    adapters: dict[str, Tensor],
    parameter_order: tuple[str, ...],
    mirrored: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """All adapters under PEFT's names in PEFT's layout, which has a pair for each expert: a shared one is repeated.

    Args:
        targets, adapters: the plan's and the save's.
        parameter_order: the model's parameters in module order.
        mirrored: of :func:`mirrored_targets`.

    Raises:
        RunError: ``adapter-shape`` when a saved adapter is not of the plan's size.
    """
    keys = peft_keys(targets, parameter_order)
    tensors = {}
    for target in targets:
        pair = []
        for name, shape in zip(adapter_names(target), adapter_shapes(target), strict=True):
            value = adapters.get(name)
            if value is None or tuple(value.shape) != shape:
                raise RunError(
                    "adapter-shape",
                    f"the save holds {'nothing' if value is None else list(value.shape)}, the plan says {list(shape)}",
                    where=name,
                    next_action="export with the plan that the run was made with",
                )
            pair.append(value)
        if target.shared:
            pair = list(for_each_expert((pair[0], pair[1]), target.num_experts))
        key_a, key_b = keys[target.parameter]
        tensors[key_a], tensors[key_b] = to_peft(*(mirror(*pair) if target.parameter in mirrored else pair))
    return tensors


def mirrored_targets(checkpoint: Path, targets: tuple[LoraTarget, ...]) -> frozenset[str]:
    """Stacks kept as [E, in, out] that PEFT takes for [E, out, in].

    PEFT goes by the experts module's ``is_transposed``; some families keep [E, in, out] without saying so. There PEFT
    adapts the transposed weight: what it calls A and B are our Bᵀ and Aᵀ.
    """
    if all(target.layout == "out_in" for target in targets):
        return frozenset()
    model = build_from_config(read_config(checkpoint), torch.bfloat16)
    return frozenset(
        target.parameter
        for target in targets
        if target.layout == "in_out" and not getattr(model.get_submodule(target.module), "is_transposed", False)
    )


def mirror(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves for the transposed weight; twice gives them back."""
    return b.transpose(-1, -2).contiguous(), a.transpose(-1, -2).contiguous()


def peft_config(plan: AdaptationPlan, checkpoint: Path) -> dict[str, Any]:
    """adapter_config.json: whole module names, so that nothing else can match.

    Dropout is left out where PEFT adapts weights by name: it refuses it there, and inference has none.
    """
    lora, targets = plan.decision.recipe.lora, plan.decision.lora_targets
    shapes = parameter_shapes(checkpoint)
    selection = loadable_selection(targets, any(len(shape) == 3 for shape in shapes.values()))
    by_weight = set(selection["target_parameters"])
    ranks = {target.parameter if target.parameter in by_weight else target.module: target.rank for target in targets}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint.resolve()),
        "r": lora.rank,
        "lora_alpha": number(lora.alpha),
        "use_rslora": lora.use_rslora,
        "lora_dropout": 0.0 if by_weight else float(lora.dropout),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": selection["target_modules"],
        "target_parameters": selection["target_parameters"] or None,
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items() if rank != lora.rank},
        "alpha_pattern": {},
    }


def loadable_selection(targets: tuple[LoraTarget, ...], has_experts: bool) -> dict[str, list[str]]:
    """What PEFT is told to adapt, in a form that it does not rewrite.

    In MoE families PEFT takes a target module with one of :data:`REWRITTEN` as its last name for a projection of the
    former per-expert modules: it adapts the expert stacks instead, with twice the rank, and drops the module. A dense
    MLP or a shared expert is therefore named by its weight; the keys in the file are the same.
    """
    selection = peft_selection(targets)
    rewritten = [name for name in selection["target_modules"] if has_experts and _rewritten(name)]
    return {
        "target_modules": [name for name in selection["target_modules"] if name not in rewritten],
        "target_parameters": sorted([*selection["target_parameters"], *(f"{name}.weight" for name in rewritten)]),
    }


def _rewritten(module: str) -> bool:
    return module.rsplit(".", 1)[-1] in REWRITTEN


def number(text: str) -> int | float:
    """Decimal text as JSON keeps it: whole numbers as integers."""
    value = float(text)
    return int(value) if value.is_integer() else value
