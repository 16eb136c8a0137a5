"""A linear-attention layer between its projections by our operators: convolutions, recurrence with its gates, norm.

The recurrence's operator takes raw gate and step size and divides queries and keys by their length itself. Documents of
packed rows are known to the convolution and the recurrence by their bounds. The plan names the module's projections,
ranges of them where several values come out of one, and every operator with the hash of its source.
Legend: B batch, S tokens, H key heads, HV value heads, K, V widths, C channels, J taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.kernels.registry import OPERATORS, source_sha256
from shardwright.runtime.fused_delta_rule import CACHES, fused_delta_rule
from shardwright.runtime.lora.siblings import joint
from shardwright.runtime.segments import Bounds, active, by_document
from shardwright.schemas.errors import LegalityError, StalePlanError
from shardwright.schemas.fusion import FusionDecision

STREAMS = ("q", "k", "v")
NEEDED = ("decay", "beta", "gate", "a_log", "dt_bias", "norm_weight", "o")
SIZES = ("heads", "value_heads", "key_width", "value_width", "gate", "act", "eps", "form")
FAMILYS_OWN = (*CACHES, "attention_mask", "cu_seq_lens_q", "seq_idx")
"""Arguments with which the module's own forward runs: decoding, padding, documents in a family's own spelling."""


def fused_gated_delta(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Tensor]:
    """The forward of a layer with one decay for a head: the whole layer where the plan proves it, else the recurrence.

    Raises:
        LegalityError: ``fusion-delta-rule``.
        StalePlanError: ``kernel-source``.
    """
    whole = "operators" in decision.constants
    return fused_delta_layer(module, name, decision) if whole else fused_delta_rule(module, name, decision)


def fused_delta_layer(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Tensor]:
    """The forward of a linear-attention layer [B, S, hidden] → [B, S, hidden].

    Raises:
        LegalityError: ``fusion-delta-rule`` where the plan does not name every part, or the module lacks one.
        StalePlanError: ``kernel-source`` where an operator beside the recurrence is not the one that was approved.
    """
    layer = DeltaLayer.of(module, name, decision)
    original = by_document(module.forward)

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or any(kwargs.get(key) is not None for key in FAMILYS_OWN):
            return original(hidden_states, *args, **kwargs)
        return layer(hidden_states, active())

    return forward


def flat_bounds(bounds: Bounds) -> tuple[int, ...]:
    """Bounds of all rows' documents, one row after another."""
    sizes = [stop - start for row in bounds for start, stop in pairwise(row)]
    return (0, *accumulate(sizes))


