"""What a slow host costs: a floor under small micro-batches, nothing under large ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwright.schemas.cluster import Calibration
from shardwright.schemas.cost import CostReport
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.cost import estimate, step_compute

LAYERS = 48


def step(
    build: SimpleNamespace,
    launch_s: float,
    *,
    tokens: int,
    mesh: Mesh,
    unit_s: float = 0.0,
    sequences: int = 1,
    checkpointing: str = "none",
) -> CostReport:
    """Qwen3-30B-A3B on a device whose host takes that long."""
    cluster = build.cluster_of("h200-8")
    device = cluster.device.model_copy(update={"host_launch_s": launch_s, "unit_overhead_s": unit_s})
    cluster = cluster.model_copy(update={"device": device, "devices_per_node": mesh.world_size})
    profile = build.qwen3_30b()
    strategy = ParallelStrategy(mesh=mesh, micro_batch_sequences=sequences, checkpointing=checkpointing)
    recipe = build.recipe_of(batch=mesh.data_ranks * sequences, tokens=tokens)
    return estimate(profile, recipe, cluster, strategy, build.targets_of(profile, rank=16))


def part(report: CostReport, name: str) -> float:
    return sum(c.milliseconds for c in report.time.components if c.name == name)


def test_a_host_slower_than_its_kernels_bounds_a_small_step(build: SimpleNamespace) -> None:
    """Twice as slow a host takes twice as long; the step is its time and no longer that of its kernels."""
    one, two = (step(build, s, tokens=256, mesh=Mesh()).time.step_ms for s in (1e-3, 2e-3))
    assert two == pytest.approx(2 * one, rel=1e-2)
    small, smaller = (step(build, 1e-3, tokens=tokens, mesh=Mesh()).time.step_ms for tokens in (512, 256))
    assert small == pytest.approx(smaller, rel=1e-2)


def test_kernels_hide_a_quick_host_but_for_the_counts_that_it_reads(build: SimpleNamespace) -> None:
    """Experts by torch need each expert's rows on the host: twelve kernels a layer that the device then waits for."""
    quick, none = (step(build, s, tokens=32768, mesh=Mesh()).time.step_ms for s in (5e-6, 0.0))
    assert quick - none == pytest.approx(LAYERS * 12 * 5e-6 * 1e3, rel=1e-2)


def test_checkpointing_costs_a_slow_host_its_hooks(build: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both forwards of a layer the time of 19 kernels, for saving its tensors through hooks."""
    launch = part(step(build, 1e-3, tokens=256, mesh=Mesh(), checkpointing="full"), "launch")
    monkeypatch.setattr(step_compute, "SAVED_LAUNCHES", 0)
    without = part(step(build, 1e-3, tokens=256, mesh=Mesh(), checkpointing="full"), "launch")
    assert launch - without == pytest.approx(2 * 19 * LAYERS, rel=1e-3)


def test_a_norm_of_gradients_is_two_kernels_a_target(build: SimpleNamespace) -> None:
    """Four projections and two stacks a layer: 576 kernels, beside the 40 of the update."""
    slow = [part(step(build, s, tokens=32768, mesh=Mesh()), "launch") for s in (1e-5, 2e-5)]
    assert slow[1] - slow[0] == pytest.approx((LAYERS * 12 + 2 * 6 * LAYERS + 40) * 1e-2, rel=0.02)


def test_units_are_gathered_twice_and_reduced_once(build: SimpleNamespace) -> None:
    without, with_ = (part(step(build, 1e-3, tokens=256, mesh=Mesh(shard=2), unit_s=s), "launch") for s in (0.0, 1e-3))
    assert with_ - without == pytest.approx(3 * LAYERS, rel=1e-3)
    alone = [part(step(build, 1e-3, tokens=256, mesh=Mesh(), unit_s=s), "launch") for s in (0.0, 1e-3)]
    assert alone[0] == alone[1]


def test_experts_that_are_cut_are_a_unit_of_their_own(build: SimpleNamespace) -> None:
    """Beside the layer's unit a gather in each pass and a reduction, ten kernels each; under ep 2 none."""
    from shardwright.search_spaces.cost import host

    found = {}
    for mesh in (Mesh(shard=2), Mesh(ep=2)):
        counted = part(step(build, 1e-3, tokens=256, mesh=mesh), "launch")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "EXPERT_UNIT_LAUNCHES", 0)
            found[mesh] = counted - part(step(build, 1e-3, tokens=256, mesh=mesh), "launch")
    assert found[Mesh(shard=2)] == pytest.approx(3 * 10 * LAYERS, rel=1e-3) and found[Mesh(ep=2)] == 0


def test_exchanges_run_while_the_device_waits_for_the_host(build: SimpleNamespace) -> None:
    slow, prompt = (step(build, s, tokens=256, mesh=Mesh(ep=2)) for s in (1e-3, 0.0))
    assert part(slow, "expert_all_to_all") == 0 and part(slow, "expert_all_to_all_hidden") > 0
    assert part(prompt, "expert_all_to_all") > 0 and part(prompt, "expert_all_to_all_hidden") == 0


def test_counts_of_rows_are_waited_for_even_by_a_quick_host(build: SimpleNamespace) -> None:
    """The queue is empty after each layer's counts, once forward and never backward."""
    from shardwright.search_spaces.cost.host import AFTER_COUNTS

    report = step(build, 1e-5, tokens=4096, sequences=8, mesh=Mesh(ep=2))
    update = max(0.0, (40 + 2 * 6 * LAYERS) * 1e-2 - part(report, "optimizer"))
    assert part(report, "launch") == pytest.approx(LAYERS * AFTER_COUNTS * 1e-2 + update, rel=0.02)


def test_a_calibration_speaks_for_its_host(build: SimpleNamespace) -> None:
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=1, tokens=256)
    targets, cluster = build.targets_of(profile, rank=16), build.cluster_of("h200-1")
    slow, slower = (
        estimate(
            profile,
            recipe,
            cluster,
            ParallelStrategy(mesh=Mesh()),
            targets,
            (),
            Calibration(device="H200", versions={}, host_launch_s=s),
        ).time.step_ms
        for s in (1e-3, 2e-3)
    )
    assert slower == pytest.approx(2 * slow, rel=1e-2)
