"""Hyper-connection: the weights under which a half of a layer reads N residual streams and is added to them.

From the normalised streams one product gives three sets of numbers a token: how streams are summed for the half's input
(``pre``, used here), how its result is spread over them (``post``), and how they are mixed with each other (``comb``,
made doubly stochastic by Sinkhorn-Knopp steps). A module of its own, so that workers can compile it whole: spelled in
torch it is some 130 kernels, most of them on 4 × 4 numbers a token. arXiv 2512.24880; DeepSeek-V4's and GLM-5 Next's.
Legend: B batch, T tokens, N streams, H hidden, M = 2·N + N² numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.rms_norm import normalised, sole_content
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

STREAM_DIMS = 4
SMALL_HIDDEN = 24
"""H of the differential test: N·H must stay N times H."""


class HyperConnection(Pattern):
    """Numbers by token, their Sinkhorn steps, and the sum of streams that a half of a layer reads."""

    name = "hyper_connection"
    version = 1
    title = "Hyper-connection"
    trainable = ("streams", "fn", "base", "scale")

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found = [self._at(captured, graph, view, node) for node in view.ops("linear")]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, numbers: OpNode) -> Match | None:
        fn = view.through(view.operand(numbers, 1), "cast")
        norm = normalised(view, view.operand(numbers))
        if norm is None or fn.kind != "parameter" or len(numbers.inputs) != 2 or not norm[0].output:
            return None
        streams = view.operand(norm[0]) if view.is_op(norm[0], "reshape", 1) else norm[0]
        if not streams.output or not fn.output or len(streams.output.shape) != STREAM_DIMS:
            return None
        count = streams.output.shape[-2]
        anchor = numbers.module_path
        inside = [
            n for n in graph.nodes if n.kind == "op" and (n.module_path == anchor or below(n.module_path, anchor))
        ]
        leaves = self._leaves(view, inside, fn, count)
        outputs = _outputs(view, inside, streams.output.shape)
        constants = _constants(view, inside, norm[1])
        if leaves is None or outputs is None or constants is None:
            return None
        roles = {role: below(node.target, anchor) for role, node in leaves.items()}
        if None in roles.values():
            return None
        inputs = {"streams": streams.id} | {role: node.id for role, node in leaves.items()}
        named = {role: str(name) for role, name in roles.items()}
        return self.bind(captured, graph, inputs, outputs, constants | {"streams": count}, anchor, named)

    def _leaves(self, view: View, inside: list[OpNode], fn: OpNode, streams: int) -> dict[str, OpNode] | None:
        """The three parameters by their sizes."""
        numbers = 2 * streams + streams**2
        read = {i for node in inside for i in node.inputs if view.graph.by_id[i].kind == "parameter"}
        others = [view.graph.by_id[i] for i in sorted(read) if i != fn.id]
        shapes = {node.output.shape: node for node in others if node.output}
        if fn.output is None or fn.output.shape[0] != numbers or set(shapes) != {(numbers,), (3,)} or len(others) != 2:
            return None
        return {"fn": fn, "base": shapes[(numbers,)], "scale": shapes[(3,)]}

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        streams, n, eps = values["streams"], constants["streams"], constants["hc_eps"]
        wide = streams.view(*streams.shape[:2], -1).to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + constants["eps"])
        numbers = F.linear(wide, values["fn"].to(torch.float32))
        pre_w, post_w, comb_w = numbers.split([n, n, n * n], dim=-1)
        pre_b, post_b, comb_b = values["base"].split([n, n, n * n])
        pre_s, post_s, comb_s = values["scale"].unbind(0)
        pre = torch.sigmoid(pre_w * pre_s + pre_b) + eps
        post = constants["post"] * torch.sigmoid(post_w * post_s + post_b)
        comb = comb_w.view(*comb_w.shape[:-1], n, n) * comb_s + comb_b.view(n, n)
        comb = torch.softmax(comb, dim=-1) + eps
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
        for _ in range(constants["steps"] - 1):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
        collapsed = (pre.unsqueeze(-1) * streams).sum(dim=2).to(streams.dtype)
        return {"post": post, "comb": comb, "collapsed": collapsed}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Number by number; Sinkhorn's steps as two vectors that scale rows and columns of the first matrix."""
        streams, n, eps = values["streams"], constants["streams"], constants["hc_eps"]
        length = torch.einsum("btnh,btnh->bt", streams, streams) / (n * streams.shape[-1]) + constants["eps"]
        weights = values["fn"].reshape(-1, n, streams.shape[-1])
        numbers = torch.einsum("btnh,mnh->btm", streams, weights) / length.sqrt().unsqueeze(-1)
        sizes = (n, n, n * n)
        scale = torch.cat([one.expand(size) for one, size in zip(values["scale"], sizes, strict=True)])
        pre, post, comb = (numbers * scale + values["base"]).split(sizes, dim=-1)
        grown = torch.exp(comb - comb.reshape(*comb.shape[:-1], n, n).amax(-1).repeat_interleave(n, -1))
        first = grown.reshape(*comb.shape[:-1], n, n)
        first = first / first.sum(-1, keepdim=True) + eps
        rows, columns = torch.ones_like(first[..., 0]), torch.ones_like(first[..., 0])
        for step in range(constants["steps"]):
            if step:
                rows = rows / (torch.einsum("...r,...rc,...c->...r", rows, first, columns) + eps)
            columns = columns / (torch.einsum("...r,...rc,...c->...c", rows, first, columns) + eps)
        return {
            "post": constants["post"] / (1 + torch.exp(-post)),
            "comb": torch.einsum("...r,...rc,...c->...rc", rows, first, columns),
            "collapsed": torch.einsum("btn,btnh->bth", 1 / (1 + torch.exp(-pre)) + eps, streams),
        }

    def sizes(self, match: Match) -> Sizes:
        """N·H stays N times H."""
        hidden, n = match.region.spec("streams").shape[-1], match.constants["streams"]
        return Sizes({hidden: SMALL_HIDDEN, n * hidden: n * SMALL_HIDDEN})

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Streams of any size; numbers of order one, since under saturated ones gradients are nothing but rounding."""
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in match.region.inputs}
        cases = float_cases(shapes, seed=11, strided=())
        for case in cases.values():
            case |= {role: cases["normal"][role].clone() for role in ("fn", "base", "scale")}
            case["fn"] *= shapes["fn"][-1] ** -0.5
        return cases

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        return (
            VariantSpec("compile", "compile", "-", anywhere),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """A module's whole forward is compiled: it must do nothing else."""
        return "" if spec.provider == "eager" else sole_content(match)

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        shape = match.region.spec("streams").shape
        return {"T": tokens, "N": shape[-2], "H": shape[-1], "S": match.constants["steps"]}


