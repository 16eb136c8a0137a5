"""What is said while a run goes wrong: spikes, missed predictions, hot experts, lost numbers, memory that runs out."""

from __future__ import annotations

import json
import random
import statistics
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.checkpoints.targets import parameter_shapes
from shardwright.runtime.batches import Batches
from shardwright.runtime.checks.documents import documents_apart
from shardwright.runtime.checks.dtypes import require_one_trainable_dtype
from shardwright.runtime.checks.memory import memory_guard, nearest_alternative, out_of_memory
from shardwright.runtime.checks.step import base_digests, gradients_present
from shardwright.runtime.checks.triage import where_not_finite
from shardwright.runtime.checks.watch import AGREE_EVERY, PACE_WINDOW, WINDOW, LastMedian, Watch, hot_experts
from shardwright.runtime.device import Device
from shardwright.runtime.ownership import Owned
from shardwright.runtime.train import Gradient
from shardwright.schemas.cost import MemoryComponent, MemoryReport
from shardwright.schemas.errors import LegalityError, RunError
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
    return Watch(SimpleNamespace(plan=plan, ranks=ONE), {})  # type: ignore[arg-type]


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


def test_a_run_that_becomes_slow_late_is_said_when_most_of_the_last_steps_are() -> None:
    """1,000 steps as predicted, then 12 ms a step: at the 51st of them the median of the last 100 is 12 ms."""
    one = watch()
    assert said(one, [metric(n, 2.0) for n in range(1, 1001)]) == []
    assert said(one, [metric(n, 2.0, seconds=0.012) for n in range(1001, 1051)]) == []
    found = said(one, [metric(n, 2.0, seconds=0.012) for n in range(1051, 1200)])
    assert found == ["step time: 12 ms, predicted 10 ms; the median of the last 100 steps"]


def test_the_first_step_counts_for_memory_and_not_for_time() -> None:
    one = watch()
    assert said(one, [metric(1, 2.0, seconds=99.0, peak=130), *(metric(n, 2.0) for n in range(2, 6))]) == []
    assert said(one, [metric(6, 2.0), metric(7, 2.0)]) == ["peak memory: 130 bytes, predicted 100 bytes"]


@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_a_running_median_is_the_median_of_the_last_values(size: int) -> None:
    rng = random.Random(size)
    values = [float(rng.randrange(10)) for _ in range(200)]
    one = LastMedian(size)
    for count, value in enumerate(values, start=1):
        one.add(value)
        assert one.value == statistics.median(values[max(0, count - size) : count])
        assert len(one) == len(one.ordered) == min(count, size)


class Counted(float):
    """A number that counts how often it is compared."""

    compared = 0

    def _count(self, name: str, other: float) -> bool:
        Counted.compared += 1
        return bool(getattr(float, name)(self, other))

    def __lt__(self, other: float) -> bool:
        return self._count("__lt__", other)

    def __gt__(self, other: float) -> bool:
        return self._count("__gt__", other)

    def __mul__(self, other: float) -> Counted:
        return Counted(float(self) * other)


def test_a_steps_work_does_not_grow_with_the_run() -> None:
    """Comparisons of step times over 4,000 steps: after the window is full, each thousand takes as many as another."""
    rng, quiet, one = random.Random(0), Gradient(1.0, 1.0, {}), watch()
    Counted.compared = 0
    marks = []
    for n in range(1, 4001):
        seconds: Any = Counted(0.01 + 0.001 * rng.random())
        one.after(SimpleNamespace(**{**metric(n, 2.0).model_dump(), "seconds": seconds}), quiet)  # type: ignore[arg-type]
        if n % 1000 == 0:
            marks.append(Counted.compared)
    thousands = [later - before for before, later in zip([0, *marks], marks, strict=False)]
    assert thousands[0] > 1000, "step times are what is counted"
    assert max(thousands) <= 1000 * 2 * (PACE_WINDOW.bit_length() + 1), "two binary searches a step"
    kept = [len(held) for held in (one.losses, one.step_times.aged, one.step_times.ordered)]
    assert kept == [WINDOW, PACE_WINDOW, PACE_WINDOW]
    assert {name for name, held in vars(one).items() if isinstance(held, list | deque | LastMedian)} == {
        "losses",
        "step_times",
    }, "nothing else gathers steps"


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
    last = gradients_present({owned.name: owned}, {"x": bad}, unlabelled=1)
    assert "expert 5" not in last.evidence and "expert 7 got a gradient without a token" in last.evidence
    bad[5] = 2
    assert "expert 5 got tokens and no gradient" in gradients_present({owned.name: owned}, {"x": bad}, 1).evidence


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
        recipe=SimpleNamespace(
            precision=SimpleNamespace(base="float32"), data=SimpleNamespace(documents_share_rows=True)
        ),
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


