"""What is said while a run goes wrong: spikes, missed predictions, hot experts, lost numbers, memory that runs out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.runtime.checks.documents import documents_apart
from shardwright.runtime.checks.memory import nearest_alternative, out_of_memory
from shardwright.runtime.checks.step import gradients_present
from shardwright.runtime.checks.triage import where_not_finite
from shardwright.runtime.checks.watch import Watch, hot_experts
from shardwright.runtime.data import Batches
from shardwright.runtime.device import Device
from shardwright.runtime.ownership import Owned
from shardwright.runtime.train import Gradient
from shardwright.schemas.cost import MemoryComponent, MemoryReport
from shardwright.schemas.plan import Alternative
from shardwright.schemas.run import StepMetric
from shardwright.schemas.strategy import Mesh, ParallelStrategy

CPU = Device("cpu", torch.device("cpu"), "gloo")
ONE = SimpleNamespace(world=1, data_rank=0, sizes=Mesh())


def metric(step: int, loss: float, seconds: float = 0.01, peak: int = 100) -> StepMetric:
    return StepMetric(
        step=step, loss=loss, grad_norm=1.0, learning_rate=0.1, tokens=8, seconds=seconds, peak_memory_bytes=peak
    )


def watch(step_ms: float = 10.0, peak: int = 100) -> Watch:
    cost = SimpleNamespace(time=SimpleNamespace(step_ms=step_ms), memory=SimpleNamespace(peak_bytes=peak))
    plan = SimpleNamespace(evidence=SimpleNamespace(cost=cost))
    return Watch(SimpleNamespace(plan=plan, ranks=ONE))  # type: ignore[arg-type]


def said(one: Watch, metrics: list[StepMetric]) -> list[str]:
    quiet = Gradient(1.0, 1.0, {})
    return [text for each in metrics for text in one.after(each, quiet)]


def test_a_run_as_predicted_is_quiet() -> None:
    assert said(watch(), [metric(n, 5.0 - 0.1 * n, seconds=0.0114, peak=114) for n in range(1, 20)]) == []


def test_a_spike_names_both_losses() -> None:
    (text,) = said(watch(), [*(metric(n, 2.0) for n in range(1, 8)), metric(8, 4.5), metric(9, 2.0)])
    assert "step 8" in text and "4.5000" in text and "2.0000" in text


def test_missed_predictions_are_said_once_past_fifteen_percent() -> None:
    found = said(watch(), [metric(n, 2.0, seconds=0.012, peak=130) for n in range(1, 20)])
    assert sorted(text.split(":")[0] for text in found) == ["peak memory", "step time"]
    assert "12 ms, predicted 10 ms" in next(text for text in found if text.startswith("step"))


def test_hot_experts_are_named() -> None:
    loads = {"a": torch.tensor([10, 10, 10, 10]), "b": torch.tensor([2, 0, 50, 0, 0, 0, 0, 0])}
    (text,) = hot_experts(loads)
    assert "in b: expert 2 got 50 rows" in text and "7.7 times" in text and "6 of 8 got none" in text


def test_gradients_must_follow_tokens() -> None:
    """Expert 5 got rows and no gradient; expert 7 a gradient without rows."""
    value = nn.Parameter(torch.zeros(4, 3, 2))
    value.grad = torch.ones_like(value)
    value.grad[1] = 0
    owned = Owned("x.down_proj_lora_b", (8, 3, 2), ((4, 8), (0, 3), (0, 2)), value, True, None)
    good, bad = torch.tensor([9, 9, 9, 9, 1, 0, 1, 1]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 0])
    assert gradients_present({owned.name: owned}, {"x": good}).passed
    failed = gradients_present({owned.name: owned}, {"x": bad})
    assert not failed.passed
    assert "expert 5 got tokens and no gradient" in failed.evidence
    assert "expert 7 got a gradient without a token" in failed.evidence


class Layered(nn.Module):
    """Two layers over embeddings; a document border means nothing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.carries = True

    def forward(self, input_ids: torch.Tensor, use_cache: bool, position_ids: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        hidden = hidden.cumsum(1) if self.carries else hidden
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(logits=hidden)


def trainer_of(model: nn.Module, adapters: dict[str, Owned]) -> Any:
    import numpy as np

    rows = np.arange(2 * 3 * 8).reshape(2, 3, 8) % 32
    config = SimpleNamespace(count=lambda name: 32)
    return SimpleNamespace(
        batches=Batches(rows, 1, 1, 1, 0),
        live=SimpleNamespace(model=model, files=SimpleNamespace(config=config)),
        device=CPU,
        ranks=ONE,
        optimizer=SimpleNamespace(adapters=adapters),
        recipe=SimpleNamespace(precision=SimpleNamespace(base="float32")),
    )


def test_lost_numbers_are_traced_to_layer_and_expert() -> None:
    model = Layered()
    value = nn.Parameter(torch.zeros(2, 3, 2))
    value.grad = torch.zeros_like(value)
    value.grad[1, 0, 0] = torch.nan
    owned = Owned("layers.1.x_lora_a", (4, 3, 2), ((2, 4), (0, 3), (0, 2)), value, True, None)
    trainer = trainer_of(model, {owned.name: owned})
    assert where_not_finite(trainer, 1) == "rank 0: gradient of layers.1.x_lora_a, experts 3"
    model.layers[1].weight.data[0, 0] = torch.inf  # type: ignore[union-attr,operator,index]
    assert "output of layers.1" in where_not_finite(trainer, 1)
    value.grad.zero_()
    model.layers[1].weight.data[0, 0] = 0.0  # type: ignore[union-attr,operator,index]
    assert "finite now" in where_not_finite(trainer, 1)


def test_a_state_that_crosses_a_border_fails() -> None:
    model = Layered()
    (found,) = documents_apart(trainer_of(model, {}))
    assert not found.passed and "differ by" in found.evidence
    model.carries = False
    (found,) = documents_apart(trainer_of(model, {}))
    assert found.passed


def test_memory_that_runs_out_names_component_and_alternative() -> None:
    def alternative(micro: int, step_ms: float, reserved: int, feasible: bool = True) -> Alternative:
        return Alternative(
            strategy=ParallelStrategy(mesh=Mesh(), micro_batch_sequences=micro),
            step_ms=step_ms,
            reserved_bytes=reserved,
            gpu_hours=1.0,
            feasible=feasible,
            pareto=False,
            lost_because="slower",
        )

    component = MemoryComponent(
        name="activations", bytes=3 << 30, moments=("backward_peak",), formula="x", origin="modelled"
    )
    memory = MemoryReport(
        components=(component,),
        by_moment={"backward_peak": 4 << 30},
        peak_bytes=4 << 30,
        peak_moment="backward_peak",
        reserved_bytes=5 << 30,
        budget_bytes=6 << 30,
    )
    options = (alternative(4, 1.0, 9 << 30), alternative(2, 9.0, 1 << 30), alternative(1, 5.0, 2 << 30))
    evidence = SimpleNamespace(cost=SimpleNamespace(memory=memory), alternatives=options)
    plan: Any = SimpleNamespace(evidence=evidence)
    assert nearest_alternative(plan) == options[2]
    error = out_of_memory(plan, CPU, "backward_peak", torch.OutOfMemoryError("CUDA out of memory"))
    assert error.code == "run/out-of-memory"
    assert "activations 3.00 GiB" in error.what and "activations is what grows" in error.what
    assert options[2].strategy.text() in error.next_action and "2.00 GiB" in error.next_action
    evidence.alternatives = options[:1]
    assert "plan again" in out_of_memory(plan, CPU, "load", MemoryError()).next_action


def test_the_trainer_turns_an_allocators_error_into_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.runtime import train
    from shardwright.schemas.errors import RunError

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    memory = SimpleNamespace(components=(), by_moment={}, peak_bytes=1, reserved_bytes=1)
    evidence = SimpleNamespace(cost=SimpleNamespace(memory=memory), alternatives=())
    trainer: Any = SimpleNamespace(
        live=SimpleNamespace(model=None), device=CPU, plan=SimpleNamespace(evidence=evidence)
    )
    monkeypatch.setattr(train, "summed_loss", full)
    with pytest.raises(RunError, match="out-of-memory"):
        train.Trainer._one_micro_batch(trainer, torch.zeros(1, 2), 1)
