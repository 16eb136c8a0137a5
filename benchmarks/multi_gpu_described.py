"""A setting of ``multi_gpu.py`` as the cost model needs to know it: profile, targets and the operators it installs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from multi_gpu_cases import Setting
from multi_gpu_model import fusions_for
from points_model import Described, adapted_model, described
from points_shapes import Point
from train_step_decisions import decisions_for

from shardwright.schemas.fusion import FusionDecision


def described_setting(setting: Setting) -> Described:
    """Profile, recipe, targets and fusions of a setting; models are built on meta once."""
    point = Point("eager", setting.model, setting.targets, setting.layers, setting.tokens, 1, "full")
    fused = _decisions(setting.model, setting.targets, setting.layers, setting.operators)
    named = set(fusions_for(setting.operators, setting.strategy.mesh.ep))
    fusions = tuple(one if one.op in named else one.model_copy(update={"op": "grouped_lora_mlp"}) for one in fused)
    return replace(described(point), fusions=fusions)


@lru_cache(maxsize=8)
def _decisions(
    model: str, targets: tuple[str, ...], layers: int, operators: tuple[str, ...]
) -> tuple[FusionDecision, ...]:
    built, _, _, _ = adapted_model(Point("eager", model, targets, layers, 2048, 1, "none"), torch.bfloat16)
    return decisions_for(built, operators)
