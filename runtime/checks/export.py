"""After export: a fresh PEFT loads the adapter into a fresh base; nothing is left over and the logits are the run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwright.checkpoints.build import build_from_config
from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.peft_layout import from_peft, peft_keys
from shardwright.checkpoints.targets import parameter_shapes
from shardwright.runtime import probe, record, state
from shardwright.runtime.checks.compare import require
from shardwright.runtime.device import available_host_bytes
from shardwright.runtime.export.peft import CONFIG, FOLDER, WEIGHTS, mirror, mirrored_targets
from shardwright.runtime.export.router_biases import saved_routers
from shardwright.runtime.lora.inject import adapter_names
from shardwright.runtime.parallelize import DTYPES
from shardwright.runtime.reference import load_plain
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import RunError
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.run import CheckResult

LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Allowed :func:`deviation`."""
CHANGE_OVER_ERROR = 10.0
"""An adapter must change the base's logits by this many times the error of the comparison."""
WHOLE_MODEL_SHARE = 0.5
"""The base is loaded whole where its weights take at most this share of the free host memory."""


def check_adapter(run_dir: Path, checkpoint: Path) -> tuple[CheckResult, ...]:
    """Prove an exported adapter by loading it, and note the results in run.json.

    Raises:
        RunError: ``no-adapter``.
        CheckFailed: with the name of the failed check.
    """
    plan = load_plan(run_dir / "plan.json")
    folder = run_dir / FOLDER
    if not (folder / WEIGHTS).is_file() or not (folder / CONFIG).is_file():
        raise RunError(
            "no-adapter",
            f"no {WEIGHTS} with {CONFIG}",
            where=str(folder),
            next_action="export first with `shardwright export`",
        )
    checks = [_same_file(run_dir, folder), _values(plan, run_dir, checkpoint, folder)]
    if all(check.passed for check in checks):
        checks += _loaded(plan, run_dir, checkpoint, folder)
    record.update(run_dir, checks=record.with_checks(record.read(run_dir), checks))
    require(checks, str(folder))
    return tuple(checks)


def _same_file(run_dir: Path, folder: Path) -> CheckResult:
    facts = record.read(run_dir).adapter
    found = sha256_file(folder / WEIGHTS)
    expected = facts.sha256 if facts else "none"
    return CheckResult(
        stage="export",
        name="adapter-file",
        passed=found == expected,
        evidence=f"{WEIGHTS} hashes to {found[:16]}…, the export recorded {expected[:16]}…",
        scope="local",
    )


def _values(plan: AdaptationPlan, run_dir: Path, checkpoint: Path, folder: Path) -> CheckResult:
    """Every target's pair is in the file, bit-equal to the save after PEFT's layout is undone; nothing else is."""
    targets = plan.decision.lora_targets
    save = state.final(run_dir, plan)
    saved = state.read_adapters(save)
    file = load_file(folder / WEIGHTS)
    keys = peft_keys(targets, tuple(parameter_shapes(checkpoint)))
    mirrored = mirrored_targets(checkpoint, targets)
    wrong = []
    for target in targets:
        pair = [file.pop(key, None) for key in keys[target.parameter]]
        if pair[0] is None or pair[1] is None:
            wrong.append(f"{target.parameter} is not in the file")
            continue
        ours = from_peft(pair[0], pair[1], target.num_experts)
        ours = mirror(*ours) if target.parameter in mirrored else ours
        ours, repeated = _once(ours) if target.shared else (ours, True)
        if not repeated:
            wrong.append(f"{target.parameter} has different pairs for experts that share one")
        for name, value in zip(adapter_names(target), ours, strict=True):
            if name not in saved or not torch.equal(value, saved[name]):
                wrong.append(f"{name} differs from the save")
    for key, value in saved_routers(checkpoint, state.read_biases(save), targets).items():
        held = file.pop(key, None)
        if held is None or not torch.equal(held, value):
            wrong.append(f"{key} is not the run's")
    wrong += [f"{key} belongs to no target" for key in file]
    return CheckResult(
        stage="export",
        name="adapter-values",
        passed=not wrong,
        evidence=f"{len(targets)} targets compared with the save bit by bit; wrong: "
        + ("; ".join(wrong[:5]) or "none"),
        scope="by_layer",
    )


