"""Norms over the heads of q and k, and their rotation, as one operator inside an attention.

``q' = rope(norm(q))``, ``k' = rope(norm(k))`` with one table of positions; q and k come heads last,
``[B, T, heads, D]``, and leave heads first. Workers put the operator into the attention's own forward, so the rest of
that module must be the plain one: four projections and one scaled product.
Legend: B batch, T tokens, Q and K heads, D head width, W rotary width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.rms_norm import Norm, norms, oracle_norm, reference_norm
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

FORMS = {"cast-then-scale": False, "unit-offset": True}
"""Form of the norms → whether the operator takes it as stored from 1."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
PIECES = frozenset({"linear", "reshape", "permute", "expand", "scaled_dot_product_attention"})
"""What a plain attention computes besides the region."""
ATTENDED = ("query", "key", "value", "attn_mask")
NOT_A_MODULE = "workers compile whole modules, and the region is a part of the attention"


@dataclass(frozen=True)
class Turned:
    """One of q and k, heads last, and its rotation, heads first, by half-split pairs."""

    x: OpNode
    y: OpNode
    cos: OpNode
    sin: OpNode
    width: int


@dataclass(frozen=True)
class TurnedNorm(Turned):
    """One of q and k whose norm is rotated."""

    norm: Norm


AnyTurned = TypeVar("AnyTurned", bound=Turned)


class QkNormRope(Pattern):
    """Both norms and both rotations of one attention."""

    name = "qk_norm_rope"
    version = 1
    title = "Query/key norm + RoPE"
    contiguous = ("q", "k", "q_weight", "k_weight")
    trainable = ("q", "k", "q_weight", "k_weight")

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        by_place: dict[str, list[TurnedNorm]] = {}
        for one in turned_norms(view, graph):
            by_place.setdefault(one.y.module_path, []).append(one)
        found = [self._at(captured, graph, place, pair) for place, pair in by_place.items()]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, place: str, pair: list[TurnedNorm]) -> Match | None:
        ordered = queries_first(View(graph), pair)
        if ordered is None:
            return None
        q, k = ordered
        same = (q.cos, q.sin, q.width, q.norm.constants) == (k.cos, k.sin, k.width, k.norm.constants)
        heads = [one.norm.x.output.shape if one.norm.x.output else () for one in (q, k)]
        if not same or any(len(shape) != 4 for shape in heads):
            return None
        names = [below(one.norm.y.module_path, place) for one in (q, k)]
        if None in names:
            return None
        inputs = {
            "q": q.norm.x.id,
            "k": k.norm.x.id,
            "cos": q.cos.id,
            "sin": q.sin.id,
            "q_weight": q.norm.weight.id,
            "k_weight": k.norm.weight.id,
        }
        constants = {
            **q.norm.constants,
            "pairing": "half",
            "width": q.width,
            "unit_offset": FORMS.get(q.norm.constants["form"], False),
        }
        roles = {**dict(zip(PROJECTIONS, PROJECTIONS, strict=True)), "q_norm": names[0] or "", "k_norm": names[1] or ""}
        return self.bind(captured, graph, inputs, {"q_turned": q.y.id, "k_turned": k.y.id}, constants, place, roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        cos, sin = values["cos"].unsqueeze(1), values["sin"].unsqueeze(1)
        made = {}
        for name in ("q", "k"):
            x = reference_norm(values[name], values[f"{name}_weight"], constants).transpose(1, 2)
            made[f"{name}_turned"] = turn(x, cos, sin, constants["width"])
        return made

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Each pair as one complex number, rotated by ``cos + i·sin`` of its own place."""
        cos, sin, width = values["cos"].unsqueeze(1), values["sin"].unsqueeze(1), constants["width"]
        half, made = width // 2, {}
        for name in ("q", "k"):
            x = oracle_norm(values[name], values[f"{name}_weight"], constants).permute(0, 2, 1, 3)
            pair = torch.complex(x[..., :half], x[..., half:width])
            low = (pair * torch.complex(cos[..., :half], sin[..., :half])).real
            high = (pair * torch.complex(cos[..., half:], sin[..., half:])).imag
            made[f"{name}_turned"] = torch.cat((low, high, x[..., width:]), dim=-1)
        return made

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Tables of real angles, and of anything at all."""
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in match.region.inputs}
        cases = float_cases(shapes, seed=29)
        generator = torch.Generator().manual_seed(31)
        angles = torch.rand(shapes["cos"], generator=generator, dtype=torch.float64) * 6.3
        for name in ("normal", "huge-row", "tiny"):
            cases[name] |= {"cos": angles.cos(), "sin": angles.sin()}
        return cases

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", "qk_norm_rope", kernel, forms=tuple(FORMS)),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=NOT_A_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        return plain_attention(match) if spec.provider == "shardwright" else ""

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        if match.constants["form"] not in FORMS:
            return None
        from shardwright.kernels.qk_norm_rope.reference import qk_norm_rope_reference

        c = match.constants

        def run(values: Tensors) -> Tensors:
            q, k = qk_norm_rope_reference(
                values["q"],
                values["k"],
                values["cos"],
                values["sin"],
                width=c["width"],
                pairing=c["pairing"],
                q_weight=values["q_weight"],
                k_weight=values["k_weight"],
                eps=c["eps"],
                unit_offset=c["unit_offset"],
            )
            return {"q_turned": q.transpose(1, 2), "k_turned": k.transpose(1, 2)}

        return run

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.qk_norm_rope import contract

        def like(role: str) -> torch.Tensor:
            return torch.empty(match.region.spec(role).shape, dtype=dtype, device="meta")

        q, k, cos, sin, q_weight, k_weight = (like(r) for r in ("q", "k", "cos", "sin", "q_weight", "k_weight"))
        c = match.constants
        contract.check_static(q, k, cos, sin, q_weight, k_weight, c["eps"], c["width"], c["pairing"])
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        q, k = match.region.spec("q").shape, match.region.spec("k").shape
        return {"T": tokens, "Q": q[-2], "K": k[-2], "D": q[-1], "W": match.constants["width"]}