@dataclass(frozen=True)
class DeltaLayer:
    """One layer: its module, parts by role, numbers of the plan, and the operators."""

    module: nn.Module
    roles: dict[str, str]
    constants: dict[str, str | int | bool]
    rule: Callable[..., tuple[Tensor, Tensor | None]]
    conv: Callable[..., tuple[Tensor, Tensor | None]]
    norm: Callable[..., Tensor]

    @classmethod
    def of(cls, module: nn.Module, name: str, decision: FusionDecision) -> DeltaLayer:
        """Raises: as ``fused_delta_layer``."""
        roles, constants = decision.roles, decision.constants
        streams = ("mixed",) if "mixed" in roles else STREAMS
        taps = ("conv_weight",) if "conv_weight" in roles else tuple(f"{role}_conv_weight" for role in STREAMS)
        missing = [role for role in (*streams, *taps, *NEEDED) if not roles.get(role)]
        missing += [size for size in SIZES if size not in constants]
        missing += [path for path in roles.values() if not _has(module, path)]
        operators = str(constants.get("operators", "")).split()
        if missing or len(operators) != 3 or operators[0] != decision.op:
            what = f"neither the plan nor {type(module).__name__} has {', '.join(missing) or 'the three operators'}"
            raise LegalityError(
                "fusion-delta-rule",
                what,
                where=name,
                next_action="make the plan again for this library version, or reject the delta_rule_layer proposal",
            )
        for op in operators[1:]:
            _require_source(op, decision)
        rule, conv, norm = (OPERATORS[op].load_op() for op in operators)
        return cls(module, dict(roles), dict(constants), rule, conv, norm)

    def __call__(self, x: Tensor, bounds: Bounds | None) -> Tensor:
        """``[B, S, hidden]`` → the same."""
        result: Tensor = self._part("o")(self.between(self.projections(x), x.shape[:2], bounds))
        return result

    def between(self, made: dict[str, Tensor], lead: torch.Size, bounds: Bounds | None) -> Tensor:
        """What is between the projections ``made`` of x and the output's: ``[B, S, HV V]``.

        Args:
            made: values ``[B, S, ...]`` of ``projections``.
            lead: B and S.
            bounds: of packed documents.
        """
        rows = tuple(lead) if bounds is None else (1, lead.numel())
        documents = None if bounds is None else flat_bounds(bounds)
        H, HV, K, V = (int(self.constants[size]) for size in SIZES[:4])
        heads = ((H, K), (H, K), (HV, V))
        convolved = [
            self.conv(part.reshape(*rows, -1).contiguous(), taps, cu_seqlens=documents)[0].view(*rows, *shape)
            for part, taps, shape in zip(self._streams(made), self._taps(heads), heads, strict=True)
        ]
        decay = self._value("decay", made).reshape(*rows, HV, -1)
        bias = self._part("dt_bias").reshape(HV, -1)
        settings: dict[str, Any] = {"gate": self.constants["gate"]}
        if self.constants["form"] == "heads":
            decay, bias = decay.squeeze(-1), bias.squeeze(-1)
        elif settings["gate"] == "bounded":
            settings["lower_bound"] = float(self.constants["lower_bound"])
        o, _ = self.rule(
            *convolved,
            decay.contiguous(),
            self._value("beta", made).reshape(*rows, HV).contiguous(),
            self._part("a_log").reshape(-1)[:HV],
            bias,
            cu_seqlens=documents,
            **settings,
        )
        gate = self._value("gate", made).reshape(o.shape)
        eps, act = float(self.constants["eps"]), str(self.constants["act"])
        y = self.norm(o, gate, self._part("norm_weight"), eps, activation=act)
        return y.reshape(*lead, -1)

    def projections(self, x: Tensor) -> dict[str, Tensor]:
        """Every projection of x itself by its path, each once."""
        streams = ("mixed",) if "mixed" in self.roles else STREAMS
        first = [f"{role}_low" if f"{role}_low" in self.roles else role for role in (*streams, "decay", "beta", "gate")]
        paths = {self.roles[role]: self._part(role) for role in first}
        return dict(zip(paths, joint(x, tuple(paths.values())), strict=True))

    def _streams(self, made: dict[str, Tensor]) -> list[Tensor]:
        """Inputs of the convolutions of q, k and v ``[B, S, C]``."""
        if "mixed" in self.roles:
            return list(self._value("mixed", made).split(self._channels(), dim=-1))
        return [self._value(role, made) for role in STREAMS]

    def _taps(self, heads: tuple[tuple[int, int], ...]) -> list[Tensor]:
        """Weights of the convolutions of q, k and v ``[C, J]``."""
        if "conv_weight" in self.roles:
            return list(self._part("conv_weight").squeeze(1).split(self._channels()))
        return [self._part(f"{role}_conv_weight").squeeze(1) for role in STREAMS]

    def _channels(self) -> list[int]:
        H, HV, K, V = (int(self.constants[size]) for size in SIZES[:4])
        return [H * K, H * K, HV * V]

    def _value(self, role: str, made: dict[str, Tensor]) -> Tensor:
        """A role's projection of x, or its range of every group's values."""
        low = self.roles.get(f"{role}_low")
        value = made[self.roles[role]] if low is None else self._part(role)(made[low])
        groups = self.constants.get(f"{role}_groups")
        if groups is None:
            return value
        start, stop = int(self.constants[f"{role}_start"]), int(self.constants[f"{role}_stop"])
        return value.unflatten(-1, (int(groups), -1))[..., start:stop].flatten(-2)

    def _part(self, role: str) -> Any:
        """The module, or parameter, of a role; looked up at each call, for adapters take a projection's place."""
        found: Any = self.module
        for step in self.roles[role].split("."):
            found = getattr(found, step)
        return found


def _require_source(op: str, decision: FusionDecision) -> None:
    approved, found = decision.beside.get(op), source_sha256(op)
    if approved != found:
        raise StalePlanError(
            "kernel-source",
            f"the plan approves source {str(approved)[:16]}… of {op}, installed is {found[:16]}…",
            where=f"decision.fusions: {decision.proposal_id} ({op})",
            next_action="make the plan again: its proofs and timings belong to other code",
        )


def _has(module: nn.Module, path: str) -> bool:
    found: Any = module
    for step in path.split("."):
        found = getattr(found, step, None)
    return found is not None
