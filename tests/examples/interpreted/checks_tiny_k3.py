"""tiny-k3 as a plan for one H200 adapts it, in Triton's CPU interpreter, fp32: fused operators against none.

The structure agent reads the example's files and settles its proposals for the mesh; what it decides is installed on
the model as a worker builds it, adapters in place, weights from the files, experts decoded: the operator on
packed ones computes in bf16 alone. Compiled variants stay out: they are torch's own. Logits, the loss
and every adapter's gradient, to 1e-5 of the largest value for each operator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.agents.structure.join import recertify  # noqa: E402
from shardwright.agents.structure.run import run_structure  # noqa: E402
from shardwright.checkpoints.profile import profile_checkpoint  # noqa: E402
from shardwright.checkpoints.targets import resolve_targets  # noqa: E402
from shardwright.kernels.evidence import EvidenceStore  # noqa: E402
from shardwright.kernels.registry import source_sha256  # noqa: E402
from shardwright.runtime.device import open_device  # noqa: E402
from shardwright.runtime.experts.balance import LoadMeter  # noqa: E402
from shardwright.runtime.files import open_files  # noqa: E402
from shardwright.runtime.fuse import Switch, fusions_off, install_fusions  # noqa: E402
from shardwright.runtime.load.stream import load_weights, materialize  # noqa: E402
from shardwright.runtime.lora.inject import inject  # noqa: E402
from shardwright.runtime.losses import logits_of, summed_loss  # noqa: E402
from shardwright.runtime.mesh import open_mesh  # noqa: E402
from shardwright.runtime.ownership import owned_parameters  # noqa: E402
from shardwright.schemas.fusion import FusionDecision, FusionProposal  # noqa: E402
from shardwright.schemas.ops import MeasuredTime  # noqa: E402
from shardwright.schemas.recipe import Recipe  # noqa: E402
from shardwright.schemas.strategy import Mesh, ParallelStrategy  # noqa: E402
from shardwright.search_spaces.catalogue import load_cluster  # noqa: E402

EXAMPLE = Path(os.environ["TINY_K3"])
TOKENS, TOLERANCE = 32, 1e-5


@dataclass(frozen=True)
class Planned:
    """What the agent found and decided for one H200."""

    recipe: Recipe
    proposals: tuple[FusionProposal, ...]
    decisions: tuple[FusionDecision, ...]

    def kernels(self, *patterns: str) -> tuple[FusionDecision, ...]:
        """Decided operators of ours, of some patterns or of all."""
        own = [one for one in self.decisions if one.provider == "shardwright"]
        return tuple(one for one in own if not patterns or one.pattern in patterns)


def verified_mixes(path: Path) -> Path:
    """A file that says what a device's would: the mix of residual rows is verified at its present source."""
    time = MeasuredTime(
        op="attention_residual",
        provider="shardwright",
        pass_name="fwd",
        device="none",
        driver="none",
        versions={},
        source_sha256=source_sha256("attention_residual"),
        shape_bucket="none",
        dtype="bfloat16",
        median_ms=1.0,
        floor_ms=1.0,
        peak_bytes=0,
        repeats=1,
        date="2026-12-01",
    )
    EvidenceStore(path).add([time])
    return path


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    own = verified_mixes(tmp_path_factory.mktemp("evidence") / "own.jsonl")
    folder = EXAMPLE / "checkpoint"
    recipe = Recipe.model_validate(yaml.safe_load((EXAMPLE / "recipe.yaml").read_text()))
    profile, cluster = profile_checkpoint(folder), load_cluster("h200-1")
    found = run_structure(folder, profile, cluster, recipe, (own,))
    proposals, decisions = recertify(found.proposals, ParallelStrategy(mesh=Mesh()), cluster, recipe)
    return Planned(recipe, proposals, decisions)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    device = open_device("cpu", 0)
    dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
    yield device, open_mesh(Mesh(), device)
    dist.destroy_process_group()