def turned_norms(view: View, graph: CanonicalGraph) -> Iterator[TurnedNorm]:
    """Norms over heads whose result, heads first, is rotated by half-split pairs, in whole or in its first part."""
    for norm in norms(graph):
        for heads in view.graph.users(norm.y.id):
            if not view.is_op(heads, "permute", 1) or heads.arguments.get("dims") != [-4, -2, -3, -1]:
                continue
            found = rotation(view, heads)
            if found is not None:
                yield TurnedNorm(norm.x, *found, norm)


def rotation(view: View, x: OpNode) -> tuple[OpNode, OpNode, OpNode, int] | None:
    """(rotated value, cos, sin, rotary width) of ``x``."""
    assert x.output is not None
    whole = x.output.shape[-1]
    firsts = [n for n in view.graph.users(x.id) if view.is_op(n, "slice", 1) and n.arguments.get("start") == 0]
    for part in (x, *firsts):
        assert part.output is not None
        width = part.output.shape[-1]
        for kept in (n for n in view.graph.users(part.id) if view.is_op(n, "mul", 2)):
            found = _sum_of_turn(view, part, kept, width)
            if found is None:
                continue
            y, cos, sin = found
            if width < whole:
                joined = [n for n in view.graph.users(y.id) if _rejoins(view, n, y, x, width)]
                if len(joined) != 1:
                    continue
                y = joined[0]
            return y, cos, sin, width
    return None


def _sum_of_turn(view: View, x: OpNode, kept: OpNode, width: int) -> tuple[OpNode, OpNode, OpNode] | None:
    """``x·cos + [−x₂, x₁]·sin`` → (sum, cos table, sin table), tables without their head dimension."""
    for y in (n for n in view.graph.users(kept.id) if view.is_op(n, "add", 2)):
        for one, turned in view.both_orders(y):
            if one != kept or not view.is_op(turned, "mul", 2):
                continue
            for rotated, sin in view.both_orders(turned):
                if _rotated(view, rotated, width) != x:
                    continue
                cos = next((b for a, b in view.both_orders(kept) if a == x), None)
                tables = [_table(view, t, width) for t in (cos, sin)]
                if tables[0] is not None and tables[1] is not None:
                    return y, tables[0], tables[1]
    return None


