"""The parts of one sparse latent attention: its module's projections and norms, the plan's numbers, what they make.

Projections are looked up at each call, for adapters take a projection's place. The up-projection of keys and values is
handed out as it is, with its adapter: who attends absorbs or expands it.
Legend: B rows, S tokens a row, T = B · S, H heads, N, R, V widths of plain key, rotated key and value, C latent width,
J indexer heads, D indexer width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardwright.kernels.dsa.up_projection import Adapter, UpProjection
from shardwright.runtime.fused_dsa_borders import Borders, refused
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.schemas.fusion import FusionDecision

PARTS = ("q_a", "q_norm", "q_b", "kv_a", "kv_norm", "o")
INDEXER_PARTS = ("index_q", "index_k", "index_norm", "index_weights")
SIZES = ("nope", "rope", "value", "scale", "layout", "top_k", "form")
WITHOUT_INDEXER = ("shared", "dense")
"""Forms of layers that take over a choice, or that attend to all."""
NOT_ROTATED = "none"
"""Layout of a layer without rotation."""
Halves = tuple[Tensor, ...]
"""cos and sin ``[T, R / 2]`` fp32."""


@dataclass(frozen=True)
class Projected:
    """Of T tokens."""

    q_latent: Tensor
    """``[B, S, ·]``, normed: what q and the indexer's q are made of."""
    q_nope: Tensor
    """``[T, H, N]``."""
    q_rope: Tensor
    """``[T, H, R]``."""
    latent: Tensor
    """``[T, C]``, normed."""
    k_rope: Tensor
    """``[T, R]``."""


@dataclass(frozen=True)
class LatentParts:
    """One attention's module, parts by role, and numbers of the plan."""

    module: Any
    name: str
    roles: dict[str, str]
    nope: int
    rope: int
    value: int
    top_k: int
    scale: float
    index_scale: float
    layout: str
    index_layout: str
    index_first: bool
    hands_on: bool
    shared: bool
    """Without an indexer of its own."""
    planned: str
    """The decision's reason."""

    @classmethod
    def of(cls, module: nn.Module, name: str, decision: FusionDecision) -> Self:
        """Raises: LegalityError: ``fusion-dsa``."""
        c, roles = decision.constants, decision.roles
        shared = c.get("form") in WITHOUT_INDEXER
        wanted = [*PARTS, "kv_b_weight", *(() if shared else cls.indexer_parts())]
        numbers = [*SIZES, *cls.further(), *(() if shared else ("index_scale", "index_layout", "index_first"))]
        missing = [role for role in wanted if not roles.get(role)] + [size for size in numbers if size not in c]
        if not missing:
            missing = [roles[role] for role in wanted if role != "kv_b_weight" and not _has(module, roles[role])]
        if missing:
            raise refused(name, f"neither the plan nor {type(module).__name__} has {', '.join(missing)}")
        return cls(
            module=module,
            name=name,
            roles=dict(roles),
            nope=int(c["nope"]),
            rope=int(c["rope"]),
            value=int(c["value"]),
            top_k=int(c["top_k"]),
            scale=float(c["scale"]),
            index_scale=float(c.get("index_scale", "1")),
            layout=str(c["layout"]),
            index_layout=str(c.get("index_layout", "half-split")),
            index_first=bool(c.get("index_first", True)),
            hands_on=bool(c.get("hands_on", False)),
            shared=shared,
            planned=decision.reason,
            **{name: int(c[name]) for name in cls.further()},
        )

    @classmethod
    def indexer_parts(cls) -> tuple[str, ...]:
        """Roles of a layer with an indexer of its own."""
        return INDEXER_PARTS

    @classmethod
    def further(cls) -> tuple[str, ...]:
        """Whole numbers of the plan that this kind of layer needs besides."""
        return ()

    def part(self, role: str) -> Any:
        """The module, or parameter, of a role; looked up at each call, for adapters take a projection's place."""
        found = self.module
        for step in self.roles[role].split("."):
            found = getattr(found, step)
        return found

    def projected(self, x: Tensor, borders: Borders) -> Projected:
        """What the projections make of hidden states, not rotated."""
        T, R = borders.B * borders.S, self.rope
        q_latent = self.part("q_norm")(self.part("q_a")(x))
        q = self.part("q_b")(q_latent).reshape(T, -1, self.nope + R)
        both = self.part("kv_a")(x).reshape(T, -1)
        latent, k_rope = both.split([both.shape[1] - R, R], dim=-1)
        q_nope, q_rope = q.split([self.nope, R], dim=-1)
        return Projected(q_latent, q_nope, q_rope, self.part("kv_norm")(latent), k_rope)

    @torch.no_grad()
    def main(self, made: Projected) -> tuple[Tensor, Tensor]:
        """Queries ``[T, H, C + R]`` and keys ``[T, 1, C + R]`` of the attention, absorbed."""
        absorbed = self.up(made.q_nope.shape[1]).absorb(made.q_nope)
        return torch.cat((absorbed, made.q_rope), -1), torch.cat((made.latent, made.k_rope), -1)[:, None]

    @property
    def expansion(self) -> Any:
        """The module that keys and values are made of latents by; it is absorbed, or expands."""
        return self.module.get_submodule(self.roles["kv_b_weight"].rpartition(".")[0])

    def up(self, heads: int) -> UpProjection:
        """The projection that is absorbed, with its adapter where it has one."""
        linear = self.expansion
        adapter = None
        if isinstance(linear, LoraLinear):
            adapter = Adapter(linear.lora_a, linear.lora_b, linear.scaling)
        return UpProjection(linear.weight, heads, self.nope, self.value, adapter)

    def index_values(self, x: Tensor, q_latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's q ``[T, J, D]``, k ``[T, D]`` and weights ``[T, J]``, rotated dims first, not rotated."""
        norm, weigh = self.part("index_norm"), self.part("index_weights")
        k = norm(self.part("index_k")(x).to(norm.weight.dtype)).to(x.dtype).flatten(0, 1)
        q = self.part("index_q")(q_latent).reshape(k.shape[0], -1, k.shape[1])
        weights = weigh(x.to(weigh.weight.dtype)).flatten(0, 1)
        if not self.index_first:
            q, k = (x.roll(self.rope, -1) for x in (q, k))
        return q.contiguous(), k.contiguous(), weights.contiguous()


def rotated_parts(q: Tensor, k: Tensor, halves: Halves | None, layout: str) -> tuple[Tensor, Tensor]:
    """q ``[T, ·, D]`` and k ``[T, D]`` with their first R dims turned; unchanged where the layer rotates nothing."""
    from shardwright.kernels.dsa.indexer.rotation import rotated

    if halves is None or layout == NOT_ROTATED:
        return q, k
    return rotated(q.contiguous(), k.contiguous(), halves[0], halves[1], layout, 0)


def half_table(table: Tensor, borders: Borders) -> Tensor:
    """``[·, S, R]`` of twice the same angles → ``[T, R / 2]`` fp32."""
    half = table[..., : table.shape[-1] // 2].float()
    return half.expand(borders.B, -1, -1).reshape(borders.B * borders.S, -1).contiguous()


def _has(module: nn.Module, path: str) -> bool:
    found: Any = module
    for step in path.split("."):
        found = getattr(found, step, None)
    return found is not None
