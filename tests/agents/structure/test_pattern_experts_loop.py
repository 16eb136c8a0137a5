"""The experts block as a loop over matrices of its own, on the class that transformers ships and on changed copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.dbrx import modeling_dbrx
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig

from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.interpret import Fp64Region
from shardwright.agents.structure.patterns.experts_loop import OWN_STACKS, ExpertsLoop
from shardwright.agents.structure.testkit import PatternContract, captured_examples, meta

HIDDEN, WIDTH, EXPERTS, TOP = 48, 40, 4, 2
Example = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


class Loop(nn.Module):
    """Experts with stacks of their own, ``[E, out, in]``, in the usual loop; methods are what copies change."""

    def __init__(self, hidden: int = HIDDEN, width: int = WIDTH) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate = nn.Parameter(torch.empty(EXPERTS, width, hidden))
        self.up = nn.Parameter(torch.empty(EXPERTS, width, hidden))
        self.down = nn.Parameter(torch.empty(EXPERTS, hidden, width))

    def gated(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        return nn.functional.silu(gate) * up

    def shared_out(self, out: Tensor, share: Tensor, expert: int) -> Tensor:
        return out * share

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states, dtype=hidden_states.dtype, device=hidden_states.device)
        chosen = nn.functional.one_hot(top_k_index, num_classes=self.num_experts).permute(2, 1, 0)
        for hit in torch.greater(chosen.sum(dim=(-1, -2)), 0).nonzero():
            expert = hit[0]
            place, token = torch.where(chosen[expert])
            rows = hidden_states[token]
            gate, up = (nn.functional.linear(rows, stack[expert]) for stack in (self.gate, self.up))
            out = nn.functional.linear(self.gated(gate, up, expert), self.down[expert])
            total.index_add_(0, token, self.shared_out(out, top_k_weights[token, place, None], expert))
        return total


class Gelu(Loop):
    def gated(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        return nn.functional.gelu(gate) * up


class Tanh(Loop):
    """A gate that no form describes."""

    def gated(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        return torch.tanh(gate) * up


class OneDiffers(Loop):
    """The first expert has another gate than the last, which is the one that is read."""

    def gated(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        return nn.functional.gelu(gate) * up if expert == 0 else super().gated(gate, up, expert)


class Doubled(Loop):
    """One expert's share is doubled."""

    def shared_out(self, out: Tensor, share: Tensor, expert: int) -> Tensor:
        return 2.0 * (out * share) if expert == 1 else out * share


