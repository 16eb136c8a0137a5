"""Plans of the suite: what to verify and to time, the most important first, in calls of bounded length.

A step verifies operators, then times cases of them. The seconds are assumptions for one H200 until a call has
measured them (``suite_calls`` keeps what each piece took); they decide only where a call ends.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from shardwright.kernels.registry import OPERATORS
from shardwright.schemas.base import Model
from shardwright.schemas.errors import KernelError

LIMIT_S = 540
"""Seconds of one call: a machine that ends a command after 600 then has time to hand back what was written."""


class SuiteStep(Model):
    """Operators to verify, and the beginnings of the cases to time once those are right."""

    verify: tuple[str, ...]
    cases: tuple[str, ...] = ()
    part_s: float = 40.0
    """Seconds that one part of a verification takes: one suite in one dtype."""
    pass_s: float = 20.0
    """Seconds that one pass of one case takes, with its rivals."""


EXPERTS = (
    SuiteStep(verify=("moe_layer",), cases=("moe/128e8", "moe/896e16"), pass_s=12),
    SuiteStep(verify=("moe_layer",), cases=("moe-lora/128e8", "moe-lora/896e16"), pass_s=20),
    SuiteStep(verify=("grouped_lora_mlp",), cases=("moe/k3-ep64", "moe-lora/k3-ep64")),
    SuiteStep(verify=("moe_layer",), cases=("moe/256e8", "moe-lora/256e8"), pass_s=30),
    SuiteStep(verify=("linear_cross_entropy",), cases=("linear-ce/8k",), pass_s=25),
    SuiteStep(verify=("packed_experts",), cases=("moe-mxfp4/k3-ep64-4k", "moe-mxfp4/k3-ep64-64k"), pass_s=25),
    SuiteStep(verify=("packed_experts",), cases=("moe-mxfp4/gpt-oss",), pass_s=25),
    SuiteStep(verify=("permute", "router"), cases=("permute/", "router/"), pass_s=10),
    SuiteStep(verify=("qk_norm_rope", "gated_rms_norm", "latent_norm"), cases=("qk-norm-rope/", "rope-mla/"), pass_s=8),
    SuiteStep(verify=("grouped_lora_mlp", "packed_experts", "linear_cross_entropy"), cases=("",)),
)
"""The experts with a frozen base, with adapters, packed; the loss; then their neighbours."""

EVERYTHING = (*EXPERTS, SuiteStep(verify=tuple(OPERATORS), cases=("",)))

PLANS: dict[str, tuple[SuiteStep, ...]] = {"experts": EXPERTS, "everything": EVERYTHING}


def plan_of(name_or_path: str) -> tuple[SuiteStep, ...]:
    """A shipped plan, or one in a JSON file: a list of steps.

    Raises:
        KernelError: ``unknown-plan``, ``corrupt-plan`` or ``unknown-operator``.
    """
    if name_or_path in PLANS:
        return PLANS[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise KernelError(
            "unknown-plan",
            f"{name_or_path!r} is neither a plan nor a file",
            where="kernels.suite",
            next_action=f"use one of {', '.join(PLANS)}, or a JSON file of steps",
        )
    try:
        steps = tuple(SuiteStep.model_validate(step) for step in json.loads(path.read_bytes()))
    except (ValueError, TypeError, ValidationError) as error:
        raise KernelError(
            "corrupt-plan",
            str(error).splitlines()[0],
            where=str(path),
            next_action='write a list of steps: [{"verify": ["moe_layer"], "cases": ["moe/128e8"]}]',
        ) from error
    for name in (name for step in steps for name in step.verify):
        if name not in OPERATORS:
            raise KernelError(
                "unknown-operator",
                f"no operator is called {name!r}",
                where=str(path),
                next_action=f"use one of {', '.join(OPERATORS)}",
            )
    return steps
