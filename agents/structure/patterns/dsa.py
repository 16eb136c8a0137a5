"""Sparse latent attention with its indexer (DSA): rotation, choice of keys, attention over them, gate.

One region from the results of the projections to the input of the output projection. Projections, their adapters and
all norms stay outside; the up-projection of keys and values is inside, for workers absorb it into queries and outputs.
Forms: ``own`` chooses keys by its indexer, ``shared`` takes the choice of an earlier layer.
Legend: B batch, S tokens, T tokens of a rank, H heads, N, R, V widths of plain key, rotated key and value, C latent
width, J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import TOLERANCE, compare
from shardwright.agents.structure.interpret import Fp64Region, Sizes
from shardwright.agents.structure.patterns.base import Match, Tensors, VariantSpec, View
from shardwright.agents.structure.patterns.dsa_cases import case, two_documents
from shardwright.agents.structure.patterns.dsa_kernels import by_kernels
from shardwright.agents.structure.patterns.dsa_module import around
from shardwright.agents.structure.patterns.dsa_reading import Read, read_attention
from shardwright.agents.structure.patterns.dsa_shared import (
    OURS,
    LatentAttentionPattern,
    check_attention,
    check_indexer,
)
from shardwright.agents.structure.patterns.dsa_spelling import formula, spell, visible
from shardwright.agents.structure.patterns.dsa_way import LayerSizes

LEARNING = ("q", "latent", "k_rot", "kv_b_weight")
MAYBE_LEARNING = ("gate", "sinks")
FEW = 5
"""Keys that are chosen where the captured sequence is no longer than the model's own choice."""
LARGE_WEIGHT = 1 << 20
"""An up-projection of more values gets one case, and one with fewer keys: a real one has 16 M."""