def live(planned: Planned, one_rank: Any, decisions: tuple[FusionDecision, ...]) -> tuple[Any, tuple[Switch, ...]]:
    """The model as a worker has it; B of each adapter random, so that A learns too."""
    device, ranks = one_rank
    folder = EXAMPLE / "checkpoint"
    model, files = open_files(folder, torch.float32)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    targets = resolve_targets(shapes, planned.recipe.lora, model_type=files.config.text_model_type)
    inject(
        model,
        targets,
        model_type=files.config.text_model_type,
        ranks=ranks,
        meter=LoadMeter(),
        dropout=0.0,
        dtype=torch.float32,
    )
    switches = install_fusions(model, decisions)
    materialize(model, device)
    load_weights(model, folder, files.headers, files.names, device, lora_seed=0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, owned in owned_parameters(model).items():
            if name.endswith("lora_b"):
                owned.local().normal_(0.0, 0.1, generator=generator)
    return model, switches


def run(model: Any) -> list[Tensor]:
    """Logits, loss, and the gradient of every adapter in the order of its name."""
    ids = torch.arange(TOKENS).view(1, -1) * 7 % 200 + 8
    learning = {name: one for name, one in model.named_parameters() if one.requires_grad}
    loss = summed_loss(model, ids) / TOKENS
    gradients = torch.autograd.grad(loss, [learning[name] for name in sorted(learning)])
    with torch.no_grad():
        logits = logits_of(model, ids, None)
    return [logits.detach(), loss.detach().view(1), *gradients]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def test_every_part_of_the_family_is_found_and_proved(planned: Planned) -> None:
    """Experts, norms, activation, latent experts, delta rule, latent attention, residuals, each in its layers."""
    legal: dict[str, set[str]] = {}
    for one in planned.proposals:
        if all(o.status == "proved" for o in one.certificate.obligations if o.name != "sharding-boundary"):
            legal.setdefault(one.pattern, set()).add(one.region.layer_kind.split("/")[0].removesuffix("-2"))
    experts = {"linear-attention+moe", "dsa+moe", "mla+moe"}
    delta = {"linear-attention+dense", "linear-attention+moe"}
    wanted = {
        "experts": experts,
        "router": experts,
        "latent_moe": experts,
        "shared_expert": experts,
        "swiglu": experts | delta,
        "rms_norm": experts | delta | {"final"},
        "gated_rms_norm": delta,
        "delta_rule_layer": delta,
        "mla_gated": {"dsa+moe", "mla+moe"},
        "attention_residual": experts | delta | {"final"},
        "linear_cross_entropy": {"final"},
    }
    assert {name: kinds - legal.get(name, set()) for name, kinds in wanted.items()} == {name: set() for name in wanted}


@pytest.mark.parametrize("pattern", ["rms_norm", "gated_rms_norm", "router", "attention_residual"])
def test_each_operator_that_the_plan_chooses_equals_none(planned: Planned, one_rank: Any, pattern: str) -> None:
    decisions = planned.kernels(pattern)
    model, switches = live(planned, one_rank, decisions)
    assert len(switches) == sum(len(one.modules) for one in decisions) > 0
    with fusions_off(switches):
        expected = run(model)
    assert all(float(part.abs().max()) > 0 for part in expected), "every adapter learns"
    assert distance(run(model), expected) < TOLERANCE


def test_all_that_the_plan_chooses_together(planned: Planned, one_rank: Any) -> None:
    """Logits and loss to 1e-5. Gradients are as near to those in fp64 as the unfused model's, which rounds by 3e-5.

    Without the experts: alone they are within 1e-5, and their sums in another order move what follows by as much again.
    """
    assert {"rms_norm", "gated_rms_norm", "router", "experts"} <= {one.pattern for one in planned.kernels()}
    chosen = tuple(one for one in planned.kernels() if one.pattern != "experts")
    model, switches = live(planned, one_rank, chosen)
    found = run(model)
    with fusions_off(switches):
        expected = run(model)
        exact = run(model.double())
    assert distance(found[:2], expected[:2]) < TOLERANCE
    rounding = distance(expected, exact)
    assert rounding < 1e-4 and distance(found, exact) < rounding + TOLERANCE
