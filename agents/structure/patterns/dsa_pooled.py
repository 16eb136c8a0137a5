"""Sparse latent attention whose indexer scores pools of keys: choice of pools, attention over their tokens.

One region from the results of the projections to the input of the output projection; the indexer is one leaf of the
capture (``opaque_indexers``) with its own parameters, for its code cannot be traced. Workers pool the keys in torch,
score the pools with our indexer and attend to the tokens of the chosen ones. Forms as in :mod:`dsa`.
Legend: B rows, S tokens, T tokens of a rank, H heads, N, V widths of key and value, C latent width, J indexer heads,
D indexer width, P tokens of a pool, K tokens of the chosen pools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import TOLERANCE, compare
from shardwright.agents.structure.interpret import Fp64Region, Sizes
from shardwright.agents.structure.patterns.base import Match, Tensors, VariantSpec, View
from shardwright.agents.structure.patterns.dsa_kernels import by_kernels_pooled
from shardwright.agents.structure.patterns.dsa_module import around_pooled
from shardwright.agents.structure.patterns.dsa_pooled_cases import CASES, case
from shardwright.agents.structure.patterns.dsa_pooled_reading import read_pooled
from shardwright.agents.structure.patterns.dsa_pooled_spelling import formula, members, spell
from shardwright.agents.structure.patterns.dsa_reading import Read
from shardwright.agents.structure.patterns.dsa_shared import (
    OURS,
    LatentAttentionPattern,
    check_attention,
    check_indexer,
)
from shardwright.agents.structure.patterns.dsa_way import LayerSizes

LEARNING = ("q", "latent", "kv_b_weight")
FEW, SMALL = 4, 2
"""Tokens of chosen pools, and of a pool, where the captured sequence leaves nothing to choose."""
LARGE_WEIGHT = 1 << 20
"""An up-projection of more values gets one case, and one with small pools."""
RULE_PLACE = 6
"""Arguments of the leaf: top_k stands here, the pool's tokens behind it."""


