"""After export in another form: the file alone, read by its published names, gives the training model's logits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.targets import parameter_shapes
from shardwright.runtime import probe, record, state
from shardwright.runtime.checks.compare import require
from shardwright.runtime.checks.export import LOGIT_TOLERANCE, WHOLE_MODEL_SHARE, deviation
from shardwright.runtime.device import available_host_bytes
from shardwright.runtime.export import merged, per_expert
from shardwright.runtime.export.peft import CONFIG, WEIGHTS
from shardwright.runtime.export.serving import CHECKED, problems
from shardwright.runtime.export.split import name_map, parts
from shardwright.runtime.parallelize import DTYPES
from shardwright.runtime.reference import load_plain
from shardwright.schemas.errors import RunError
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.run import CheckResult

PRODUCT_TOLERANCE = 1e-6
"""Allowed difference of s · B A from the save's, relative to its largest value: padding and scaling are fp32."""


def check_per_expert(run_dir: Path, checkpoint: Path) -> tuple[CheckResult, ...]:
    """Prove ``adapter-per-expert/``: names, values against the save, logits where the base fits.

    Raises:
        RunError: ``no-adapter``.
        CheckFailed: with the name of the failed check.
    """
    plan, folder = load_plan(run_dir / "plan.json"), run_dir / per_expert.FOLDER
    _require_files(folder, (WEIGHTS, CONFIG))
    file, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    shapes = {key: tuple(value.shape) for key, value in file.items()}
    broken = problems(shapes, config, gated=per_expert.gated(checkpoint))
    checks = [_result("serving-names", not broken, f"{len(file)} tensors; {CHECKED}; broken: {broken[:5] or 'none'}")]
    scaling = config["lora_alpha"] / config["r"]
    checks.append(_products(plan, run_dir, checkpoint, file, scaling))
    if all(check.passed for check in checks) and _fits(plan, checkpoint):
        base, _ = load_plain(checkpoint, DTYPES[plan.decision.recipe.precision.base], torch.device("cpu"))
        left = apply_by_name(base, checkpoint, file, scaling)
        checks.append(_result("every-key-consumed", not left, f"{len(file)} tensors; not taken: {left[:5] or 'none'}"))
        checks.append(_logits("per-expert-logits-equal", plan, run_dir, base))
    return _noted(run_dir, folder, checks)


def check_merged(run_dir: Path, checkpoint: Path) -> tuple[CheckResult, ...]:
    """Prove ``merged/``: the base's names, types and shapes, and the training model's logits where it fits.

    A packed base loses a part of the change (``retained_delta`` tells how much), so its logits are not compared.

    Raises:
        RunError: ``no-adapter``.
        CheckFailed: with the name of the failed check.
    """
    plan, folder = load_plan(run_dir / "plan.json"), run_dir / merged.FOLDER
    _require_files(folder, ("config.json",))
    ours, theirs = read_headers(folder), read_headers(checkpoint)
    layout = [{name: (one.dtype, one.shape) for name, one in side.tensors.items()} for side in (ours, theirs)]
    differs = [name for name in {**layout[0], **layout[1]} if layout[0].get(name) != layout[1].get(name)]
    checks = [
        _result(
            "merged-layout", not differs, f"{len(layout[0])} tensors as in the base; other: {differs[:5] or 'none'}"
        )
    ]
    packed = any(name_map(checkpoint)[0].logical(name).format != "plain" for name in _logical_names(plan, checkpoint))
    if not differs and not packed and _fits(plan, checkpoint):
        model, _ = load_plain(folder, DTYPES[plan.decision.recipe.precision.base], torch.device("cpu"))
        checks.append(_logits("merged-logits-equal", plan, run_dir, model))
    return _noted(run_dir, folder, checks)


def _logical_names(plan: AdaptationPlan, checkpoint: Path) -> set[str]:
    return {part.tensor for part in parts(plan.decision.lora_targets, name_map(checkpoint)[0])}


def apply_by_name(base: nn.Module, checkpoint: Path, file: dict[str, Tensor], scaling: float) -> list[str]:
    """Add an adapter into a plain base as an engine would: by the published names alone. Returns keys left over."""
    names, left = name_map(checkpoint)[0], dict(file)
    parameters = dict(base.named_parameters())
    for parameter, value in parameters.items():
        for piece in names.pieces(parameter):
            stem = "base_model.model." + piece.tensor.removesuffix(".weight")
            a, b = left.pop(f"{stem}.lora_A.weight", None), left.pop(f"{stem}.lora_B.weight", None)
            if a is None or b is None:
                continue
            change = scaling * (b.float() @ a.float())[tuple(slice(*extent) for extent in piece.source)]
            order = [axis for axis in piece.axes if axis is not None]
            change = change if order == sorted(order) else change.T
            box = tuple(slice(*extent) for extent in piece.target)
            with torch.no_grad():
                value[box] = (value[box].float() + change.reshape(value[box].shape)).to(value.dtype)
    return sorted(left)


def _products(
    plan: AdaptationPlan, run_dir: Path, checkpoint: Path, file: dict[str, Tensor], scaling: float
) -> CheckResult:
    saved = state.read_adapters(state.final(run_dir, plan))
    worst, where = 0.0, ""
    every = parts(plan.decision.lora_targets, name_map(checkpoint)[0])
    for part in every:
        stem = "base_model.model." + part.tensor.removesuffix(".weight")
        a, b = file.get(f"{stem}.lora_A.weight"), file.get(f"{stem}.lora_B.weight")
        if a is None or b is None:
            return _result("per-expert-values", False, f"{stem} is not in the file", "by_layer")
        wanted = part.delta(saved)
        error = float((scaling * (b.float() @ a.float()) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
        if error > worst:
            worst, where = error, stem
    evidence = f"s·BA of {len(every)} weights against the save: worst {worst:.1e} of the largest value {where}"
    return _result("per-expert-values", worst <= PRODUCT_TOLERANCE, evidence, "by_layer")


def _logits(name: str, plan: AdaptationPlan, run_dir: Path, model: nn.Module) -> CheckResult:
    kept = load_file(probe.path(run_dir))
    with torch.no_grad():
        ours = model(input_ids=kept["input_ids"], use_cache=False).logits.float()
    dtype = plan.decision.recipe.precision.base
    error, allowed = deviation(ours, kept["logits"], dtype), LOGIT_TOLERANCE[dtype]
    evidence = f"differs from the training model by {error:.1e} of the largest logit, allowed {allowed:.0e}"
    return _result(name, error <= allowed, evidence)


def _fits(plan: AdaptationPlan, checkpoint: Path) -> bool:
    size = DTYPES[plan.decision.recipe.precision.base].itemsize
    needed = sum(torch.Size(shape).numel() for shape in parameter_shapes(checkpoint).values()) * size
    return needed <= WHOLE_MODEL_SHARE * available_host_bytes()


def _require_files(folder: Path, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise RunError(
            "no-adapter",
            f"no {', '.join(missing)}",
            where=str(folder),
            next_action="export first with `shardwright export --format …`",
        )


def _result(name: str, passed: bool, evidence: str, scope: str = "whole_model") -> CheckResult:
    body = {"stage": "export", "name": name, "passed": passed, "evidence": evidence, "scope": scope}
    return CheckResult.model_validate(body)


def _noted(run_dir: Path, folder: Path, checks: list[CheckResult]) -> tuple[CheckResult, ...]:
    record.update(run_dir, checks=record.with_checks(record.read(run_dir), checks))
    require(tuple(checks), str(folder))
    return tuple(checks)
