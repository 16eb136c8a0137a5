"""AdamW on the adapter values that this rank owns, the clip, and the learning-rate schedule.

Every adapter value lives on exactly one rank of a replica, so the global gradient norm is one sum over those ranks,
whatever mesh each parameter is sharded on.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.runtime.mesh import Ranks
from shardwright.runtime.ownership import Owned, counted_once
from shardwright.schemas.errors import CheckFailed
from shardwright.schemas.recipe import OptimizerSpec, ScheduleSpec


def learning_rate(step: int, peak: float, schedule: ScheduleSpec) -> float:
    """Rate of a step (first is 1): linear warm-up, then constant, linear or cosine decay to a fraction of the peak."""
    warmup, total, final = schedule.warmup_steps, schedule.steps, float(schedule.final_fraction)
    if step <= warmup:
        return peak * step / warmup
    if schedule.decay == "constant" or total <= warmup + 1:
        return peak
    done = (step - warmup - 1) / (total - warmup - 1)
    shape = 1 - done if schedule.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (final + (1 - final) * shape)


class AdapterOptimizer:
    """AdamW over local shards; on CUDA one fused launch for all of them, without temporaries.

    Args:
        adapters: name → adapter parameter as this rank holds it.
        spec: hyperparameters.
        ranks: this rank's place.
        on_host: both moments live in host memory, where the step is made; adapters and gradients visit it.
    """

    def __init__(self, adapters: dict[str, Owned], spec: OptimizerSpec, ranks: Ranks, on_host: bool = False) -> None:
        self.adapters = {name: owned for name, owned in adapters.items() if owned.local().numel()}
        self.spec, self.ranks, self.on_host = spec, ranks, on_host
        self.values = {name: nn.Parameter(self._at_hand(owned.local())) for name, owned in self.adapters.items()}
        self.fused = any(value.is_cuda for value in self.values.values())
        self.inner = torch.optim.AdamW(
            list(self.values.values()) or [nn.Parameter(torch.zeros(1))],
            lr=float(spec.learning_rate),
            betas=(float(spec.beta1), float(spec.beta2)),
            eps=float(spec.epsilon),
            weight_decay=float(spec.weight_decay),
            fused=self.fused,
            foreach=not self.fused,
        )

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients.

        Raises:
            CheckFailed: ``no-gradient`` when an adapter has none: it is cut off from the loss.
        """
        found = {}
        for name, owned in self.adapters.items():
            gradient = owned.local_grad()
            if gradient is None:
                raise CheckFailed(
                    "no-gradient",
                    "backward left no gradient at all (not even zero)",
                    where=name,
                    next_action="the adapter is not reached by the loss; report the model family and the targets",
                )
            found[name] = gradient
        return found

    def global_norm(self, gradients: dict[str, Tensor]) -> float:
        """L2 norm of the gradient over all adapters of one replica, copies of an expert counted once."""
        device = next(iter(gradients.values())).device if gradients else torch.device("cpu")
        counted = [counted_once(self.adapters[name], gradient) for name, gradient in gradients.items()]
        norms = torch._foreach_norm(counted, 2, dtype=torch.float64) if counted else []
        total = torch.stack([norm.square() for norm in norms]).sum() if norms else torch.zeros((), dtype=torch.float64)
        total = total.to(device)
        if self.ranks.world > 1:
            dist.all_reduce(total, group=self.ranks.owner_group)
        return math.sqrt(float(total))

    def step(self, rate: float, norm: float) -> None:
        """Clip by the global norm, then one AdamW step."""
        limit = float(self.spec.max_grad_norm)
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        gradients = self.gradients()
        if scale < 1.0:
            torch._foreach_mul_(list(gradients.values()), scale)
        for name, value in self.values.items():
            value.grad = self._at_hand(gradients[name])
            if self.on_host:
                value.data.copy_(self.adapters[name].local())
        for group in self.inner.param_groups:
            group["lr"] = rate
        if self.values:
            self.inner.step()
        if self.on_host:
            for name, value in self.values.items():
                self.adapters[name].local().copy_(value.detach())
                value.grad = None

    def _at_hand(self, value: Tensor) -> Tensor:
        """A value where the step is made: itself, or a copy in host memory."""
        return value.to("cpu", copy=True) if self.on_host else value

    def clear(self) -> None:
        """Forget all gradients."""
        for owned in self.adapters.values():
            owned.parameter.grad = None
        for value in self.values.values():
            value.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """``exp_avg`` and ``exp_avg_sq`` by adapter name; zeros before the first step."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in self.values.items():
            state = self.inner.state[value]
            if not state:
                state["step"] = torch.zeros((), device=value.device if self.fused else None)
                state["exp_avg"] = torch.zeros_like(value)
                state["exp_avg_sq"] = torch.zeros_like(value)
            found[name] = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        return found

    def set_steps(self, steps: int) -> None:
        """How many steps the moments have seen, after they were loaded."""
        for value in self.values.values():
            self.inner.state[value]["step"].fill_(float(steps))
