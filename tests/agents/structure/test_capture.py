"""What is captured: one layer of each kind, names, sources, counts of matches, determinism, cost."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from torch import nn

from shardwright.agents.structure.capture import capture_model
from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.facts import observe
from shardwright.agents.structure.kinds import group_layers, signature
from shardwright.agents.structure.propose import find_matches
from shardwright.agents.structure.skeleton import find_layers
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.profile import LayerKind

PINNED = {
    "mixtral": {
        ("layer", "rms_norm"): 2,
        ("layer", "add_rms_norm"): 2,
        ("layer", "router"): 1,
        ("layer", "rope"): 1,
        ("layer", "qkv_merge"): 1,
        ("layer/experts", "swiglu"): 1,
        ("layer/experts", "experts"): 1,
        ("final", "rms_norm"): 1,
        ("final", "linear_cross_entropy"): 1,
    },
    "qwen3_moe": {
        ("layer", "rms_norm"): 4,
        ("layer", "add_rms_norm"): 2,
        ("layer", "router"): 1,
        ("layer", "qk_norm_rope"): 1,
        ("layer", "qkv_merge"): 1,
        ("layer/experts", "swiglu"): 1,
        ("layer/experts", "experts"): 1,
        ("final", "rms_norm"): 1,
        ("final", "linear_cross_entropy"): 1,
    },
    "deepseek_v3": {
        ("layer", "rms_norm"): 4,
        ("layer", "add_rms_norm"): 1,
        ("layer", "swiglu"): 1,
        ("layer", "latent_norm"): 1,
        ("layer", "rope"): 2,
        ("layer-2", "rope"): 2,
        ("layer", "qkv_merge"): 1,
        ("layer", "gate_up_merge"): 1,
        ("layer", "mla"): 1,
        ("layer-2", "rms_norm"): 4,
        ("layer-2", "add_rms_norm"): 2,
        ("layer-2", "swiglu"): 1,
        ("layer-2", "router"): 1,
        ("layer-2", "latent_norm"): 1,
        ("layer-2", "qkv_merge"): 1,
        ("layer-2", "gate_up_merge"): 1,
        ("layer-2", "shared_expert"): 1,
        ("layer-2", "mla"): 1,
        ("layer-2/experts", "swiglu"): 1,
        ("layer-2/experts", "experts"): 1,
        ("final", "rms_norm"): 1,
        ("final", "linear_cross_entropy"): 1,
    },
}
"""(graph, pattern) → matches. The dense first layer of deepseek_v3 occurs once, so nothing precedes it in its kind."""


@pytest.mark.parametrize("family", sorted(PINNED))
def test_match_counts_are_pinned(family, tiny, captured) -> None:  # type: ignore[no-untyped-def]
    matches = find_matches(captured(tiny(family)))
    assert Counter((m.captured.kind, m.pattern.name) for m in matches) == PINNED[family]


@pytest.mark.parametrize("family", sorted(PINNED))
def test_only_the_seam_between_layers_is_refused(family, tiny, captured) -> None:  # type: ignore[no-untyped-def]
    model = tiny(family)
    facts = observe(model, [f"model.layers.{i}" for i in range(3)], ())
    for match in find_matches(captured(model)):
        certificate = certify(match, facts)
        assert certificate.legal == (not match.seam), certificate.refused_because()
        if match.seam:
            assert "sharding-boundary: refuted" in certificate.refused_because()


def test_capture_twice_gives_the_same_graphs(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    first, second = (captured(tiny("mixtral")) for _ in range(2))
    assert [c.nodes for _, c in first] == [c.nodes for _, c in second]
    assert [c.digest for _, c in first] == [c.digest for _, c in second]


def test_nodes_keep_module_class_and_relative_source(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    layer = next(canonical for one, canonical in captured(tiny("mixtral")) if one.kind == "layer")
    root = next(n for n in layer.nodes if n.target == "rsqrt")
    assert root.module_path == "model.layers.0.input_layernorm" and root.module_class == "MixtralRMSNorm"
    assert root.source.startswith("transformers/models/mixtral/modeling_mixtral.py:")
    ops = [n for n in layer.nodes if n.kind == "op"]
    assert all(n.source and not n.source.startswith("/") for n in ops)
    parameters = {n.target for n in layer.nodes if n.kind == "parameter"}
    names = {name for name, _ in tiny("mixtral").named_parameters() if name.startswith("model.layers.0.")}
    assert parameters == names


def test_ids_are_positions_and_operands_come_first(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    for _, canonical in captured(tiny("deepseek_v3")):
        seen: set[str] = set()
        for position, node in enumerate(canonical.nodes):
            assert node.id == f"n{position:03d}" and set(node.inputs) <= seen
            seen.add(node.id)


def test_digest_ignores_names_and_sees_sizes(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    def digest(**changes: int) -> str:
        return next(c.digest for one, c in captured(tiny("mixtral", **changes)) if one.kind == "layer")

    assert digest() == digest(num_hidden_layers=2) != digest(intermediate_size=128)


def test_the_model_is_left_as_it_was(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    model = tiny("qwen3_moe").eval()

    def state() -> list[tuple[str, type, bool, bool]]:
        return [(path, type(m), m.training, "forward" in vars(m)) for path, m in model.named_modules()]

    before = state()
    captured(model)
    assert before == state()


def test_layers_that_differ_in_a_constant_are_apart(tiny) -> None:  # type: ignore[no-untyped-def]
    model = tiny("mixtral")
    layers = model.model.layers
    layers[1].input_layernorm.variance_epsilon = 1e-3
    kind = LayerKind(name="layer", attention="full", mlp="moe", layer_indices=(0, 1, 2), parameters=1)
    groups = {group.name: group.indices for group in group_layers(layers, (kind,))}
    assert groups == {"layer": (0, 2), "layer-2": (1,)}
    assert signature(layers[0]) == signature(layers[2]) != signature(layers[1])


def test_a_layer_that_cannot_be_traced_is_opaque_with_the_reason(tiny) -> None:  # type: ignore[no-untyped-def]
    class DataDependent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + float(x.float().sum().item() > 0 and 1.0)

    model = tiny("mixtral")
    for layer in model.model.layers:
        layer.input_layernorm = DataDependent()
    kinds = (LayerKind(name="layer", attention="full", mlp="moe", layer_indices=(0, 1, 2), parameters=1),)
    graphs = {one.kind: one for one in capture_model(model, kinds, 3)}
    assert graphs["layer"].capture == "opaque" and graphs["layer"].reason
    assert graphs["final"].capture == "export"


def test_a_model_without_the_named_number_of_layers_is_refused(tiny) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError) as raised:
        find_layers(tiny("mixtral"), 99)
    assert raised.value.code == "checkpoint/no-decoder-layers"


def test_thirty_layers_cost_as_little_as_one(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    model = tiny("mixtral", num_hidden_layers=30, hidden_size=576, vocab_size=49152)
    start = time.perf_counter()
    pairs = captured(model)
    assert time.perf_counter() - start < 20
    assert [len(one.occurrences) for one, _ in pairs] == [30, 30, 1, 1]
    assert all(len(canonical.nodes) < 200 for _, canonical in pairs)


def test_a_block_without_gradient_is_part_of_its_graph() -> None:
    """The operands of a ``no_grad`` block stay those of the nodes around it; it adds no input of its own."""
    from shardwright.agents.structure.flatten import flatten

    class Scored(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            with torch.no_grad():
                m = y * self.w
            return y * m

    exported = torch.export.export(Scored(), (torch.randn(3, 4),))
    graph = flatten(exported.graph_module)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    assert len(places) == 2, "w and x"
    assert all(node.users for node in graph.nodes if node.op != "output")
