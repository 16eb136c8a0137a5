"""The adapter with one pair for each published weight, as vLLM and SGLang read it (``runtime.export.serving``).

Engines know one rank and one scaling for the whole adapter: smaller ranks are padded with zeros, other scalings go into
B. Products B A, and so outputs, stay what they were.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.layouts import expert_layout
from shardwright.runtime import record, state
from shardwright.runtime.export.peft import CONFIG, WEIGHTS, number, require_trained
from shardwright.runtime.export.router_biases import require_frozen
from shardwright.runtime.export.serving import problems
from shardwright.runtime.export.split import Part, name_map, parts, require_adapters
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import CheckFailed, LegalityError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import ExportFacts

FOLDER = "adapter-per-expert"


def export_per_expert(run_dir: Path, checkpoint: Path) -> ExportFacts:
    """Write ``adapter-per-expert/`` from the last save, whole or not at all, and note it in run.json.

    Raises:
        RunError: as the PEFT export.
        LegalityError: ``fused-on-the-hub`` where the files stack their experts: engines read the PEFT layout there.
        CheckFailed: ``serving-names`` when a rule of the engines is broken; nothing is written.
    """
    plan = require_trained(run_dir)
    save = state.final(run_dir, plan)
    require_frozen(state.read_biases(save), "an adapter for serving engines")
    adapters = state.read_adapters(save)
    tensors, config = per_expert(plan, checkpoint, adapters)
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    broken = problems(shapes, config, gated=gated(checkpoint))
    if broken:
        raise CheckFailed(
            "serving-names",
            "; ".join(broken[:5]),
            where=FOLDER,
            next_action="serve the merged checkpoint (`shardwright export --format merged`), or adapt whole groups",
        )
    work, target = run_dir / f".{FOLDER}.tmp", run_dir / FOLDER
    shutil.rmtree(work, ignore_errors=True)
    write_atomic(work / WEIGHTS, safetensors_bytes(tensors, metadata={"format": "pt"}))
    write_atomic(work / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
    if target.exists():
        shutil.rmtree(target)
    os.replace(work, target)
    facts = ExportFacts(
        path=str(target),
        format="per_expert",
        tensors=len(tensors),
        bytes=(target / WEIGHTS).stat().st_size,
        sha256=sha256_file(target / WEIGHTS),
    )
    record.add_export(run_dir, facts)
    return facts


def per_expert(
    plan: AdaptationPlan, checkpoint: Path, adapters: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration under published names.

    Raises:
        LegalityError: ``fused-on-the-hub``.
        RunError: ``adapter-shape``.
    """
    targets = plan.decision.lora_targets
    require_adapters(targets, adapters)
    every = parts(targets, name_map(checkpoint)[0])
    _require_separate(every)
    rank, scaling = max(target.rank for target in targets), _common_scaling(targets)
    tensors: dict[str, Tensor] = {}
    for part in every:
        stem = "base_model.model." + part.tensor.removesuffix(".weight")
        a, b = part.halves(adapters)
        factor = float(part.target.scaling) / scaling
        tensors[f"{stem}.lora_A.weight"] = _padded(a, rank, 0)
        tensors[f"{stem}.lora_B.weight"] = _padded(b if factor == 1.0 else b * factor, rank, 1)
    modules = sorted({key.split(".lora_")[0].rsplit(".", 1)[-1] for key in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint.resolve()),
        "r": rank,
        "lora_alpha": number(repr(scaling * rank)),
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": modules,
    }
    return tensors, config


def gated(checkpoint: Path) -> bool:
    """Whether the family's experts have a gate; families without listed experts are taken to have one."""
    try:
        return expert_layout(read_config(checkpoint).text_model_type).gated
    except LegalityError:
        return True


def _common_scaling(targets: tuple[LoraTarget, ...]) -> float:
    """The scaling that most targets have, so that most of B stays untouched."""
    every = [float(target.scaling) for target in targets]
    return max(sorted(set(every)), key=every.count)


def _padded(value: Tensor, rank: int, dim: int) -> Tensor:
    missing = rank - value.shape[dim]
    if not missing:
        return value.clone().contiguous()  # both halves of a merged projection share A; the file has it twice
    shape = [missing if place == dim else size for place, size in enumerate(value.shape)]
    return torch.cat([value, value.new_zeros(shape)], dim)


def _require_separate(every: list[Part]) -> None:
    """One pair a file tensor: the tensor belongs to one target and, where it is an expert's, to one expert."""
    owners: dict[str, set[str]] = {}
    for part in every:
        owners.setdefault(part.tensor, set()).add(part.target.parameter)
        if part.stacked or part.transposed or len(owners[part.tensor]) > 1:
            raise LegalityError(
                "fused-on-the-hub",
                f"the checkpoint keeps {part.tensor} as one tensor for several weights; the per-expert layout has one "
                "pair for each published weight",
                where=part.target.parameter,
                next_action="serve the PEFT adapter: vLLM reads stacked experts in PEFT's layout; or export merged",
            )
