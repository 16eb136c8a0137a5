"""One sparse latent attention: its module's projections and norms around our operators.

The up-projection of keys and values is absorbed, its adapter too. Where a row is no longer than the selection, every
query selects all it sees: then no indexer runs and a library attends to all keys, under the same documents
(``kernels.dsa.attention.choose``).

Indices are handed on as the family has them, ``[B, S, K]`` of a row's keys: early rows, which see fewer keys, repeat
the query's own one, which selects nothing more in a mask and is taken out again here.
Legend: B rows, S tokens a row, T = B · S, H heads, N, R, V widths of plain key, rotated key and value, C latent width,
J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.kernels.dsa.attention.choose import Choice, choose
from shardwright.kernels.dsa.up_projection import Adapter, UpProjection
from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.fused_dsa_borders import Borders, refused
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.schemas.fusion import FusionDecision

NO_ROPE = 64
"""Width of the zeros that stand for rotated parts in a layer without: what the operator's fastest path takes."""
PARTS = ("q_a", "q_norm", "q_b", "kv_a", "kv_norm", "o")
INDEXER_PARTS = ("index_q", "index_k", "index_norm", "index_weights")
SIZES = ("nope", "rope", "value", "scale", "layout", "top_k", "form")
WITHOUT_INDEXER = ("shared", "dense")
"""Forms of layers that take over a choice, or that attend to all."""
NOT_ROTATED = "none"
"""Layout of a layer without rotation."""
WAYS = "attention_ways"
"""Where a module keeps the way of every length of rows that it ran: tokens → ``Choice``."""
LOOKED_AT = "handed_choices_of"
"""Where a module keeps the sizes (B, S) of which it has looked at a choice that was handed in."""
LEARNER = "indexer_learner"
"""Where a module keeps what its indexer learns by (``runtime.fused_dsa_loss``)."""
Halves = tuple[Tensor, ...]
"""cos and sin ``[T, R / 2]`` fp32."""
Scored = tuple[Tensor, Tensor, Tensor]
"""The indexer's q ``[T, J, D]``, k ``[T, D]`` and weights ``[T, J]``."""


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


