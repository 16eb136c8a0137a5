"""The contract of a pattern as a test class: a new pattern's test inherits it and fills in examples.

An example is a factory of a layer and its meta inputs. Positive examples pin the number of matches, all proved.
Near misses must not lead to a legal certificate: either nothing matches, or the certificate refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, get_args

import torch
from torch import nn

from shardwright.agents.structure.canonical import CanonicalGraph, canonical_graphs, canonicalise
from shardwright.agents.structure.capture import CapturedGraph, capture_module
from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.facts import ModelFacts, observe
from shardwright.agents.structure.mutants import Mutant, mutants
from shardwright.agents.structure.obligations import EXAMINERS, hooks
from shardwright.agents.structure.patterns.base import Match, Pattern, VariantSpec
from shardwright.agents.structure.rank import Parts, counted
from shardwright.schemas.fusion import Certificate, ObligationName

Example = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]

LAYER = "layer"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """An empty meta tensor."""
    return torch.empty(*shape, dtype=dtype, device="meta")


class Root(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


Pairs = tuple[tuple[CapturedGraph, CanonicalGraph], ...]


def captured_examples(example: Example) -> tuple[Pairs, ModelFacts]:
    """Build and observe an example's layer as ``layer`` of a model; capture it, and the experts inside it."""
    with torch.device("meta"):
        layer, tensors = example()
    layer = layer.to(torch.bfloat16)
    facts = observe(Root(layer), [LAYER], ())
    pairs = canonical_graphs(capture_module(layer, tensors, "example", LAYER))
    whole = []
    for captured, canonical in pairs:
        assert canonical is not None, captured.reason
        whole.append((captured, canonical))
    return tuple(whole), facts


def captured_example(example: Example) -> tuple[CapturedGraph, CanonicalGraph, ModelFacts]:
    """The layer's own graph of :func:`captured_examples`."""
    pairs, facts = captured_examples(example)
    return (*pairs[0], facts)


def hooked_facts(match: Match, facts: ModelFacts) -> dict[str, ModelFacts]:
    """The model's facts with one hook more: on each parameter of a region, and on each module that it computes in."""
    made = {}
    for parameter in match.parameters.values():
        made[parameter] = replace(facts, parameter_hooks={parameter: "backward_hooks"})
    for path in {node.module_path for node in match.region.op_nodes} - {"", *facts.units}:
        made[path] = replace(facts, module_hooks={path: "forward_hooks"})
    return made


def moved_bytes(match: Match, spec: VariantSpec, tokens: int) -> int:
    """Counted traffic of a variant, both passes; 0 where the pattern says that it is not counted."""
    if match.pattern.unranked(match, spec):
        return 0
    parts: Parts = ((match.pattern.name, match.pattern.cost_shape(match, tokens)),)
    if spec.provider == "shardwright":
        parts = match.pattern.kernel_parts(match, spec, tokens)
    return sum(counted(op, spec.provider, sizes, "bfloat16").total_bytes() for op, sizes in parts)


def refused(match: Match, facts: ModelFacts) -> bool:
    """Whether some obligation is not proved; the costly ones are examined last, and only where all others are."""
    return any(examiner(match, facts)[0] != "proved" for examiner in EXAMINERS.values())


class PatternContract:
    """Inherit, set ``pattern``, ``positives`` and ``near_misses``."""

    pattern: ClassVar[Pattern]
    positives: ClassVar[dict[str, tuple[Example, int]]]
    """Name → example and its number of matches."""
    near_misses: ClassVar[dict[str, Example]]
    least_mutants: ClassVar[int] = 2
    """How many changed copies of the first positive example there are at least."""

    def found(self, example: Example) -> list[tuple[Match, Certificate]]:
        pairs, facts = captured_examples(example)
        return [(match, certify(match, facts)) for pair in pairs for match in self.pattern.find(*pair)]

    def test_positives_match_as_often_as_pinned(self) -> None:
        for name, (example, count) in self.positives.items():
            assert len(self.found(example)) == count, name

    def test_positives_are_proved(self) -> None:
        for name, (example, _) in self.positives.items():
            for _, certificate in self.found(example):
                assert certificate.legal, f"{name}: {certificate.refused_because()}"

    def test_certificates_are_complete(self) -> None:
        for name, (example, _) in self.positives.items():
            for _, certificate in self.found(example):
                assert [o.name for o in certificate.obligations] == list(get_args(ObligationName)), name
                assert all(o.evidence for o in certificate.obligations), name
                assert certificate.matched_nodes and certificate.environment["torch"], name
                assert not any(line.startswith("/") for line in certificate.source_lines), name

    def test_near_misses_are_refused(self) -> None:
        for name, example in self.near_misses.items():
            for _, certificate in self.found(example):
                assert not certificate.legal, name
                assert certificate.refused_because(), name

    def test_a_changed_region_is_never_taken_for_the_same(self) -> None:
        """The first positive example with one thing changed: see :mod:`mutants` for the kinds."""
        example, _ = next(iter(self.positives.values()))
        pairs, facts = captured_examples(example)
        made = 0
        for pair in pairs:
            for match in self.pattern.find(*pair):
                for mutant in mutants(match):
                    made += 1
                    self._not_the_same(match, mutant, facts)
        assert made >= self.least_mutants, f"{made} mutants"

    def _not_the_same(self, match: Match, mutant: Mutant, facts: ModelFacts) -> None:
        captured = mutant.captured
        assert captured.graph is not None
        again = canonicalise(captured.graph, captured.leaves, captured.module_path)
        for other in self.pattern.find(captured, again):
            same = (other.anchor, other.constants) == (match.anchor, match.constants)
            same = same and [other.region.spec(r) for r in other.region.inputs] == [
                match.region.spec(r) for r in match.region.inputs
            ]
            assert not same or refused(other, facts), f"{match.label}: {mutant.name}"

    def test_a_hook_inside_is_refused(self) -> None:
        """A hook on a parameter of the region, or on a module that it computes in."""
        for name, (example, _) in list(self.positives.items())[:1]:
            pairs, facts = captured_examples(example)
            for pair in pairs:
                for match in self.pattern.find(*pair):
                    for where, seen in hooked_facts(match, facts).items():
                        assert hooks(match, seen)[0] == "refuted", f"{name}: {where}"

    def test_every_way_has_a_cost_or_a_reason(self) -> None:
        """Eight times the tokens cost no less; what is not counted says why."""
        for name, (example, _) in self.positives.items():
            for match in (m for pair in captured_examples(example)[0] for m in self.pattern.find(*pair)):
                for spec in self.pattern.variants() if self.pattern.costed else ():
                    few, many = (moved_bytes(match, spec, tokens) for tokens in (512, 4096))
                    told = bool(self.pattern.unranked(match, spec))
                    assert (few, many) == (0, 0) if told else 0 < few <= many, f"{name}: {spec.name}"

    def test_capture_is_deterministic(self) -> None:
        for name, (example, _) in self.positives.items():
            first, second = ([graph for _, graph in captured_examples(example)[0]] for _ in range(2))
            assert [g.nodes for g in first] == [g.nodes for g in second], name
            assert [g.digest for g in first] == [g.digest for g in second], name
