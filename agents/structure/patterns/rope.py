"""Rotary position embedding: of the queries and keys of one attention, or of one tensor.

Forms: ``pair`` rotates q and k, heads last, by halves with one table of positions, and leaves them heads first: the
operator of q/k norm + RoPE computes it without norms. ``half-split`` rotates one tensor's dimension j with j + D/2
(``x·cos + [−x₂, x₁]·sin``), ``interleaved`` neighbours, with the results in halves; ``partial`` says that only a part
of the head's width is rotated. What lies inside q/k norm + RoPE or sparse latent attention is left to those regions.
Legend: B batch, T tokens, Q and K heads, D head width, W rotated width of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import PART_OF_MODULE, Match, Pattern, Tensors, VariantSpec, View
from shardwright.agents.structure.patterns.dsa import SparseLatentAttention
from shardwright.agents.structure.patterns.qk_norm_rope import (
    PROJECTIONS,
    QkNormRope,
    Turned,
    plain_attention,
    queries_first,
    rotation,
    turn,
)
from shardwright.agents.structure.patterns.rms_norm import rows_per_token
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

HEADS_FIRST = {"dims": [-4, -2, -3, -1]}
LARGER: tuple[Pattern, ...] = (QkNormRope(), SparseLatentAttention())
"""Regions that hold rotations of their own."""
PAIR = "pair"
TABLES = 2
NUMBERED = re.compile(r"(?P<name>.*?)(?P<at>\d+)")
"""How a capture calls one of several tensors that a layer is given: in the order of its arguments."""
QK_ONLY = "takes the queries and keys of one attention together"


class Rope(Pattern):
    """Rotation of queries and keys."""

    name = "rope"
    version = 2
    title = "Rotary embedding"
    contiguous = ("q", "k")
    strided = ("x",)

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        larger = [match for pattern in LARGER for match in pattern.find(captured, graph)]
        taken = {i for match in larger for i in match.region.canonical_ids}
        pairs = [match for match in self._pairs(captured, graph, view) if not taken & {*match.region.canonical_ids}]
        taken |= {i for match in pairs for i in match.region.canonical_ids}
        found = [self._half_split(captured, graph, view, node) for node in view.ops("add")]
        found += [self._interleaved(captured, graph, view, node) for node in view.ops("cat")]
        alone = [match for match in found if match is not None and match.region.outputs["y"] not in taken]
        return (*pairs, *alone)

    def _pairs(self, captured: CapturedGraph, graph: CanonicalGraph, view: View) -> Iterator[Match]:
        """Both rotations of a module whose product reads them."""
        by_place: dict[str, list[Turned]] = {}
        for heads in view.ops("permute"):
            found = rotation(view, heads) if heads.arguments == HEADS_FIRST else None
            if found is not None:
                by_place.setdefault(found[0].module_path, []).append(Turned(view.operand(heads), *found))
        for place, pair in by_place.items():
            ordered = queries_first(view, pair)
            match = self._pair(captured, graph, view, place, *ordered) if ordered is not None else None
            if match is not None:
                yield match

    def _pair(
        self, captured: CapturedGraph, graph: CanonicalGraph, view: View, place: str, q: Turned, k: Turned
    ) -> Match | None:
        """Where both turn by the same tables and come from projections of the names that workers call."""
        same = (q.cos, q.sin, q.width) == (k.cos, k.sin, k.width)
        made = [_projected(view, one.x) == f"{place}.{name}" for one, name in ((q, "q_proj"), (k, "k_proj"))]
        if not same or not all(made) or any(one.x.output is None or len(one.x.output.shape) != 4 for one in (q, k)):
            return None
        assert q.x.output is not None
        constants = {"form": PAIR, "pairing": "half", "width": q.width, "partial": q.width < q.x.output.shape[-1]}
        inputs = {"q": q.x.id, "k": k.x.id, "cos": q.cos.id, "sin": q.sin.id}
        outputs = {"q_turned": q.y.id, "k_turned": k.y.id}
        return self.bind(captured, graph, inputs, outputs, constants, place, {name: name for name in PROJECTIONS})

    def _half_split(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, y: OpNode) -> Match | None:
        for kept, turned in view.both_orders(y):
            if not view.is_op(kept, "mul", 2) or not view.is_op(turned, "mul", 2):
                continue
            for rotated, sin in view.both_orders(turned):
                x = self._rotated(view, rotated)
                if x is None:
                    continue
                for same, cos in view.both_orders(kept):
                    if same == x:
                        return self._bound(captured, graph, view, x, cos, sin, y, "half-split")
        return None

    @staticmethod
    def _rotated(view: View, node: OpNode) -> OpNode | None:
        """``[−x₂, x₁]`` → x."""
        if not view.is_op(node, "cat", 2) or node.arguments.get("dim") != -1:
            return None
        negated, first = view.operand(node, 0), view.operand(node, 1)
        if not view.is_op(negated, "neg", 1):
            return None
        second = view.operand(negated)
        halves = _halves(view, first, second)
        return halves[0] if halves is not None and halves[1] == "halves" else None

    def _interleaved(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, y: OpNode) -> Match | None:
        """``[a·cos − b·sin, b·cos + a·sin]`` with a, b the even and odd values of x."""
        if not view.is_op(y, "cat", 2) or y.arguments.get("dim") != -1:
            return None
        low, high = view.operand(y, 0), view.operand(y, 1)
        if not view.is_op(low, "sub", 2) or not view.is_op(high, "add", 2):
            return None
        left, right = view.operand(low, 0), view.operand(low, 1)
        if not view.is_op(left, "mul", 2) or not view.is_op(right, "mul", 2):
            return None
        for a, cos in view.both_orders(left):
            for b, sin in view.both_orders(right):
                halves = _halves(view, a, b)
                if halves is not None and halves[1] == "columns":
                    return self._bound(captured, graph, view, halves[0], cos, sin, y, "interleaved")
        return None

    def _bound(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        view: View,
        x: OpNode,
        cos: OpNode,
        sin: OpNode,
        y: OpNode,
        form: str,
    ) -> Match | None:
        if cos.output is None or sin.output is None or cos.output.shape != sin.output.shape:
            return None
        constants = {"form": form, "partial": view.is_op(x, "slice", 1)}
        inputs = {"x": x.id, "cos": cos.id, "sin": sin.id}
        return self.bind(captured, graph, inputs, {"y": y.id}, constants, y.module_path, {})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        cos, sin = values["cos"], values["sin"]
        if constants["form"] == PAIR:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            return {f"{n}_turned": turn(values[n].transpose(1, 2), cos, sin, constants["width"]) for n in ("q", "k")}
        x = values["x"]
        if constants["form"] == "interleaved":
            a, b = x[..., 0::2], x[..., 1::2]
            return {"y": torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)}
        half = x.shape[-1] // 2
        return {"y": (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Each pair as one complex number, rotated by ``cos + i·sin`` of its own place."""
        cos, sin = values["cos"], values["sin"]
        if constants["form"] == PAIR:
            width, made = constants["width"], {}
            for name in ("q", "k"):
                x = values[name].permute(0, 2, 1, 3)
                y = _turned_halves(x[..., :width], cos.unsqueeze(1), sin.unsqueeze(1))
                made[f"{name}_turned"] = torch.cat((y, x[..., width:]), dim=-1)
            return made
        x = values["x"]
        if constants["form"] == "interleaved":
            turned = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.complex(cos, sin)
            return {"y": torch.cat((turned.real, turned.imag), dim=-1)}
        return {"y": _turned_halves(x, cos, sin)}

    def gradients(self, match: Match) -> tuple[str, ...]:
        return ("q", "k") if match.constants["form"] == PAIR else ("x",)

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Tables of real angles, and of anything at all."""
        if match.constants["form"] != PAIR:
            return super().cases(match, sizes)
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in match.region.inputs}
        cases = float_cases(shapes, seed=47)
        generator = torch.Generator().manual_seed(53)
        angles = torch.rand(shapes["cos"], generator=generator, dtype=torch.float64) * 6.3
        for name in ("normal", "huge-row"):
            cases[name] |= {"cos": angles.cos(), "sin": angles.sin()}
        return cases

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", "qk_norm_rope", kernel, forms=(PAIR,)),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=PART_OF_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        if spec.provider != "shardwright":
            return ""
        return _tables_elsewhere(match) or plain_attention(match)

    def unranked(self, match: Match, spec: VariantSpec) -> str:
        return QK_ONLY if spec.provider == "shardwright" and match.constants["form"] != PAIR else ""

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        if match.constants["form"] != PAIR:
            return None
        from shardwright.kernels.qk_norm_rope.reference import qk_norm_rope_reference

        c = match.constants

        def run(values: Tensors) -> Tensors:
            tensors = (values[role] for role in ("q", "k", "cos", "sin"))
            q, k = qk_norm_rope_reference(*tensors, width=c["width"], pairing=c["pairing"])
            return {"q_turned": q.transpose(1, 2), "k_turned": k.transpose(1, 2)}

        return run

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.qk_norm_rope import contract

        q, k, cos, sin = (
            torch.empty(match.region.spec(role).shape, dtype=dtype, device="meta") for role in ("q", "k", "cos", "sin")
        )
        contract.check_static(q, k, cos, sin, None, None, None, match.constants["width"], match.constants["pairing"])
        return True

    def kernel_cost(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[str, dict[str, int]]:
        """The operator of q/k norm + RoPE, without its norms."""
        return "qk_norm_rope", {**self.cost_shape(match, tokens), "norm": 0}

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        pairing = int(match.constants["form"] == "interleaved")
        if match.constants["form"] == PAIR:
            q, k = match.region.spec("q").shape, match.region.spec("k").shape
            return {"T": tokens, "Q": q[-2], "K": k[-2], "D": q[-1], "W": match.constants["width"], "pairing": pairing}
        width = match.region.spec("x").shape[-1]
        heads = rows_per_token(match, "x")
        return {"T": tokens, "Q": heads, "K": 0, "D": width, "W": width, "pairing": pairing}


def _turned_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    pair = torch.complex(x[..., :half], x[..., half:])
    low = (pair * torch.complex(cos[..., :half], sin[..., :half])).real
    high = (pair * torch.complex(cos[..., half:], sin[..., half:])).imag
    return torch.cat((low, high), dim=-1)


def _tables_elsewhere(match: Match) -> str:
    """Why cos and sin are not what the layer hands to an attention as ``(cos, sin)``; empty where they are."""
    cos, sin = (match.region.canonical.by_id[match.region.inputs[role]] for role in ("cos", "sin"))
    places = [NUMBERED.fullmatch(node.target) for node in (cos, sin) if node.kind == "input"]
    numbers = [(found["name"], int(found["at"])) for found in places if found is not None]
    given = len(numbers) == TABLES and numbers[1] == (numbers[0][0], numbers[0][1] + 1)
    return "" if given else f"{match.anchor} does not turn by the tables (cos, sin) that it is given"


def _projected(view: View, x: OpNode) -> str:
    """The module whose product a value is, through views of it; empty where it is no product by a parameter."""
    made = view.through(x, "reshape")
    if made.target != "linear" or made.kind != "op" or view.operand(made, 1).kind != "parameter":
        return ""
    return view.operand(made, 1).target.rpartition(".")[0]


def _halves(view: View, first: OpNode, second: OpNode) -> tuple[OpNode, str] | None:
    """(x, how it is cut) where two slices are the two halves or the even and odd columns of one value."""
    if not view.is_op(first, "slice", 1) or not view.is_op(second, "slice", 1) or first.inputs != second.inputs:
        return None
    x = view.operand(first)
    if x.output is None:
        return None
    width = x.output.shape[-1]
    pieces = [first.arguments, second.arguments]
    if pieces == [{"dim": -1, "start": s, "stop": s + width // 2} for s in (0, width // 2)]:
        return x, "halves"
    if pieces == [{"dim": -1, "start": s, "stop": width, "step": 2} for s in (0, 1)]:
        return x, "columns"
    return None
