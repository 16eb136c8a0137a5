"""Gated latent attention without rotation (Kimi K3): dense in a library, or over chosen keys; our gate.

One region from the results of the projections to the input of the output projection, as in :mod:`dsa`. Forms:
``dense`` attends to all keys, ``own`` to those that its indexer chooses.
Legend: B rows, S tokens, T tokens of a rank, H heads, N, R, V widths of plain key, key part that all heads share, and
value, C latent width, J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import Match, Tensors, VariantSpec, View
from shardwright.agents.structure.patterns.dsa_cases import two_documents
from shardwright.agents.structure.patterns.dsa_kernels import by_kernels_gated
from shardwright.agents.structure.patterns.dsa_module import around
from shardwright.agents.structure.patterns.dsa_reading import Read
from shardwright.agents.structure.patterns.dsa_shared import (
    OURS,
    LatentAttentionPattern,
    check_attention,
    check_indexer,
    unfilled,
)
from shardwright.agents.structure.patterns.dsa_way import LayerSizes
from shardwright.agents.structure.patterns.mla_gated_reading import read_gated
from shardwright.agents.structure.patterns.mla_gated_spelling import formula, spell

LEARNING = ("q", "latent", "k_rot", "kv_b_weight", "gate")
CALLED = ("x", "attention_mask")
"""Arguments of the forward of a module that workers know to call."""
LARGE_WEIGHT = 1 << 20
LIFT = 3.0
CASES = ("normal", "half-the-heads-cut-off", "shut-gate", "tiny", "zero-latent")


class GatedLatentAttention(LatentAttentionPattern):
    """Attention and gate as one operator, with the choice where there is one."""

    name = "mla_gated"
    version = 1
    title = "Gated latent attention"
    trainable = LEARNING
    lora = "the up-projection's adapter is applied to what is absorbed or expanded, apart from the base"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        read = [read_gated(view, node) for node in view.ops("scaled_dot_product_attention")]
        found = [self._at(captured, graph, view, one) for one in read if one is not None]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, read: Read) -> Match | None:
        anchor = read.o.module_path
        parts = around(view, read, anchor)
        c = read.constants
        module: Any = captured.module.get_submodule(anchor.removeprefix(captured.module_path).removeprefix("."))
        called = tuple(inspect.signature(type(module).forward).parameters)[1:]
        top_k = getattr(getattr(module, "indexer", None), "index_topk", 0)
        own = {"index_scale": c["score_factor"] * c["weight_factor"]} if c["form"] == "own" else {}
        constants = {
            **c,
            **own,
            "top_k": top_k,
            "call": "mask" if called == CALLED else "",
            "not_plain": parts.because,
        }
        inputs = {role: node.id for role, node in read.inputs.items()}
        return self.bind(captured, graph, inputs, {"o": read.o.id}, constants, anchor, parts.roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return spell(values, constants)

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return formula(values, constants)

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Two documents under a mask; scores without ties, half of the heads cut off; a gate that is shut."""
        small = torch.Size(match.region.spec("kv_b_weight").shape).numel() <= LARGE_WEIGHT
        return {name: self._case(name, at, match) for at, name in enumerate(CASES if small else CASES[:1])}

    def _case(self, name: str, seed: int, match: Match) -> Tensors:
        generator = torch.Generator().manual_seed(61 + seed)
        shapes = {role: match.region.spec(role).shape for role in match.region.inputs}
        made = {r: torch.randn(s, generator=generator, dtype=torch.float64) for r, s in shapes.items() if r != "mask"}
        made["kv_b_weight"] *= shapes["kv_b_weight"][-1] ** -0.5
        if "mask" in shapes:
            made["mask"] = two_documents(shapes["mask"], torch.bool)
        if "index_q" in shapes:
            made["index_q"].abs_()
            made["index_k"].abs_().add_(LIFT)
            if name == "half-the-heads-cut-off":
                made["index_q"].unflatten(-1, (match.constants["index_heads"], -1))[..., ::2, :] *= -1
        if name == "shut-gate":
            made["gate"][:, 1] = -60.0
        if name == "tiny":
            made["latent"] *= 1e-7
        if name == "zero-latent":
            made["latent"][:, 1] = 0
        return made

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        c = match.constants
        if spec.provider != OURS:
            return ""
        if c["not_plain"]:
            return f"{match.anchor} is more than projections and norms: {c['not_plain']}"
        if not c["call"]:
            return f"{match.anchor} is called with other arguments than {', '.join(CALLED)}"
        if c["form"] == "dense" and c["top_k"]:
            return f"{match.anchor} has an indexer that this capture does not run: longer rows are another function"
        return ""

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        return lambda values: by_kernels_gated(values, match.constants)

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.dsa import contract

        c = match.constants
        (rows, C), (B, S, _) = match.region.spec("kv_b_weight").shape, match.region.spec("q").shape
        T, H, R = B * S, c["heads"], c["rope"]
        shapes = ((T, H, c["nope"]), (T, H, R), (T, C), (T, R), (rows, C), (T, H, c["value"]))
        parts = [unfilled(*shape, dtype=dtype) for shape in shapes]
        contract.check_static(*parts, value=c["value"], sinks=False, dense=c["form"] == "dense")
        if c["form"] == "own":
            check_attention(T, H, C, R, c["top_k"], dtype, c["scale"])
            check_indexer(T, c["index_heads"], c["index_width"], c["top_k"], dtype)
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        c, own = match.constants, match.constants["form"] == "own"
        shape = {"T": tokens, "H": c["heads"], "A": c["nope"], "B": c["value"], "R": c["rope"]}
        shape["V"] = match.region.spec("kv_b_weight").shape[-1]
        chosen = {"N": c["index_heads"], "D": c["index_width"], "K": min(tokens, c["top_k"])} if own else {}
        return {**shape, "N": 0, "D": 0, "K": 0, **chosen}

    def layer_sizes(self, match: Match, tokens: int) -> LayerSizes:
        c = match.constants
        return LayerSizes(
            H=c["heads"],
            N=c["index_heads"],
            D=c["index_width"],
            K=c["top_k"],
            V=match.region.spec("kv_b_weight").shape[-1],
            R=c["rope"],
            key=c["nope"] + c["rope"],
            value=c["value"],
        )
