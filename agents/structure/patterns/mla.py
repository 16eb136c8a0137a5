"""Multi-head latent attention: keys and values of every head from one latent, and a key part that all heads share.

Forms: ``expanded`` makes keys and values, ``[k | v] = c Wᵀ``, ``k = [k, rot]``, then attends; ``absorbed`` moves W to
the queries and the result, ``q Wₖ cᵀ + q_rot rotᵀ`` and ``(p c) Wᵥᵀ``, and never makes keys. Each is the other's proof.
Legend: B batch, T tokens, N heads, L latent width, D key width without the shared part, R shared part, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import LARGE, Sizes
from shardwright.agents.structure.patterns.base import PART_OF_MODULE, Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.mla_reading import Reading, read_absorbed, read_expanded
from shardwright.schemas.fusion import VariantPredicate

NO_OPERATOR = "no dense operator attends in the latent; the runtime trains the model's own form"


class Mla(Pattern):
    """Expansion of the latent and the scaled product as one region."""

    name = "mla"
    version = 1
    title = "Latent attention"
    reads_views = True
    lora = "adapters wrap the projection, which stays a module of its own"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        read = [read_expanded(view, node) for node in view.ops("scaled_dot_product_attention")]
        read += [read_absorbed(view, node) for node in view.ops("softmax")]
        found = [self._bound(captured, graph, one) for one in read if one is not None]
        return tuple(match for match in found if match is not None)

    def _bound(self, captured: CapturedGraph, graph: CanonicalGraph, read: Reading) -> Match | None:
        anchor = read.y.module_path
        name = below(read.nodes["weight"].target, anchor)
        if name is None:
            return None
        inputs = {role: node.id for role, node in read.nodes.items()}
        roles = {"expansion": name.removesuffix(".weight")}
        return self.bind(captured, graph, inputs, {"o": read.y.id}, read.constants, anchor, roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return {"o": (_expanded if constants["form"] == "expanded" else _absorbed)(values, constants)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """The other form, by sums over products."""
        return {"o": (_in_latent if constants["form"] == "expanded" else _over_heads)(values, constants)}

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(role for role in match.region.inputs if role != "mask")

    def sizes(self, match: Match) -> Sizes:
        """Few and narrow heads, every sum and product of widths following; as captured where that is unclear."""
        c = match.constants
        heads, nope, value = c["heads"], c["nope"], c["value"]
        rot, latent = match.region.spec("rot").shape[-1], match.region.spec("weight").shape[1]
        if heads * (nope + value) <= LARGE:
            return Sizes({})
        small = {size: 2 * (at + 1) for at, size in enumerate(sorted({heads, nope, value, rot, latent}))}
        sums = {nope + value: (nope, value), nope + rot: (nope, rot)}
        found = dict(small)
        for size, parts in sums.items():
            found.setdefault(size, sum(small[part] for part in parts))
        found.setdefault(heads * (nope + value), small[heads] * found[nope + value])
        right = all(found[size] == sum(small[part] for part in parts) for size, parts in sums.items())
        tokens = {*match.region.spec("latent").shape[:-1]} & set(found)
        return Sizes(found) if right and not tokens else Sizes({})

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Every row sees itself, the last nothing else; no scores so large or so alike that gradients are rounding."""
        shapes = {r: sizes.shape(match.region.spec(r).shape) for r in match.region.inputs if r != "mask"}
        cases = float_cases(shapes, seed=41)
        for role, value in cases["huge-row"].items():
            value.view(-1, shapes[role][-1])[0] *= 2e-4
        cases["one-hot"] |= {role: cases["normal"][role] for role in shapes if role != "weight"}
        if "mask" in match.region.inputs:
            spec = match.region.spec("mask")
            for at, case in enumerate(cases.values()):
                case["mask"] = _mask(sizes.shape(spec.shape), spec.dtype == "bool", seed=at)
        return cases

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, device_types=("cuda",))
        return (
            VariantSpec("absorbed", "absorbed", "-", kernel, forms=("expanded",), not_installable=NO_OPERATOR),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=PART_OF_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        c = match.constants
        latent = match.region.spec("weight").shape[1]
        rot = match.region.spec("rot").shape[-1]
        return {"T": tokens, "N": c["heads"], "D": c["nope"], "V": c["value"], "R": rot, "L": latent} | {
            "causal": int(bool(c.get("is_causal"))),
            "spelled": int(c["form"] == "absorbed"),
        }


def _expanded(values: Tensors, c: dict[str, Any]) -> Tensor:
    """As models spell it."""
    latent, rot = values["latent"], values["rot"]
    both = F.linear(latent.unsqueeze(1) if c["lifted"] else latent, values["weight"])
    both = both.view(*latent.shape[:2], c["heads"], -1).transpose(1, 2)
    nope, value = torch.split(both, [c["nope"], c["value"]], dim=-1)
    shared = rot.expand(-1, nope.shape[1], -1, -1)
    if c["key"] == "written":
        key = both.new_empty(*both.shape[:-1], c["nope"] + rot.shape[-1])
        key[..., : c["nope"]].copy_(nope)
        key[..., c["nope"] :].copy_(shared)
    else:
        key = torch.cat([nope, shared], dim=-1)
    options = {name: c[name] for name in ("scale", "is_causal") if name in c}
    return F.scaled_dot_product_attention(values["query"], key, value, attn_mask=values.get("mask"), **options)


def _absorbed(values: Tensors, c: dict[str, Any]) -> Tensor:
    """As published for decoding, by matrix products."""
    latent = values["latent"]
    weight = values["weight"].view(c["heads"], c["nope"] + c["value"], -1)
    query = torch.matmul(values["query"], weight[:, : c["nope"]])
    scores = torch.matmul(query, latent.transpose(-2, -1))
    scores = (scores + torch.matmul(values["query_rot"], values["rot"].transpose(-2, -1))) * c["scale"]
    if "mask" in values:
        scores = scores + values["mask"]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(latent.dtype)
    return torch.matmul(torch.matmul(weights, latent), weight[:, c["nope"] :].transpose(-2, -1))


def _parts(values: Tensors, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latent [B, T, L], shared key [B, T, R], key rows [N, D, L] and value rows [N, V, L] of the expansion."""
    latent, rot = (
        values[role].reshape(values[role].shape[0], -1, values[role].shape[-1]) for role in ("latent", "rot")
    )
    rows = values["weight"].reshape(values["query"].shape[1], -1, latent.shape[-1])
    return latent, rot, rows[:, :width], rows[:, width:]


def _attend(scores: Tensor, values: Tensors, c: dict[str, Any]) -> Tensor:
    mask = values.get("mask")
    if c.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    grown = torch.exp(scores - scores.amax(-1, keepdim=True))
    return grown / grown.sum(-1, keepdim=True)


def _in_latent(values: Tensors, c: dict[str, Any]) -> Tensor:
    width = values["query"].shape[-1] - values["rot"].shape[-1]
    latent, rot, keys, rows = _parts(values, width)
    query, turned = values["query"][..., :width], values["query"][..., width:]
    scores = torch.einsum("bnqd,ndl,bkl->bnqk", query, keys, latent) + torch.einsum("bnqr,bkr->bnqk", turned, rot)
    weights = _attend(scores * c.get("scale", values["query"].shape[-1] ** -0.5), values, c)
    return torch.einsum("bnqk,bkl,nvl->bnqv", weights, latent, rows)


def _over_heads(values: Tensors, c: dict[str, Any]) -> Tensor:
    latent, rot, keys, rows = _parts(values, values["query"].shape[-1])
    key = torch.einsum("bkl,ndl->bnkd", latent, keys)
    scores = torch.einsum("bnqd,bnkd->bnqk", values["query"], key)
    scores = scores + torch.einsum("bnqr,bkr->bnqk", values["query_rot"], rot)
    return torch.einsum("bnqk,bkl,nvl->bnqv", _attend(scores * c["scale"], values, c), latent, rows)


def _mask(shape: tuple[int, ...], boolean: bool, seed: int) -> Tensor:
    """Random among the past, always the token itself; the last row sees itself alone."""
    generator = torch.Generator().manual_seed(seed)
    tokens = shape[-1]
    seen = (torch.rand(shape, generator=generator) < 0.7).logical_and(torch.ones(shape[-2:], dtype=torch.bool).tril())
    seen[..., -1, :] = False
    seen = seen | torch.eye(shape[-2], tokens, dtype=torch.bool)
    if boolean:
        return seen
    return torch.zeros(shape, dtype=torch.float64).masked_fill(~seen, -1e4)