class ScaledInside(Loop):
    """A factor between the gate and the last product."""

    def gated(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        return nn.functional.silu(gate) * up * 0.5


class RealDiffers(Loop):
    """What is traced is the loop; what runs on real values doubles it."""

    def shared_out(self, out: Tensor, share: Tensor, expert: int) -> Tensor:
        return out * share if out.is_meta else 2.0 * (out * share)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = self.experts(x, index, weights)
        return result


def routing(tokens: int) -> tuple[Tensor, Tensor]:
    return meta(tokens, TOP, dtype=torch.long), meta(tokens, TOP)


def of(kind: type[nn.Module], **sizes: int) -> Example:
    return lambda: (Layer(kind(**sizes)), (meta(24, sizes.get("hidden", HIDDEN)), *routing(24)))


def dbrx() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = DbrxFFNConfig(hidden_size=HIDDEN, ffn_hidden_size=WIDTH, moe_num_experts=EXPERTS, moe_top_k=TOP)
    return Layer(modeling_dbrx.DbrxExperts(config)), (meta(2, 12, HIDDEN), *routing(24))


def wide_dbrx() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Widths that the differential test makes small, and with them the class's own numbers."""
    config = DbrxFFNConfig(hidden_size=768, ffn_hidden_size=1344, moe_num_experts=EXPERTS, moe_top_k=TOP)
    return Layer(modeling_dbrx.DbrxExperts(config)), (meta(2, 12, 768), *routing(24))


def hooked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer, tensors = dbrx()
    layer.get_submodule("experts.mlp").register_forward_hook(lambda module, args, output: None)
    return layer, tensors


class TestExpertsLoop(PatternContract):
    pattern = ExpertsLoop()
    positives = {"dbrx": (dbrx, 1), "stacks": (of(Loop), 1)}
    near_misses = {
        "tanh": of(Tanh),
        "one-expert-differs": of(OneDiffers),
        "one-share-doubled": of(Doubled),
        "scaled-inside": of(ScaledInside),
        "real-values-differ": of(RealDiffers),
        "hooked": hooked,
    }

    def test_near_misses_that_match_are_refused_for_their_own_reason(self) -> None:
        reasons = {
            "one-expert-differs": "re-trace",
            "one-share-doubled": "re-trace",
            "real-values-differ": "own loop",
            "hooked": "hooks",
        }
        for name, reason in reasons.items():
            ((_, certificate),) = self.found(self.near_misses[name])
            assert reason in certificate.refused_because(), name

    def test_the_loop_is_proved_as_it_is_and_as_the_class_runs_it(self) -> None:
        ((match, certificate),) = self.found(dbrx)
        evidence = {o.name: o.evidence for o in certificate.obligations}
        assert "class's own loop over the chosen experts" in evidence["differential-test"]
        assert match.roles == {"gate": "mlp.w1", "up": "mlp.v1", "down": "mlp.w2"}
        assert match.constants["layouts"] == {"gate": "out_in", "up": "out_in", "down": "in_out"}
        assert match.pattern.cost_shape(match, 100) == {"R": 200, "H": HIDDEN, "I": WIDTH, "E": EXPERTS}

    @pytest.mark.parametrize(("example", "gate"), [(wide_dbrx, "silu"), (of(Gelu), "gelu")])
    def test_large_widths_and_another_gate_are_proved(self, example: Example, gate: str) -> None:
        ((match, certificate),) = self.found(example)
        assert certificate.legal, certificate.refused_because()
        assert match.constants["gate"] == gate

    def test_no_operator_takes_matrices_of_their_own(self) -> None:
        (spec,) = (v for v in self.pattern.variants() if v.provider == "shardwright")
        assert spec.not_installable == OWN_STACKS

    def test_the_region_gives_what_the_class_gives(self) -> None:
        """Captured nodes on fp64 values against the class itself, an expert without rows among them."""
        ((match, _),) = self.found(dbrx)
        config = DbrxFFNConfig(hidden_size=HIDDEN, ffn_hidden_size=WIDTH, moe_num_experts=EXPERTS, moe_top_k=TOP)
        module, generator = modeling_dbrx.DbrxExperts(config).double(), torch.Generator().manual_seed(5)
        for value in module.parameters():
            value.data = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        x = torch.randn(2, 12, HIDDEN, generator=generator, dtype=torch.float64)
        index = torch.rand(24, EXPERTS - 1, generator=generator).topk(TOP).indices
        weights = torch.rand(24, TOP, generator=generator, dtype=torch.float64)
        values = {"hidden_states": x, "top_k_index": index, "top_k_weights": weights}
        values |= {role: module.get_parameter(name) for role, name in match.roles.items()}
        seen = Fp64Region(match.region, self.pattern.sizes(match))(values)["y"]
        torch.testing.assert_close(seen, module(x, index, weights), rtol=1e-12, atol=1e-12)


def test_a_longer_loop_than_is_unrolled_stays_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.agents.structure import opaque_loops

    monkeypatch.setattr(opaque_loops, "MOST", EXPERTS - 1)
    with pytest.raises(AssertionError, match="data-dependent"):
        captured_examples(dbrx)


def test_a_value_that_depends_on_data_can_be_looped_over_and_nothing_else() -> None:
    """A class that adds up how many experts were chosen is not traced as if all were."""

    class Counts(Loop):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            chosen = nn.functional.one_hot(top_k_index, num_classes=self.num_experts).sum((0, 1))
            return super().forward(hidden_states, top_k_index, top_k_weights) / len(chosen.nonzero())

    with pytest.raises(AssertionError):
        captured_examples(of(Counts))


def test_a_tied_matrix_is_read_in_place() -> None:
    """Gate and up as one parameter are no two roles."""

    class Tied(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.up = self.gate

    pairs, facts = captured_examples(of(Tied))
    assert [certify(m, facts).legal for pair in pairs for m in ExpertsLoop().find(*pair)] in ([], [False])
