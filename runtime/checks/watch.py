"""What is looked at after every step: predictions missed, losses that jump, hot experts, replicas that drift."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from statistics import median

from torch import Tensor

from shardwright.runtime.checks.step import base_digests, base_unchanged, biases_agree, replicas_agree
from shardwright.runtime.record import WARMUP_STEPS
from shardwright.runtime.train import Gradient, Trainer
from shardwright.schemas.run import CheckResult, StepMetric

MARGIN = 0.15
"""A measured time or peak this far above its prediction is worth a warning."""
SETTLED_STEPS = 5
SPIKE = 2.0
"""A loss this many times the median of the last ones is a spike."""
WINDOW = 20
PACE_WINDOW = 100
"""Steps whose median time is held against the prediction: half of them notice that a run became slow."""
AGREE_EVERY = 50
"""Steps between two comparisons of replicas, and of the frozen base with what was loaded."""
HOT = 4.0
"""An expert with this many times the mean load of its layer is hot."""


class LastMedian:
    """The median of the last values; one more costs the same however many came before.

    The values stand twice, by age and in order, so that the oldest is found and replaced by binary search.

    Args:
        size: how many of the last values count.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.aged: deque[float] = deque()
        self.ordered: list[float] = []

    def __len__(self) -> int:
        return len(self.aged)

    def add(self, value: float) -> None:
        """Take up a value that is not NaN."""
        if len(self.aged) == self.size:
            del self.ordered[bisect_left(self.ordered, self.aged.popleft())]
        self.aged.append(value)
        insort(self.ordered, value)

    @property
    def value(self) -> float:
        """Of at least one value."""
        count = len(self.ordered)
        return (self.ordered[(count - 1) // 2] + self.ordered[count // 2]) / 2


class Watch:
    """One run's watch on rank 0; :meth:`checks` is for all ranks. A step's work does not grow with the run.

    Args:
        trainer: of the run.
        base: digests of the frozen base as it was loaded.
    """

    def __init__(self, trainer: Trainer, base: dict[str, tuple[int, int]]) -> None:
        self.trainer, self.base = trainer, base
        cost = trainer.plan.evidence.cost
        self.step_ms, self.peak = cost.time.step_ms, cost.memory.peak_bytes
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.step_times = LastMedian(PACE_WINDOW)
        """Milliseconds, without the first steps."""
        self.seen, self.highest = 0, 0
        """Steps so far, and the highest peak memory of one, in bytes."""
        self.said: set[str] = set()

    def checks(self, step: int) -> tuple[CheckResult, ...]:
        """Every ``AGREE_EVERY`` steps, on all ranks' schedules alike: replicas hold the same bits, the base its own."""
        if step % AGREE_EVERY:
            return ()
        live, ranks = self.trainer.live, self.trainer.ranks
        replicas = (replicas_agree(live.parameters, ranks),) if ranks.sizes.replicate > 1 else ()
        return (self._base_unchanged(), *replicas)

    def at_end(self) -> tuple[CheckResult, ...]:
        """After the last step, of a resumed run too: the base is what was loaded, replicas and biases agree."""
        trainer = self.trainer
        return (
            self._base_unchanged(),
            replicas_agree(trainer.live.parameters, trainer.ranks),
            *biases_agree(trainer.router_biases(), trainer.ranks),
        )

    def _base_unchanged(self) -> CheckResult:
        live = self.trainer.live
        return base_unchanged(self.base, base_digests(live.model, live.parameters, self.trainer.router_biases()))

    def after(self, metric: StepMetric, gradient: Gradient) -> tuple[str, ...]:
        """Warnings of this step, each kind of prediction and each hot layer once."""
        found = [*self._spike(metric), *hot_experts(gradient.loads)]
        self.losses.append(metric.loss)
        found += self._predictions(metric)
        fresh = tuple(text for text in found if text.split(":", 1)[0] not in self.said)
        self.said.update(text.split(":", 1)[0] for text in fresh)
        return fresh

    def _spike(self, metric: StepMetric) -> list[str]:
        before = self.losses
        if len(before) < SETTLED_STEPS or metric.loss <= SPIKE * median(before):
            return []
        return [
            f"loss spike at step {metric.step}: {metric.loss:.4f}, the median of the last {len(before)} is "
            f"{median(before):.4f}; gradient norm {metric.grad_norm:.3g}"
        ]

    def _predictions(self, metric: StepMetric) -> list[str]:
        """The median time of the last ``PACE_WINDOW`` settled steps, and the highest peak of all, against the plan."""
        self.seen += 1
        self.highest = max(self.highest, metric.peak_memory_bytes)
        if self.seen > WARMUP_STEPS:
            self.step_times.add(metric.seconds * 1000)
        if len(self.step_times) < SETTLED_STEPS:
            return []
        found, step_ms = [], self.step_times.value
        if step_ms > (1 + MARGIN) * self.step_ms > 0:
            found.append(
                f"step time: {step_ms:.4g} ms, predicted {self.step_ms:.4g} ms; "
                f"the median of the last {len(self.step_times)} steps"
            )
        if self.highest > (1 + MARGIN) * self.peak > 0:
            found.append(f"peak memory: {self.highest} bytes, predicted {self.peak} bytes")
        return found


def hot_experts(loads: dict[str, Tensor]) -> list[str]:
    """One line for each layer with an expert of more than ``HOT`` times the mean load."""
    found = []
    for layer, rows in loads.items():
        mean = float(rows.sum()) / rows.numel()
        hottest = int(rows.argmax())
        if mean > 0 and float(rows[hottest]) > HOT * mean:
            found.append(
                f"hot expert in {layer}: expert {hottest} got {int(rows[hottest])} rows in one step, "
                f"{float(rows[hottest]) / mean:.1f} times the mean; {int((rows == 0).sum())} of {rows.numel()} got none"
            )
    return found