def _once(pair: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], bool]:
    """The pair that all experts share, and whether every expert of the file has it."""
    a, b = pair
    return (a[0], b[0]), bool((a == a[0]).all()) and bool((b == b[0]).all())


def _loaded(plan: AdaptationPlan, run_dir: Path, checkpoint: Path, folder: Path) -> list[CheckResult]:
    dtype = DTYPES[plan.decision.recipe.precision.base]
    needed = sum(torch.Size(shape).numel() for shape in parameter_shapes(checkpoint).values()) * dtype.itemsize
    if needed > WHOLE_MODEL_SHARE * available_host_bytes():
        base: nn.Module = build_from_config(read_config(checkpoint), dtype)
        return [_consumed(attach(base, folder, meta=True), folder, "by_layer", values=False)]
    base, _ = load_plain(checkpoint, dtype, torch.device("cpu"))
    model = attach(base, folder)
    return [_consumed(model, folder, "whole_model", values=True), _logits(plan, run_dir, model)]


def attach(base: nn.Module, folder: Path, *, meta: bool = False) -> Any:
    """A fresh PEFT model with the adapter of a folder."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, str(folder), is_trainable=False, low_cpu_mem_usage=meta).eval()


def _consumed(model: Any, folder: Path, scope: str, *, values: bool) -> CheckResult:
    """PEFT holds every tensor of the file, and no adapter tensor that the file lacks."""
    from peft import get_peft_model_state_dict

    # An adapted head would otherwise count as an embedding to save whole: base weights, which no adapter holds.
    held: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    file = load_file(folder / WEIGHTS)
    wrong = [f"{key} was not taken" for key in file if key not in held]
    wrong += [f"{key} was left at its first value" for key in held if key not in file]
    wrong += [f"{key} has another shape" for key in file if key in held and held[key].shape != file[key].shape]
    if values and not wrong:
        wrong += [f"{key} has other values" for key in file if not torch.equal(held[key].to(file[key]), file[key])]
    return CheckResult.model_validate(
        {
            "stage": "export",
            "name": "every-key-consumed",
            "passed": not wrong,
            "evidence": f"{len(file)} tensors in the file, {len(held)} in a fresh PEFT model; wrong: "
            + ("; ".join(wrong[:5]) or "none"),
            "scope": scope,
        }
    )


def deviation(found: Tensor, expected: Tensor, base_dtype: str) -> float:
    """How far logits [1, P, V] are from the expected ones, in units of the largest expected logit.

    In float32 it is the worst token's. In bfloat16 it is the median token's: two right bf16 forwards may send a token
    to different experts where its router scores tie, which moves that token alone; a wrong adapter moves all.
    """
    scale = expected.abs().max().clamp_min(1e-12)
    by_token = (found - expected).abs().amax(dim=-1).flatten() / scale
    return float(by_token.max() if base_dtype == "float32" else by_token.median())


def _logits(plan: AdaptationPlan, run_dir: Path, model: Any) -> CheckResult:
    kept = load_file(probe.path(run_dir))
    with torch.no_grad():
        ours = model(input_ids=kept["input_ids"], use_cache=False).logits.float()
        with model.disable_adapter():
            base = model(input_ids=kept["input_ids"], use_cache=False).logits.float()
    dtype = plan.decision.recipe.precision.base
    error, change = deviation(ours, kept["logits"], dtype), deviation(base, kept["logits"], dtype)
    allowed = LOGIT_TOLERANCE[dtype]
    which = "the worst" if dtype == "float32" else "the median"
    return CheckResult(
        stage="export",
        name="logits-equal",
        passed=error <= allowed and change > CHANGE_OVER_ERROR * error and change > 0,
        evidence=f"logits of {kept['input_ids'].numel()} held-out tokens, {which} token: fresh PEFT differs from the "
        f"training model by {error:.1e} of the largest logit (allowed {allowed:.0e}), from the base by {change:.1e}",
    )