def _rotated(view: View, node: OpNode, width: int) -> OpNode | None:
    """``[−x₂, x₁]`` → x."""
    if not view.is_op(node, "cat", 2) or not view.is_op(view.operand(node), "neg", 1):
        return None
    second, first = view.operand(view.operand(node)), view.operand(node, 1)
    if not view.is_op(second, "slice", 1) or not view.is_op(first, "slice", 1) or second.inputs != first.inputs:
        return None
    cut = [first.arguments, second.arguments]
    half = width // 2
    return view.operand(first) if cut == [{"dim": -1, "start": s, "stop": s + half} for s in (0, half)] else None


def _table(view: View, node: OpNode | None, width: int) -> OpNode | None:
    """A table ``[·, 1, T, W]`` → the ``[·, T, W]`` that it is a view of."""
    if node is None or not view.is_op(node, "reshape", 1):
        return None
    inner = view.operand(node)
    shape = inner.output.shape if inner.output else ()
    return inner if len(shape) == 3 and shape[-1] == width else None


def _rejoins(view: View, node: OpNode, y: OpNode, x: OpNode, width: int) -> bool:
    """Whether the rotated part and the rest of x are put side by side again."""
    if not view.is_op(node, "cat", 2) or node.arguments.get("dim") != -1 or view.operand(node) != y:
        return False
    rest = view.operand(node, 1)
    assert x.output is not None
    cut = {"dim": -1, "start": width, "stop": x.output.shape[-1]}
    return view.is_op(rest, "slice", 1) and view.operand(rest) == x and rest.arguments == cut


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int) -> torch.Tensor:
    """The rotation of the first ``width`` dimensions as families spell it."""
    turning, half = x[..., :width], width // 2
    turned = turning * cos + torch.cat((-turning[..., half:], turning[..., :half]), dim=-1) * sin
    return torch.cat((turned, x[..., width:]), dim=-1) if width < x.shape[-1] else turned


def attends(view: View, node: OpNode) -> OpNode | None:
    """The scaled product that reads a value, through repeated heads."""
    for user in view.graph.users(node.id):
        if user.target == "scaled_dot_product_attention":
            return user
        if user.target in ("reshape", "expand", "permute"):
            found = attends(view, user)
            if found is not None:
                return found
    return None


def queries_first(view: View, pair: list[AnyTurned]) -> tuple[AnyTurned, AnyTurned] | None:
    """q and k told apart by the operand of the product that reads them."""
    if len(pair) != 2:
        return None
    for q, k in (pair, pair[::-1]):
        product = attends(view, q.y)
        if product is not None and product == attends(view, k.y):
            query = view.through(view.operand(product, 0), "reshape", "expand", "permute")
            if query == q.y:
                return q, k
    return None


def plain_attention(match: Match) -> str:
    """Why the module around the region is more than projections and one scaled product; empty where it is not."""
    inner = match.anchor.removeprefix(match.captured.module_path).removeprefix(".")
    module: Any = match.captured.module.get_submodule(inner)
    children = {name for name, _ in module.named_children()}
    if children != set(match.roles.values()):
        return f"{match.anchor} has the parts {', '.join(sorted(children))}"
    if any(not isinstance(getattr(module, name, None), kind) for name, kind in (("head_dim", int), ("scaling", float))):
        return f"{match.anchor} does not tell its head_dim and scaling"
    region, products = set(match.region.canonical_ids), 0
    for node in match.region.canonical.nodes:
        here = node.module_path == match.anchor or below(node.module_path, match.anchor) is not None
        if node.kind != "op" or not here or node.id in region:
            continue
        if node.target not in PIECES:
            return f"{match.anchor} also computes {node.target} at {node.source}"
        if node.target == "scaled_dot_product_attention":
            products += 1
            slots = node.arguments.get("operands", [])
            extra = {str(slot) for slot in slots if slot not in ATTENDED} if isinstance(slots, list) else {"operands"}
            options = {*node.arguments} - {"operands", "scale", "is_causal"}
            if extra or options or node.arguments.get("scale", module.scaling) != module.scaling:
                return f"{match.anchor} attends with {', '.join(sorted(extra | options)) or 'another scale'}"
    return "" if products == 1 else f"{match.anchor} has {products} scaled products"
