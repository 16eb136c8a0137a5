"""A slice as the cost model has it: memory, step, each kind of layer, and how many layers a device holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from k3_assembly import kind_times
from k3_model import Slice
from k3_slice_fusions import decisions
from k3_slice_model import Described, described
from lines import RESULTS
from torch import nn
from train_step_decisions import register

from shardwright.kernels.packed_experts.configs import dequantises
from shardwright.schemas.cluster import Calibration
from shardwright.schemas.cost import CostReport
from shardwright.schemas.recipe import BatchSpec, DataSpec, PrecisionSpec, Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.calibration import load_calibration
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.cost.fusion import FusedProviders

KERNELS = {"experts": "packed_experts", "mla": "dsa"}
"""Kernel of a fusion that has another name."""
OPERATORS_OF_COST = {"mla": "dsa"}
"""Operator of the cost model that stands for a fusion of another name."""


@dataclass(frozen=True)
class Priced:
    """The cost model's view of a slice with the kernels that run."""

    report: CostReport
    kinds: dict[str, float]
    """Kind → milliseconds of a forward, its recomputation and a backward."""


def newest_calibration(folder: Path = RESULTS) -> Path | None:
    """Of an H200, among the results."""
    found = sorted(folder.glob("calibration-nvidia-h200*.json"))
    return found[-1] if found else None


def calibration_of(path: Path | None) -> Calibration | None:
    return None if path is None else load_calibration(path)


def recipe_of(what: Described, tokens: int, batch: int = 1) -> Recipe:
    return Recipe(
        data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
        batch=BatchSpec(sequence_tokens=tokens, global_batch_sequences=batch),
        precision=PrecisionSpec(base="bfloat16", adapter="float32"),
        lora=what.lora,
    )


def priced(what: Described, tokens: int, fused: FusedProviders, calibration: Calibration | None = None) -> Priced:
    """The slice on one H200."""
    work, cluster = workload(what.profile, recipe_of(what, tokens), what.targets), load_cluster("h200-1")
    strategy = ParallelStrategy(mesh=Mesh(), checkpointing="full", base_format="mxfp4" if what.packed else "compute")
    report = price(work, cluster, strategy, fused, calibration)
    kinds = {one.kind: one.one_ms for one in kind_times(work, cluster, strategy, fused, calibration)}
    return Priced(report, kinds)


def fused_in(model: nn.Module, fusions: Iterable[str]) -> FusedProviders:
    """What is installed, as the cost model reads it."""
    return FusedProviders.of(decisions(model, tuple(fusions)))


def fused_everywhere(fusions: Iterable[str], layers: int, packed: bool) -> FusedProviders:
    """The same before there is a model: each kernel in every layer that has a place for it."""
    names = tuple(fusions)
    register(names)
    modules = tuple(f"layers.{layer}.{norm}" for layer in range(layers) for norm in ("first", "second"))
    kernels = {
        OPERATORS_OF_COST.get(name, name): KERNELS.get(name, name) if packed or name != "experts" else "moe_layer"
        for name in names
    }
    return FusedProviders({op: ("shardwright", modules) for op in kernels}, kernels)


def most_layers(
    cut: Callable[[int], Slice], most: int, least: int, tokens: int, fusions: tuple[str, ...], folder: Path
) -> int:
    """The longest slice whose predicted memory one H200 holds.

    The prediction has a decoded copy of a packed layer; at few rows an expert the operator decodes in its loop instead.

    Args:
        cut: the slice of so many layers.
        most: and ``least``: layers to try.
    """
    for layers in range(most, least, -1):
        what = described(cut(layers), folder / str(layers))
        memory = priced(what, tokens, fused_everywhere(fusions, layers, what.packed)).report.memory
        copy = sum(one.bytes for one in memory.components if one.name == "unpacked_layer")
        if memory.reserved_bytes - (0 if copies(what, tokens) else copy) <= memory.budget_bytes:
            return layers
    return least


def copies(what: Described, tokens: int) -> bool:
    """Whether the packed operator makes a decoded copy of a layer for a step's rows."""
    shape = what.profile.shape
    return dequantises(tokens * shape.experts_per_token, shape.num_experts, trains=True)