class SparseLatentAttention(LatentAttentionPattern):
    """Indexer, choice and attention as one operator."""

    name = "dsa"
    version = 1
    title = "Sparse latent attention"
    trainable = LEARNING
    lora = "the up-projection's adapter is applied to absorbed queries and mixed latents, apart from the base"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found = []
        for scatter in view.ops("scatter"):
            read = read_attention(view, scatter)
            match = None if read is None else self._at(captured, graph, view, read)
            found.append(match)
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, read: Read) -> Match | None:
        anchor = read.o.module_path
        parts = around(view, read, anchor)
        handed = read.indices if read.indices is not None else read.inputs["selected"]
        scale = math.prod([read.constants.get("score_factor", 1.0), *read.constants.get("weight_factors", ())])
        constants = {
            **read.constants,
            "index_scale": scale,
            "hands_on": handed.id in graph.outputs,
            "not_plain": parts.because,
            **_sizes_of(captured, anchor),
        }
        outputs = {"o": read.o.id, **({} if read.indices is None else {"indices": read.indices.id})}
        inputs = {role: node.id for role, node in read.inputs.items()}
        return self.bind(captured, graph, inputs, outputs, constants, anchor, parts.roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return spell(values, constants)

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return formula(values, constants)

    def gradients(self, match: Match) -> tuple[str, ...]:
        return (*LEARNING, *(role for role in MAYBE_LEARNING if role in match.region.inputs))

    def comparable(self, results: Tensors, match: Match) -> Tensors:
        """The choice as a set of visible keys: the families fill early rows with keys that are masked again."""
        if "indices" not in results:
            return results
        mask = two_documents(match.region.spec("mask").shape, torch.bool)
        chosen = torch.zeros(mask[:, 0].shape, dtype=torch.bool).scatter(-1, results["indices"].long(), True)
        return {"o": results["o"], "chosen": (chosen & visible(mask)).double()}

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Scores without ties; rows that share their keys; one loud query; two documents in the second row."""
        shapes = {role: match.region.spec(role).shape for role in match.region.inputs}
        kind = getattr(torch, match.region.spec("mask").dtype)
        small = torch.Size(shapes["kv_b_weight"]).numel() <= LARGE_WEIGHT
        names = ("normal", "shared-keys", "loud-query", "tiny", "zero-latent") if small else ("normal",)
        return {name: case(name, at, shapes, match.constants, kind) for at, name in enumerate(names)}

    def second_opinion(self, match: Match) -> str:
        """The region with a smaller choice, where that of the capture takes every key."""
        c = match.constants
        S = match.region.spec("mask").shape[-1]
        if c["form"] == "shared":
            return ""
        if c["top_k"] and c["k"] != min(c["top_k"], S):
            raise ArithmeticError(f"the graph chooses {c['k']} of {S} keys, the module says {c['top_k']}")
        if c["k"] < S:
            return ""
        fewer = {**c, "k": FEW}
        tops = [n for n in match.region.nodes if "topk" in str(n.target)]
        cases = {"fewer-keys": self.cases(match, Sizes({}))["normal"]}
        whole = Fp64Region(match.region, Sizes({}))
        with _other_count(tops, FEW):
            seen = compare(
                lambda v: self.comparable(whole(v), match),
                lambda v: formula(v, fewer),
                cases,
                self.gradients(match),
            )
        if seen.error > TOLERANCE:
            raise ArithmeticError(f"with a choice of {FEW} keys the results differ by {seen.error:.1e}")
        return f"; with {FEW} of {S} keys too ({seen.values} numbers, {seen.error:.0e})"

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        if spec.provider != OURS:
            return ""
        if match.constants["not_plain"]:
            return f"{match.anchor} is more than projections and norms: {match.constants['not_plain']}"
        if not match.constants["top_k"]:
            return f"{match.anchor} does not tell how many keys it selects"
        return ""

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        return lambda values: by_kernels(values, match.constants)

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        c = match.constants
        (_, C), (B, S, _) = match.region.spec("kv_b_weight").shape, match.region.spec("q").shape
        T, H = B * S, match.region.spec("q").shape[-1] // (c["nope"] + c["rope"])
        check_attention(T, H, C, c["rope"], c["top_k"], dtype, c["scale"])
        if c["form"] == "own":
            J = match.region.spec("index_weights").shape[-1]
            check_indexer(T, J, c["index_width"], c["top_k"], dtype, c["rope"], c["index_layout"])
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        c = match.constants
        own = c["form"] == "own"
        return {
            "T": tokens,
            "H": match.region.spec("q").shape[-1] // (c["nope"] + c["rope"]),
            "N": match.region.spec("index_weights").shape[-1] if own else 0,
            "D": c["index_width"] if own else 0,
            "K": min(tokens, c["top_k"] or tokens),
            "V": match.region.spec("kv_b_weight").shape[-1],
            "R": c["rope"],
        }

    def layer_sizes(self, match: Match, tokens: int) -> LayerSizes:
        c, shape = match.constants, self.cost_shape(match, tokens)
        return LayerSizes(
            H=shape["H"],
            N=shape["N"],
            D=shape["D"],
            K=c["top_k"],
            V=shape["V"],
            R=shape["R"],
            key=c["nope"] + c["rope"],
            value=c["value"],
        )


def _sizes_of(captured: CapturedGraph, anchor: str) -> dict[str, int]:
    """``top_k`` as the module's indexer, or its configuration, says; 0 where neither does."""
    inner = anchor.removeprefix(captured.module_path).removeprefix(".")
    module: Any = captured.module.get_submodule(inner)
    for owner in (getattr(module, "indexer", None), getattr(module, "config", None)):
        value = getattr(owner, "index_topk", None)
        if isinstance(value, int) and value > 0:
            return {"top_k": value}
    return {"top_k": 0}


class _other_count:
    """While open, the choices of a traced region take another number of keys."""

    def __init__(self, nodes: list[fx.Node], count: int) -> None:
        self.nodes, self.count = nodes, count
        self.before = [node.args for node in nodes]

    def __enter__(self) -> None:
        for node in self.nodes:
            node.args = (node.args[0], self.count, *node.args[2:])

    def __exit__(self, *_: object) -> None:
        for node, args in zip(self.nodes, self.before, strict=True):
            node.args = args