def _outputs(view: View, inside: list[OpNode], streams: tuple[int, ...]) -> dict[str, str] | None:
    """What is read outside the module, by its shape."""
    ids = {node.id for node in inside}
    *lead, count, hidden = streams
    wanted = {(*lead, count): "post", (*lead, count, count): "comb", (*lead, hidden): "collapsed"}
    found = [n for n in inside if n.output and any(user.id not in ids for user in view.graph.users(n.id))]
    found += [n for n in inside if n.output and n.id in view.graph.outputs and n not in found]
    shapes = {node.output.shape: node for node in found if node.output}
    if len(wanted) != 3 or set(shapes) != set(wanted) or len(found) != len(wanted):
        return None
    return {wanted[shape]: node.id for shape, node in shapes.items()}


def _constants(view: View, inside: list[OpNode], eps: float) -> dict[str, Any] | None:
    """The small number beside every weight, how often columns are normalised, and the factor of ``post``."""
    divisions = sum(view.is_op(node, "div", 2) for node in inside)
    factors = {n.arguments["other"] for n in inside if view.is_op(n, "mul", 1) and "other" in n.arguments}
    after = {
        n.arguments["other"]
        for n in inside
        if view.is_op(n, "add", 1) and view.operand(n).target in ("sigmoid", "softmax")
    }
    if divisions % 2 == 0 or len(factors) != 1 or len(after) != 1:
        return None
    return {"eps": eps, "hc_eps": next(iter(after)), "steps": (divisions + 1) // 2, "post": next(iter(factors))}
