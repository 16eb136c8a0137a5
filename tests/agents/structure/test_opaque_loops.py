"""Values whose sizes depend on the routing: what becomes a leaf, what the leaves compute, what is left alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer

from shardwright.agents.structure.canonical import canonicalise
from shardwright.agents.structure.capture import capture_module
from shardwright.agents.structure.interpret import Fp64Region, Sizes
from shardwright.agents.structure.opaque_loops import counted_cuts, run_pieces, run_rows
from shardwright.agents.structure.region import escaping, extract
from shardwright.agents.structure.testkit import meta

HIDDEN, EXPERTS, TOKENS = 16, 4, 12


class Sorted(nn.Module):
    """Rows in the order of their experts, cut by the number of each, one linear for each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        order = index.argsort(stable=True)
        counts = self.counted(F.one_hot(index, EXPERTS).sum(0).tolist())
        pieces = x[order].split(counts, dim=0)
        rows = torch.cat([F.linear(piece, self.weight[e]) for e, piece in enumerate(pieces)])
        return torch.zeros_like(x).index_add(0, order, rows)

    def counted(self, counts: list[int]) -> list[int]:
        return counts


class Longest(Sorted):
    """The counts are looked at, not only cut by."""

    def counted(self, counts: list[int]) -> list[int]:
        return [max(counts)] * EXPERTS


class Across(Sorted):
    """The counts cut columns."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.cat(x.split(F.one_hot(index, EXPERTS).sum(0).tolist(), dim=1), dim=1)


def captured(module: nn.Module, *tensors: Tensor):  # type: ignore[no-untyped-def]
    module.to("meta", torch.bfloat16)
    return capture_module(module, tensors, "layer", "layer")[0]


def test_rows_cut_by_counts_are_leaves_that_compute_what_the_class_does() -> None:
    one = captured(Sorted(), meta(TOKENS, HIDDEN), meta(TOKENS, dtype=torch.long))
    graph = canonicalise(one.graph, one.leaves)
    assert [node.target for node in graph.nodes].count("pieces") == 1
    inputs = {node.target.rpartition(".")[2]: node.id for node in graph.nodes if node.kind != "op"}
    region = extract(graph, inputs, {"y": graph.outputs[0]})
    assert region is not None
    generator, module = torch.Generator().manual_seed(1), Sorted().double()
    weight = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    module.weight.data = weight
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    for index in (torch.randint(EXPERTS, (TOKENS,), generator=generator), torch.full((TOKENS,), 2)):
        seen = Fp64Region(region, Sizes({}))({"weight": weight, "tensors_0": x, "tensors_1": index})["y"]
        torch.testing.assert_close(seen, module(x, index))


@pytest.mark.parametrize("kind", [Longest, Across])
def test_counts_that_are_used_otherwise_leave_the_layer_opaque(kind: type[nn.Module]) -> None:
    one = captured(kind(), meta(TOKENS, HIDDEN), meta(TOKENS, dtype=torch.long))
    assert one.graph is None and one.reason


def test_lists_of_real_values_and_the_methods_themselves_stay() -> None:
    own, module = torch.Tensor.tolist, Sorted()
    nn.init.normal_(module.weight)
    x, index = torch.randn(TOKENS, HIDDEN), torch.arange(TOKENS) % EXPERTS
    plain = module(x, index)
    with counted_cuts(module):
        assert torch.Tensor.tolist is own and torch.equal(module(x, index), plain)
    assert torch.Tensor.tolist is own and "forward" not in vars(module)


def test_the_leaves_on_real_values() -> None:
    chosen = torch.tensor([[0, 1, 0], [1, 0, 1]])
    place, token = run_rows(chosen)
    assert sorted(zip(place.tolist(), token.tolist(), strict=True)) == [(0, 1), (1, 0), (1, 2)]
    rows = torch.arange(6).reshape(3, 2)
    assert [piece.tolist() for piece in run_pieces(rows, torch.tensor([1, 0, 2]))] == [[[0, 1]], [], [[2, 3], [4, 5]]]


def test_an_indexer_that_walks_over_tokens_is_a_leaf_of_the_sizes_that_it_gives() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = SimpleNamespace(
                indexer_n_heads=2,
                indexer_kv_heads=1,
                indexer_head_dim=8,
                indexer_budget=4,
                indexer_compress_ratio=2,
                hidden_size=HIDDEN,
                rms_norm_eps=1e-6,
            )
            self.indexer = Qwen4ExpTextQSAIndexer(sizes, 0)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
            mask: Tensor = self.indexer(x, (cos, sin), visible, None)
            return mask

    shapes = ((2, TOKENS, HIDDEN), (2, TOKENS, 8), (2, TOKENS, 8))
    real = Attention().float()(*(torch.randn(s) for s in shapes), torch.ones(2, 1, TOKENS, TOKENS).bool().tril())
    one = captured(Attention(), *(meta(*s) for s in shapes), meta(2, 1, TOKENS, TOKENS, dtype=torch.bool))
    graph = canonicalise(one.graph, one.leaves)
    (leaf,) = (node for node in graph.nodes if node.target == "chosen_mask")
    assert leaf.output is not None
    assert (leaf.output.shape, leaf.output.dtype) == (tuple(real.shape), str(real.dtype).removeprefix("torch."))


class Gated(nn.Module):
    """``silu(x) · y``; ``between`` gets the inner value, and a tensor beside."""

    def between(self, inner: Tensor, beside: Tensor) -> None:
        (inner.sum() > 0).logical_not()

    def forward(self, x: Tensor, y: Tensor, beside: Tensor) -> Tensor:
        inner = F.silu(x)
        self.between(inner, beside)
        return inner * y


class Writes(Gated):
    def between(self, inner: Tensor, beside: Tensor) -> None:
        beside.add_(inner)


class Draws(Gated):
    def between(self, inner: Tensor, beside: Tensor) -> None:
        torch.bernoulli(inner)


@pytest.mark.parametrize(("kind", "reads"), [(Gated, 0), (Writes, 1), (Draws, 1)])
def test_only_a_read_that_leaves_a_trace_is_one(kind: type[nn.Module], reads: int) -> None:
    """Where a loop over hit experts became one over all, the test for hits is left over, and read by nobody."""
    one = captured(kind(), meta(3, 4), meta(3, 4), meta(3, 4))
    graph = canonicalise(one.graph, one.leaves)
    named = {node.target: node.id for node in graph.nodes if node.kind == "input"}
    region = extract(graph, {"x": named["tensors_0"], "y": named["tensors_1"]}, {"y": graph.outputs[0]})
    assert region is not None and len(escaping(region)) == reads
