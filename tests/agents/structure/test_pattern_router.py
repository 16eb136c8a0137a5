"""Routers as families spell them, near misses, and the operator's own view of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.router import Router
from shardwright.agents.structure.testkit import PatternContract, meta

EXPERTS, HIDDEN, CHOSEN = 8, 32, 2
Choice = Callable[["Gate", Tensor], tuple[Tensor, ...]]


class Gate(nn.Module):
    """A router module of its own."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
        self.register_buffer("bias", torch.zeros(EXPERTS, dtype=torch.float32))
        self.__dict__["choice"] = choice

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.__dict__["choice"](self, hidden)  # type: ignore[no-any-return]


class Block(nn.Module):
    """What reads a router: weights by expert, summed into the hidden states."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.gate = Gate(choice)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, HIDDEN)
        _, weights, ids = self.gate(flat)
        return flat * (weights * ids).sum(-1, keepdim=True).to(x.dtype)


def shared(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


def softmax(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, gate.weight)
    weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), CHOSEN, dim=-1)
    return logits, shared(weights).to(x.dtype), ids


def chosen_logits(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, gate.weight)
    values, ids = torch.topk(logits, CHOSEN, dim=-1)
    return logits, F.softmax(values.float(), dim=-1).to(x.dtype), ids


def grouped(
    groups: int = 4, kept: int = 2, fill: float = float("-inf"), eps: float = 1e-20, score: str = "top2"
) -> Choice:
    def choice(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(x.type(torch.float32), gate.weight.type(torch.float32))
        scores = logits.sigmoid()
        pick = scores + gate.bias.float()
        members = pick.view(-1, groups, EXPERTS // groups)
        value = members.topk(2, dim=-1)[0].sum(dim=-1) if score == "top2" else members.max(dim=-1).values
        best = torch.topk(value, k=kept, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(value)
        mask.scatter_(1, best, 1)
        stands = mask.unsqueeze(-1).expand(-1, groups, EXPERTS // groups).reshape(-1, EXPERTS)
        ids = torch.topk(pick.masked_fill(~stands.bool(), fill), k=CHOSEN, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
        return logits, weights * 2.5, ids

    return choice


def scores_read_outside(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, gate.weight)
    score = F.softmax(logits, dim=-1, dtype=torch.float32)
    weights, ids = torch.topk(score, CHOSEN, dim=-1)
    return logits, shared(weights).to(x.dtype) + score.sum().to(x.dtype), ids


def overwritten(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, gate.weight)
    x.add_(1.0)
    weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), CHOSEN, dim=-1)
    return logits, shared(weights).to(x.dtype), ids


def noisy(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, gate.weight)
    logits = logits * torch.rand_like(logits)
    weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), CHOSEN, dim=-1)
    return logits, shared(weights).to(x.dtype), ids


def smallest(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, gate.weight)
    weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), CHOSEN, dim=-1, largest=False)
    return logits, shared(weights).to(x.dtype), ids


def bias_weighs(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    """The bias must pick, not weigh: here the weights come from the biased scores."""
    logits = F.linear(x.float(), gate.weight.float())
    pick = logits.sigmoid() + gate.bias.float()
    weights, ids = torch.topk(pick, CHOSEN, dim=-1)
    return logits, shared(weights), ids


def by_first(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    """Divided by the largest weight, not by their sum."""
    logits = F.linear(x, gate.weight)
    weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), CHOSEN, dim=-1)
    return logits, (weights / weights.amax(dim=-1, keepdim=True)).to(x.dtype), ids


def over_tokens(gate: Gate, x: Tensor) -> tuple[Tensor, ...]:
    """Softmax over the tokens, not over the experts."""
    logits = F.linear(x, gate.weight)
    weights, ids = torch.topk(F.softmax(logits, dim=0, dtype=torch.float32), CHOSEN, dim=-1)
    return logits, shared(weights).to(x.dtype), ids


class Told(nn.Module):
    """A router whose matrix lies in a child and whose bias is the block's, passed as the second argument."""

    def __init__(self, wide_logits: bool) -> None:
        super().__init__()
        self.gate, self.wide_logits = nn.Linear(HIDDEN, EXPERTS, bias=False), wide_logits

    def forward(self, hidden: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        logits = self.gate(hidden)
        wide = logits.to(torch.float32)
        scores = wide.sigmoid()
        ids = torch.topk(scores + bias, CHOSEN, dim=-1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return wide if self.wide_logits else logits, weights, ids


class Telling(nn.Module):
    def __init__(self, wide_logits: bool = False) -> None:
        super().__init__()
        self.router = Told(wide_logits)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, HIDDEN)
        _, weights, ids = self.router(flat, self.expert_bias.float())
        return flat * (weights * ids).sum(-1, keepdim=True).to(x.dtype)


def telling(wide_logits: bool = False):  # type: ignore[no-untyped-def]
    return lambda: (Telling(wide_logits), (meta(2, 6, HIDDEN),))


class Offset(nn.Module):
    """Adds a vector to the product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN)), nn.Parameter(torch.zeros(EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(hidden, self.weight, self.bias)
        values, ids = torch.topk(logits, CHOSEN, dim=-1)
        return logits, F.softmax(values, dim=1, dtype=values.dtype), ids


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Offset()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, HIDDEN)
        _, weights, ids = self.gate(flat)
        return flat * (weights * ids).sum(-1, keepdim=True).to(x.dtype)


def example(choice: Choice):  # type: ignore[no-untyped-def]
    return lambda: (Block(choice), (meta(2, 6, HIDDEN),))


def hooked():  # type: ignore[no-untyped-def]
    layer, tensors = example(softmax)()
    layer.gate.register_full_backward_hook(lambda module, gradients, results: None)
    return layer, tensors


NEARLY = {
    "scores-read-outside": scores_read_outside,
    "overwritten-between": overwritten,
    "random": noisy,
    "smallest": smallest,
    "bias-weighs": bias_weighs,
    "divided-by-the-first": by_first,
    "softmax-over-tokens": over_tokens,
}


class TestRouter(PatternContract):
    pattern = Router()
    positives = {
        "softmax": (example(softmax), 1),
        "chosen-logits": (example(chosen_logits), 1),
        "grouped": (example(grouped()), 1),
        "one-group": (example(grouped(1, 1)), 1),
        "best-of-group": (example(grouped(score="max")), 1),
        "larger-epsilon": (example(grouped(eps=1e-6)), 1),
        "told": (telling(), 1),
        "told-wide": (telling(wide_logits=True), 1),
        "offset": (lambda: (Shifted(), (meta(2, 6, HIDDEN),)), 1),
    }
    near_misses = {"gradient-hook": hooked, **{name: example(choice) for name, choice in NEARLY.items()}}

    def kernel(self, name: str) -> str:
        """Why our kernel is not offered; empty where it is."""
        (match, _), *_ = self.found(self.positives[name][0])
        return self.pattern.refuses(match, self.pattern.variants()[0])

    def test_near_misses_have_no_legal_match_that_hides_a_difference(self) -> None:
        """A near miss that matches in part must be refused by the re-trace or the differential test, not by luck."""
        for name in ("divided-by-the-first", "bias-weighs", "smallest"):
            for _, certificate in self.found(self.near_misses[name]):
                assert not certificate.legal, name

    @pytest.mark.parametrize(
        "name", ["softmax", "chosen-logits", "grouped", "one-group", "best-of-group", "told", "offset"]
    )
    def test_the_operator_is_offered(self, name: str) -> None:
        assert self.kernel(name) == ""

    def test_the_operator_is_not_offered_where_it_means_something_else(self) -> None:
        assert "1e-06" in self.kernel("larger-epsilon")
        for choice, why in ((grouped(fill=0.0), "score of 0"),):
            (match, certificate), *_ = self.found(example(choice))
            assert certificate.legal and why in self.pattern.refuses(match, self.pattern.variants()[0])

    def test_constants_that_workers_read(self) -> None:
        (match, _), *_ = self.found(self.positives["grouped"][0])
        wanted = {"k": 2, "scoring": "sigmoid", "groups": 4, "groups_kept": 2, "group_score": "top2", "scale": 2.5}
        wanted |= {"renormalise": True, "logits_dtype": "float32", "weights_dtype": "float32"}
        assert {name: match.constants[name] for name in wanted} == wanted
        assert match.roles == {"weight": "weight", "bias": "bias"} and match.anchor == "layer.gate"

    def test_where_workers_find_what_is_not_the_modules_own(self) -> None:
        ((told, _),) = self.found(self.positives["told"][0])
        assert told.roles["weight"] == "gate.weight" and told.constants["bias_argument"] is True
        assert "logits_cast" not in told.constants
        ((wide, _),) = self.found(self.positives["told-wide"][0])
        assert wide.constants["logits_cast"] == "float32" and self.kernel("told-wide") == ""
        ((offset, _),) = self.found(self.positives["offset"][0])
        assert offset.roles == {"weight": "weight", "offset": "bias"} and "bias_argument" not in offset.constants

    def test_a_wrong_choice_is_caught(self) -> None:
        """The comparison sees one token sent to another expert, one weight of two changed, and one lost."""
        (match, _), *_ = self.found(self.positives["softmax"][0])
        weights, ids = torch.tensor([[0.75, 0.25]]), torch.tensor([[1, 5]])
        right = self.pattern.comparable({"weights": weights, "experts": ids}, match)["routing"]
        swapped = self.pattern.comparable({"weights": weights.flip(-1), "experts": ids.flip(-1)}, match)["routing"]
        assert torch.equal(right, swapped)
        for other_weights, other_ids in ((weights, torch.tensor([[1, 6]])), (weights.flip(-1), ids)):
            seen = self.pattern.comparable({"weights": other_weights, "experts": other_ids}, match)["routing"]
            assert not torch.equal(right, seen)