class Learner(Protocol):
    """Takes a layer's loss and joins it to the backward of a value."""

    def attach(self, value: Tensor, loss: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SparseAttention:
    """One attention: its module, parts by role, numbers of the plan, and the operators."""

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
    def of(cls, module: nn.Module, name: str, decision: FusionDecision) -> SparseAttention:
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

    def __call__(
        self, x: Tensor, tables: tuple[Tensor, Tensor] | None, borders: Borders, handed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, S, hidden]`` → the same, and the indices to hand on."""
        halves = None if tables is None else tuple(half_table(table, borders) for table in tables)
        made = self.projected(x, borders)
        q_rope, k_rope = rotated_parts(made.q_rope, made.k_rope, halves, self.layout)
        made = replace(made, q_rope=q_rope, k_rope=k_rope)
        gate = self.part("gate")(x).flatten(0, 1).unflatten(1, (-1, self.value)) if "gate" in self.roles else None
        indices = None
        choice = self.module.__dict__.setdefault(WAYS, {})[borders.S] = self.choice(borders.S)
        if choice.path == "dense":
            o = self._dense(made, gate, borders)
        elif self.shared:
            if handed is None:
                raise refused(self.name, "a layer that shares its choice was handed none")
            indices = self.taken_over(handed, borders)
            o = self._over_handed(made, gate, indices, borders)
        else:
            indices, scored = self.chosen(x, made.q_latent, halves, borders)
            o, lse = self._sparse(made, gate, indices, None)
            learner = self.learner
            if learner is not None and scored is not None:
                o = learner.attach(o, self._loss(scored, made, lse, indices))
        y = self.part("o")(o.reshape(borders.B, borders.S, -1))
        return y, self.handed_on(indices, borders) if self.hands_on else None

    def _over_handed(self, made: Projected, gate: Tensor | None, indices: Tensor, borders: Borders) -> Tensor:
        """A choice of another layer, looked at on the first call of each size.

        A family may hand on what a query may not see, for its mask hides that; what is left must be each key once.
        """
        bounds, size = borders.bounds(), (borders.B, borders.S)
        looked_at: set[tuple[int, int]] = self.module.__dict__.setdefault(LOOKED_AT, set())
        new = size not in looked_at
        if new:
            hidden = (indices >= 0) & ((indices < bounds[:, :1]) | (indices >= bounds[:, 1:]))
            indices = indices.masked_fill(hidden, -1)
            looked_at.add(size)
        return self._sparse(made, gate, indices, bounds, check=new)[0]

    def projected(self, x: Tensor, borders: Borders) -> Projected:
        """What the projections make of hidden states, not rotated."""
        T, R = borders.B * borders.S, self.rope
        q_latent = self.part("q_norm")(self.part("q_a")(x))
        q = self.part("q_b")(q_latent).reshape(T, -1, self.nope + R)
        both = self.part("kv_a")(x).reshape(T, -1)
        latent, k_rope = both.split([both.shape[1] - R, R], dim=-1)
        q_nope, q_rope = q.split([self.nope, R], dim=-1)
        return Projected(q_latent, q_nope, q_rope, self.part("kv_norm")(latent), k_rope)

    @property
    def learner(self) -> Learner | None:
        """What the indexer learns by; ``None`` where it is frozen."""
        found: Learner | None = self.module.__dict__.get(LEARNER)
        return found

    def _sparse(
        self, made: Projected, gate: Tensor | None, indices: Tensor, bounds: Tensor | None, *, check: bool = False
    ) -> tuple[Tensor, Tensor]:
        sinks = self.part("sinks").to(made.q_nope.dtype) if "sinks" in self.roles else None
        q_rope, k_rope = made.q_rope, made.k_rope
        if not self.rope:
            q_rope = made.q_nope.new_zeros(NO_ROPE).expand(*made.q_nope.shape[:2], -1)
            k_rope = made.latent.new_zeros(made.latent.shape[0], NO_ROPE)
        found: tuple[Tensor, Tensor] = OPERATORS["dsa"].load_op()(
            made.q_nope,
            q_rope,
            made.latent,
            k_rope,
            self._up(made.q_nope.shape[1]),
            indices,
            gate,
            sinks,
            scale=self.scale,
            bounds=bounds,
            check_indices=check,
        )
        return found

    @torch.no_grad()
    def _main(self, made: Projected) -> tuple[Tensor, Tensor]:
        """Queries ``[T, H, C + R]`` and keys ``[T, 1, C + R]`` of the attention, absorbed."""
        absorbed = self._up(made.q_nope.shape[1]).absorb(made.q_nope)
        return torch.cat((absorbed, made.q_rope), -1), torch.cat((made.latent, made.k_rope), -1)[:, None]

    def _loss(self, scored: Scored, made: Projected, lse: Tensor, indices: Tensor) -> Tensor:
        """KL of the attention from the indexer's scores, over the keys that were selected; mean over tokens."""
        settings = {"attention_scale": self.scale, "scale": self.index_scale}
        loss: Tensor = OPERATORS["dsa_kl"].load_op()(*scored, *self._main(made), lse, indices, **settings)
        return loss

    def choice(self, tokens: int) -> Choice:
        """Dense or sparse for rows of so many tokens, and why; sinks are known to the sparse operator alone."""
        return self.choice_of(tokens, self.top_k)

    def choice_of(self, tokens: int, selected: int) -> Choice:
        """The same where a query selects all of so many tokens."""
        if "sinks" in self.roles:
            return Choice("sparse", "libraries of dense attention take no sinks")
        if self.learner is not None:
            return Choice("sparse", "the indexer learns from the sparse attention")
        device = self.part("o").weight.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return choose(tokens, selected, name, training=True)

    def _dense(self, made: Projected, gate: Tensor | None, borders: Borders) -> Tensor:
        """``[T, H, V]`` of all keys that a query may see: the operator's dense door, document by document where their
        ends are known here, else torch's own attention under the documents' mask."""
        from shardwright.kernels.dsa.dense import sigmoid_gate

        up, heads = self._up(made.q_nope.shape[1]), made.q_nope.shape[1]
        if borders.ends is not None:
            parts = (made.q_nope, made.q_rope, made.latent, made.k_rope, up)
            door = OPERATORS["dsa"].load_op()
            attended: Tensor = door(*parts, None, gate, scale=self.scale, cu_seqlens=borders.ends)[0]
            return attended
        k_nope, v = up.expand(made.latent)
        rotated = made.k_rope[:, None].expand(-1, heads, -1)
        q, k = torch.cat((made.q_nope, made.q_rope), -1), torch.cat((k_nope, rotated), -1)
        q, k, v = (part.unflatten(0, (borders.B, borders.S)).transpose(1, 2) for part in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=borders.seen()[:, None], scale=self.scale)
        o = o.transpose(1, 2).flatten(0, 1)
        return o if gate is None else sigmoid_gate(o.contiguous(), gate)

    def _up(self, heads: int) -> UpProjection:
        """The projection that is absorbed, with its adapter where it has one."""
        linear = self.module.get_submodule(self.roles["kv_b_weight"].rpartition(".")[0])
        adapter = None
        if isinstance(linear, LoraLinear):
            adapter = Adapter(linear.lora_a, linear.lora_b, linear.scaling)
        return UpProjection(linear.weight, heads, self.nope, self.value, adapter)

    def chosen(
        self, x: Tensor, q_latent: Tensor, halves: Halves | None, borders: Borders
    ) -> tuple[Tensor, Scored | None]:
        """``[T, K]`` of the module's own indexer, and what it scored where it learns by that."""
        learns = self.learner is not None and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            q, k, weights = self.index_values(x.detach(), q_latent.detach())
            q, k = rotated_parts(q, k, halves, self.index_layout)
        with torch.no_grad():
            found: Tensor = OPERATORS["dsa_indexer"].load_op()(
                q,
                k,
                weights,
                top_k=min(self.top_k, borders.S),
                scale=self.index_scale,
                cu_seqlens=borders.cu_seqlens(),
            )
        return found, (q, k, weights) if learns else None

    def index_values(self, x: Tensor, q_latent: Tensor) -> Scored:
        """The indexer's q ``[T, J, D]``, k ``[T, D]`` and weights ``[T, J]``, rotated dims first, not rotated."""
        norm, weigh = self.part("index_norm"), self.part("index_weights")
        k = norm(self.part("index_k")(x).to(norm.weight.dtype)).to(x.dtype).flatten(0, 1)
        q = self.part("index_q")(q_latent).reshape(k.shape[0], -1, k.shape[1])
        weights = weigh(x.to(weigh.weight.dtype)).flatten(0, 1)
        if not self.index_first:
            q, k = (x.roll(self.rope, -1) for x in (q, k))
        return q.contiguous(), k.contiguous(), weights.contiguous()

    def taken_over(self, handed: Tensor, borders: Borders) -> Tensor:
        """The choice of an earlier layer as rows of the packed sequence: a query's own key counts once."""
        flat = handed.reshape(borders.B * borders.S, -1)
        own = (borders.at % borders.S)[:, None]
        again = torch.zeros_like(flat, dtype=torch.bool)
        again[:, 1:] = (flat[:, 1:] == own) & (flat[:, :-1] == own)
        row = (borders.at // borders.S * borders.S)[:, None]
        return torch.where(again | (flat < 0), -1, flat + row).to(torch.int32)

    def handed_on(self, indices: Tensor | None, borders: Borders) -> Tensor:
        """Rows of the packed sequence → keys of each row, the query's own where there is none; all keys where none
        was left out."""
        if indices is None:
            every = torch.arange(borders.S, device=borders.first.device, dtype=torch.int32)
            return every.expand(borders.B, borders.S, -1)
        row = (borders.at // borders.S * borders.S)[:, None]
        own = borders.at[:, None]
        return (torch.where(indices < 0, own, indices) - row).to(torch.int32).view(borders.B, borders.S, -1)


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


@dataclass(frozen=True)
class DenseLatentAttention(SparseAttention):
    """A layer that selects nothing: a library's attention, and our gate."""

    def choice(self, tokens: int) -> Choice:
        return Choice("dense", "the layer has no indexer: it attends to all keys")
