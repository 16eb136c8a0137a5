"""Norms of q and k with their rotation, inside attentions that are plain and attentions that are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.qk_norm_rope import QkNormRope
from shardwright.agents.structure.testkit import PatternContract, meta

HIDDEN, HEADS, GROUPS, WIDTH = 64, 4, 2, 16


class Norm(nn.Module):
    def __init__(self, offset: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.offset, self.eps = offset, eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        body = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (body * (1.0 + self.weight.float())).type_as(x)
        return self.weight * body.to(x.dtype)


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def wrong_sign(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin)


def swapped_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half_split(x, sin, cos)


def first_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    return torch.cat((half_split(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def repeated(x: Tensor) -> Tensor:
    batch, _, tokens, _ = x.shape
    return x[:, :, None].expand(batch, GROUPS, HEADS // GROUPS, tokens, WIDTH).reshape(batch, HEADS, tokens, WIDTH)


class Attention(nn.Module):
    """A plain attention; what it does beyond that is ``more``."""

    def __init__(
        self,
        turn: Callable[[Tensor, Tensor, Tensor], Tensor] = half_split,
        offset: bool = False,
        more: Callable[[Attention, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        eps: tuple[float, float] = (1e-6, 1e-6),
        gated: bool = False,
        after: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.scaling = WIDTH, WIDTH**-0.5
        self.q_proj = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
        self.k_proj = nn.Linear(HIDDEN, GROUPS * WIDTH, bias=False)
        self.v_proj = nn.Linear(HIDDEN, GROUPS * WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.q_norm, self.k_norm = Norm(offset, eps[0]), Norm(offset, eps[1])
        self.__dict__["choices"] = (turn, more, gated, after)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn, more, gated, after = self.__dict__["choices"]
        shape = (*x.shape[:-1], -1, WIDTH)
        q, k = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        if not after:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        if after:
            q, k = self.q_norm(q), self.k_norm(k)
        if more is not None:
            q, k = more(self, q, k)
        k, v = repeated(k), repeated(v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        mixed = mixed.transpose(1, 2).reshape(*x.shape[:-1], -1)
        return self.o_proj(mixed * torch.sigmoid(mixed) if gated else mixed)


class InLayer(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.self_attn(x, cos, sin)  # type: ignore[no-any-return]


def example(width: int = WIDTH, **choices: object):  # type: ignore[no-untyped-def]
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return InLayer(Attention(**choices)), (meta(2, 6, HIDDEN), meta(1, 6, width), meta(1, 6, width))  # type: ignore[arg-type]

    return build


def hooked():  # type: ignore[no-untyped-def]
    layer, tensors = example()()
    layer.self_attn.q_norm.register_full_backward_hook(lambda module, gradients, results: None)
    return layer, tensors


class Leaking(Attention):
    """The normalised queries are read by something else too."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, WIDTH)
        normed = self.q_norm(self.q_proj(x).view(shape))
        q, k = normed.transpose(1, 2), self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = half_split(q, cos, sin), half_split(k, cos, sin)
        k, v = repeated(k), repeated(v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1) + normed.reshape(*x.shape[:-1], -1))


def leaking():  # type: ignore[no-untyped-def]
    return InLayer(Leaking()), (meta(2, 6, HIDDEN), meta(1, 6, WIDTH), meta(1, 6, WIDTH))


class TestQkNormRope(PatternContract):
    pattern = QkNormRope()
    positives = {
        "plain": (example(), 1),
        "unit-offset": (example(offset=True), 1),
        "first-part": (example(width=8, turn=first_part), 1),
    }
    near_misses = {
        "wrong-sign": example(turn=wrong_sign),
        "another-epsilon-for-k": example(eps=(1e-6, 1e-5)),
        "norm-after-the-turn": example(after=True),
        "read-before-the-turn": leaking,
        "gradient-hook": hooked,
    }

    def kernel(self, build) -> str:  # type: ignore[no-untyped-def]
        (match, certificate), *_ = self.found(build)
        assert certificate.legal
        return self.pattern.refuses(match, self.pattern.variants()[0])

    def test_the_operator_is_offered_for_plain_attentions(self) -> None:
        for build, _ in self.positives.values():
            assert self.kernel(build) == ""

    def test_an_attention_that_does_more_keeps_its_forward(self) -> None:
        assert "also computes" in self.kernel(example(gated=True))
        scaled = example(more=lambda attention, q, k: (q * 2.0, k))
        assert [match for match, _ in self.found(scaled)] == [] or "also computes" in self.kernel(scaled)

    def test_tables_are_told_apart(self) -> None:
        """With the tables exchanged the region still matches; the roles are then exchanged too, so it is the same."""
        (match, certificate), *_ = self.found(example(turn=swapped_tables))
        (plain, _), *_ = self.found(example())
        assert certificate.legal
        assert [match.region.canonical.by_id[match.region.inputs[r]].target for r in ("cos", "sin")] == [
            plain.region.canonical.by_id[plain.region.inputs[r]].target for r in ("sin", "cos")
        ]

    def test_constants_that_workers_read(self) -> None:
        (match, _), *_ = self.found(example(offset=True))
        wanted = {"eps": 1e-6, "pairing": "half", "unit_offset": True, "width": WIDTH}
        assert {name: match.constants[name] for name in wanted} == wanted
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        assert match.roles == {name: name for name in names} and match.anchor == "layer.self_attn"