def test_every_so_many_steps_base_and_replicas_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.runtime.checks import watch as watching

    model = nn.Linear(3, 3)
    adapter = nn.Parameter(torch.ones(2))
    owned = {
        "weight": Owned("weight", (3, 3), ((0, 3), (0, 3)), model.weight, False, None),
        "x_lora_a": Owned("x_lora_a", (2,), ((0, 2),), adapter, False, None),
    }
    one = watch()
    one.trainer = SimpleNamespace(  # type: ignore[assignment]
        live=SimpleNamespace(model=model, parameters=owned), ranks=ONE, router_biases=dict
    )
    one.base = base_digests(model, owned, {})  # type: ignore[arg-type]
    assert one.checks(AGREE_EVERY - 1) == ()
    assert [check.passed for check in one.checks(AGREE_EVERY)] == [True]
    adapter.data += 1
    assert [check.passed for check in one.checks(2 * AGREE_EVERY)] == [True], "adapters may move"
    model.weight.data[1, 1] += 1e-3
    (found,) = one.checks(3 * AGREE_EVERY)
    assert not found.passed and "weight" in found.evidence
    assert [check.passed for check in one.at_end()] == [False, True], "at the end of a resumed run too"
    two = SimpleNamespace(world=2, data_rank=0, sizes=Mesh(replicate=2))
    one.trainer.ranks = two  # type: ignore[assignment]
    monkeypatch.setattr(watching, "replicas_agree", lambda parameters, ranks: (len(parameters), ranks))
    assert one.checks(4 * AGREE_EVERY)[1:] == ((2, two),)


def test_two_formats_that_train_in_one_unit_are_refused_by_both_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    units = {"a": model["a"]}
    require_one_trainable_dtype(units, model)
    model["b"].to(torch.bfloat16)
    require_one_trainable_dtype(units, model)
    model["a"].bias = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(LegalityError, match=r"a\.weight is float32 and a\.bias is bfloat16") as caught:
        require_one_trainable_dtype(units, model)
    assert caught.value.code == "legality/trainable-dtypes"
    model["a"].weight.requires_grad_(False)
    require_one_trainable_dtype(units, model)
    model["b"].weight.data = model["b"].weight.data.float()
    with pytest.raises(LegalityError, match=r"b\.weight is float32 and b\.bias is bfloat16"):
        require_one_trainable_dtype(units, model)


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
    assert "no component is above its prediction" in error.what and "(activations)" in error.what
    assert options[2].strategy.text() in error.next_action and "2 GiB" in error.next_action
    assert nearest_alternative(plan, 5 << 30) == options[1], "it must fit beside what grew"
    grown = out_of_memory(plan, CPU, "backward_peak", torch.OutOfMemoryError("full"), {"optimizer_state": 9 << 30})
    assert "optimizer_state grew most: 9 GiB against 0 MiB" in grown.what and "optimizer_state" in grown.where
    assert "plan again" in grown.next_action
    evidence.alternatives = options[:1]
    assert "plan again" in out_of_memory(plan, CPU, "load", MemoryError()).next_action


def test_memory_that_runs_out_while_loading_is_the_same_error(tiny: Any, make_job: Any, strategy: Any) -> None:
    plan = make_job(tiny, strategy()).plan
    with pytest.raises(RunError, match=r"run/out-of-memory.*\n.*moment load"), memory_guard(plan, CPU, "load"):
        raise MemoryError
    with pytest.raises(ValueError, match="other"), memory_guard(plan, CPU, "load"):
        raise ValueError("other")


def test_what_a_real_run_holds_is_named_when_memory_runs_out(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with its own tensors is refused memory in its second step, after Adam has its moments."""
    from shardwright.runtime import train
    from shardwright.runtime.checks import memory as guard

    whole, calls, held = train.summed_loss, [0], [{}]

    def full(*arguments: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(*arguments)

    job = make_job(tiny, strategy())
    base = 4 * sum(torch.Size(shape).numel() for shape in parameter_shapes(tiny.checkpoint).values())
    adapters = 4 * sum(target.adapter_parameters for target in job.plan.decision.lora_targets)
    true = {
        "frozen_base": base,
        "adapter_parameters": adapters,
        "adapter_gradients": adapters,
        "optimizer_state": 2 * adapters,
    }
    real = guard.compared

    def table(**changed: int) -> MemoryReport:
        sizes = {**true, "buffers": 1 << 20, "runtime_reserve": 64 << 30, **changed}
        parts = tuple(
            MemoryComponent(name=name, bytes=size, moments=("forward_peak",), formula="x", origin="modelled")
            for name, size in sizes.items()
        )
        return job.plan.evidence.cost.memory.model_copy(update={"components": parts})

    def compared(memory: MemoryReport, moment: Any, found: dict[str, int], in_use: int) -> Any:
        held[0] = found
        return real(table(optimizer_state=adapters), moment, found, in_use)

    monkeypatch.setattr(train, "summed_loss", full)
    monkeypatch.setattr(guard, "compared", compared)
    assert single_rank(job) != 0 and job.record.status == "failed" and len(job.losses) == 1
    failure = json.loads((job.run_dir / "failure.json").read_bytes())
    assert failure["code"] == "run/out-of-memory" and "component optimizer_state" in failure["where"], failure
    assert "Tried to allocate" in failure["what"]
    for name, wanted in true.items():
        assert wanted <= held[0][name] <= wanted * 1.01, name
    for changed, name in (({"frozen_base": base // 2}, "frozen_base"), ({"runtime_reserve": 1}, "the rest")):
        worst = real(table(**changed), "forward_peak", held[0], 1 << 30)[0]
        assert worst.name.startswith(name) and worst.grown > 0.4 * worst.found