class PooledSparseAttention(LatentAttentionPattern):
    """Choice of pools and attention as one operator."""

    name = "dsa_pooled"
    version = 1
    title = "Sparse latent attention over pools"
    trainable = LEARNING
    maybe_empty = ("k_rot",)
    lora = (
        "the up-projection's adapter is applied to absorbed queries and mixed latents, apart from the base; the "
        "indexer's projections are called as the modules that they are"
    )

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        read = [read_pooled(view, node) for node in view.ops("scatter_add")]
        found = [self._at(captured, graph, view, one) for one in read if one is not None]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, read: Read) -> Match | None:
        anchor = read.o.module_path
        parts = around_pooled(view, read, anchor, read.indices)
        handed = read.indices if read.indices is not None else read.inputs["selected"]
        c = read.constants
        own = {}
        if c["form"] == "own":
            own = {"index_scale": (c["index_heads"] * c["index_width"]) ** -0.5, "top_k": c["k"]}
        constants = {
            **_sizes_of(captured, anchor),
            **c,
            **own,
            "hands_on": handed.id in graph.outputs,
            "not_plain": parts.because,
        }
        outputs = {"o": read.o.id, **({} if read.indices is None else {"indices": read.indices.id})}
        inputs = {role: node.id for role, node in read.inputs.items()}
        return self.bind(captured, graph, inputs, outputs, constants, anchor, parts.roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return spell(values, constants)

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return formula(values, constants)

    def comparable(self, results: Tensors, match: Match) -> Tensors:
        """The choice as a set of keys: the family leaves free in which order pools come."""
        if "indices" not in results:
            return results
        S = results["o"].shape[1]
        return {"o": results["o"], "chosen": members(results["indices"], S).double()}

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Scores without ties, half of the heads cut off, one loud query; every token valid: workers refuse padding."""
        shapes = {role: match.region.spec(role).shape for role in match.region.inputs}
        small = torch.Size(shapes["kv_b_weight"]).numel() <= LARGE_WEIGHT
        names = CASES if small else CASES[:1]
        return {name: case(name, at, shapes, match.constants) for at, name in enumerate(names)}

    def second_opinion(self, match: Match) -> str:
        """The region with small pools and few of them, where the captured sequence has no more than are chosen."""
        c = match.constants
        S = match.region.spec("q").shape[1]
        if c["form"] == "shared" or S // c["pool"] > c["k"] // c["pool"]:
            return ""
        shapes = {role: match.region.spec(role).shape for role in match.region.inputs}
        shapes["pool_position"] = (SMALL, shapes["pool_position"][1])
        other = {**c, "k": FEW, "pool": SMALL}
        leaf = next(node for node in match.region.nodes if "pooled_choice" in str(node.target))
        names = CASES[:2]
        cases = {f"small-pools-{name}": case(name, at, shapes, other) for at, name in enumerate(names)}
        whole = Fp64Region(match.region, Sizes({}))
        with _other_pools(leaf, FEW, SMALL):
            seen = compare(lambda v: self.comparable(whole(v), match), lambda v: formula(v, other), cases, LEARNING)
        if seen.error > TOLERANCE:
            raise ArithmeticError(f"with pools of {SMALL} tokens the results differ by {seen.error:.1e}")
        return f"; with {FEW // SMALL} of {S // SMALL} pools of {SMALL} too ({seen.values} numbers, {seen.error:.0e})"

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        c = match.constants
        if spec.provider != OURS:
            return ""
        if c["not_plain"]:
            return f"{match.anchor} is more than projections and norms: {c['not_plain']}"
        if not c["top_k"] or not c["pool"]:
            return f"{match.anchor} does not tell how many keys it selects in pools of how many"
        if not c.get("tail", True):
            return f"{match.anchor} leaves out the pool that a query is in: its first queries would see nothing"
        return ""

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        return lambda values: by_kernels_pooled(values, match.constants)

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        c = match.constants
        (_, C), (B, S, wide) = match.region.spec("kv_b_weight").shape, match.region.spec("q").shape
        T, H = B * S, wide // c["nope"]
        check_attention(T, H, C, 0, c["top_k"] + c["pool"] - 1, dtype, c["scale"])
        if c["form"] == "own":
            check_indexer(T, c["index_heads"], c["index_width"], c["top_k"] // c["pool"], dtype)
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        """Attention alone, N and D 0: scores of pools are a P-th of those of keys, and are counted on no side."""
        c = match.constants
        return {
            "T": tokens,
            "H": match.region.spec("q").shape[-1] // c["nope"],
            "N": 0,
            "D": 0,
            "K": min(tokens, c["top_k"] + c["pool"] - 1) if c["top_k"] else tokens,
            "V": match.region.spec("kv_b_weight").shape[-1],
            "R": 0,
        }

    def kernel_cost(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[str, dict[str, int]]:
        return "dsa", self.cost_shape(match, tokens)

    def layer_sizes(self, match: Match, tokens: int) -> LayerSizes:
        c, shape = match.constants, self.cost_shape(match, tokens)
        return LayerSizes(
            H=shape["H"],
            N=shape["N"],
            D=shape["D"],
            K=c["top_k"] + c["pool"] - 1,
            V=shape["V"],
            R=shape["R"],
            key=c["nope"] + c["rope"],
            value=c["value"],
        )


def _sizes_of(captured: CapturedGraph, anchor: str) -> dict[str, int]:
    """``top_k`` and ``pool`` as the module's configuration says; 0 where it does not."""
    inner = anchor.removeprefix(captured.module_path).removeprefix(".")
    config = getattr(captured.module.get_submodule(inner), "config", None)
    named = {"top_k": "index_topk", "pool": "index_kpool"}
    told = {name: getattr(config, field, None) for name, field in named.items()}
    return {name: value if isinstance(value, int) and value > 0 else 0 for name, value in told.items()}


@contextmanager
def _other_pools(leaf: fx.Node, top_k: int, pool: int) -> Iterator[None]:
    """While open, the choice of a traced region takes other numbers."""
    before = leaf.args
    leaf.args = (*before[:RULE_PLACE], top_k, pool, *before[RULE_PLACE + 2 :])
    try:
        yield
    finally:
        leaf.args = before
