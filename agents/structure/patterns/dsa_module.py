"""The module around sparse latent attention: projections and norms only, so that workers may run them one by one.

q = q_b(norm(q_a(x)));  [c, k_rot] = kv_a(x), c normed;  qᴵ = wq_b(norm(q_a(x))),  kᴵ = norm(wk(x)),  w = weights(x)
y = o_proj(o);  and where there is one, gate = gate_proj(x)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.agents.structure.patterns.base import View, below
from shardwright.agents.structure.patterns.dsa_reading import Read
from shardwright.schemas.graph import OpNode

PLAIN = frozenset({"linear", "slice", "reshape", "cast"})
"""What may lie between the module's parts and the region."""


@dataclass
class Around:
    """Parts by role, and the first thing that is not plain."""

    roles: dict[str, str] = field(default_factory=dict)
    because: str = ""


def around(view: View, read: Read, anchor: str) -> Around:
    """Parts of the module at ``anchor`` by role, relative to it; ``because`` says where it computes more."""
    walk = _Walk(view, anchor)
    q = walk.linear("q_b", read.inputs["q"])
    latent = walk.normed("q_a", "q_norm", q)
    kv = walk.normed("kv_a", "kv_norm", read.inputs["latent"], cut=True)
    rotated = read.inputs["k_rot"]
    if rotated.target != "slice" or view.operand(rotated) != walk.product.get("kv_a"):
        walk.fault("the rotated keys are no part of the latent's projection")
    ends = [latent, kv]
    if "index_q" in read.inputs:
        if walk.linear("index_q", read.inputs["index_q"]) != q:
            walk.fault("the indexer's queries are not made of the normed latent of q")
        ends.append(walk.normed("index_k", "index_norm", read.inputs["index_k"]))
        ends.append(walk.linear("index_weights", read.inputs["index_weights"]))
    if "gate" in read.inputs:
        ends.append(walk.linear("gate", read.inputs["gate"]))
    return walk.closed(read, ends)


POOLED = {
    "index_q": "wq_b",
    "index_k": "wk",
    "index_norm": "k_norm",
    "index_weights": "weights_proj",
    "pool_position": "index_kpool_compress_ape",
    "pool_gate": "index_kpool_compress_gate",
}
"""Role → part of an indexer that scores pools."""


def around_pooled(view: View, read: Read, anchor: str, chosen: OpNode | None) -> Around:
    """The same for a module whose indexer is one leaf, ``chosen``; ``None`` where the choice is handed in."""
    walk = _Walk(view, anchor)
    q = walk.linear("q_b", read.inputs["q"])
    latent = walk.normed("q_a", "q_norm", q)
    kv = walk.normed("kv_a", "kv_norm", read.inputs["latent"], cut=True)
    k_rot = read.inputs["k_rot"]
    if k_rot.target != "slice" or view.operand(k_rot) != walk.product.get("kv_a"):
        walk.fault("the rotated keys are no part of the latent's projection")
    ends = [latent, kv]
    if chosen is not None:
        if read.inputs["q_latent"] != q:
            walk.fault("the indexer does not read the normed latent of q")
        ends.append(read.inputs["hidden"])
        inner = below(chosen.module_path, anchor)
        walk.found.roles.update({role: f"{inner}.{part}" for role, part in POOLED.items()})
        for role, node in read.inputs.items():
            if node.kind == "parameter" and role != "kv_b_weight" and below(node.target, chosen.module_path) is None:
                walk.fault(f"{role} lies outside {chosen.module_path}")
    return walk.closed(read, ends)


def _under_casts(view: View, node: OpNode) -> OpNode:
    return view.through(node, "cast")


class _Walk:
    def __init__(self, view: View, anchor: str) -> None:
        self.view, self.anchor = view, anchor
        self.found = Around()
        self.product: dict[str, OpNode] = {}

    def fault(self, what: str) -> None:
        self.found.because = self.found.because or what

    def name(self, role: str, node: OpNode) -> None:
        path = below(node.module_path, self.anchor)
        self.found.roles[role] = path or ""
        if not path:
            self.fault(f"{role} is no part of its own at {node.source}")

    def linear(self, role: str, node: OpNode | None) -> OpNode | None:
        """Name the projection that makes a value; what it reads."""
        if node is None or node.target != "linear":
            self.fault(f"{role} is not a projection's result")
            return None
        self.name(role, node)
        self.product[role] = node
        return self.view.operand(node)

    def normed(self, role: str, norm: str, node: OpNode | None, *, cut: bool = False) -> OpNode | None:
        """Name the norm that makes a value and the projection under it; what that reads."""
        node = None if node is None else self.view.through(node, "cast") if _bare(node, self.anchor) else node
        if node is None or node.kind != "op":
            self.fault(f"{role} is not normed")
            return None
        self.name(norm, node)
        under = self._into(node)
        if under is None:
            self.fault(f"the norm {norm} reads more than one value")
            return None
        under = self.view.through(under, "cast")
        if cut and under.target == "slice" and under.arguments.get("start") == 0:
            under = self.view.operand(under)
        return self.linear(role, under)

    def closed(self, read: Read, ends: list[OpNode | None]) -> Around:
        """All parts read one value, the result goes into one projection, and parameters lie in the module."""
        if len({_under_casts(self.view, end).id for end in ends if end is not None}) != 1 or None in ends:
            self.fault("projections read different values")
        out = self.view.graph.users(read.o.id)
        if len(out) != 1 or out[0].target != "linear":
            self.fault("the result goes elsewhere than into one projection")
        else:
            self.name("o", out[0])
        for role in ("kv_b_weight", "sinks"):
            if role in read.inputs:
                name = below(read.inputs[role].target, self.anchor)
                self.found.roles[role] = name or ""
                if name is None:
                    self.fault(f"{role} lies outside {self.anchor}")
        return self.found

    def _into(self, node: OpNode) -> OpNode | None:
        """The one value from outside that a module's operations read besides parameters."""
        seen, stack, outside = {node.id}, [node], {}
        while stack:
            for operand in (self.view.graph.by_id[i] for i in stack.pop().inputs):
                if operand.kind == "parameter" or operand.id in seen:
                    continue
                seen.add(operand.id)
                if operand.kind == "op" and operand.module_path == node.module_path:
                    stack.append(operand)
                else:
                    outside[operand.id] = operand
        return next(iter(outside.values())) if len(outside) == 1 else None


def _bare(node: OpNode, anchor: str) -> bool:
    """A cast that stands between parts and not in one."""
    return node.target == "cast" and node.module_path in (anchor, f"{anchor}.indexer")
