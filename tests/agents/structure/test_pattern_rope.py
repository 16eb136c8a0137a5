"""Rotary embedding in both layouts, whole and partial, of one tensor and of an attention's queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.rope import Rope
from shardwright.agents.structure.testkit import PatternContract, meta


def half(x: torch.Tensor) -> torch.Tensor:
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), dim=-1)


class HalfSplit(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return (q * cos) + (half(q) * sin), (k * cos) + (half(k) * sin)


class Partial(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
        cos, sin = cos.unsqueeze(1)[..., :8], sin.unsqueeze(1)[..., :8]
        turned, kept = q[..., :8], q[..., 8:]
        return torch.cat([half(turned) * sin + turned * cos, kept], dim=-1), k


class Interleaved(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
        cos, sin = cos[..., :8].unsqueeze(1), sin[..., :8].unsqueeze(1)
        a, b = q[..., 0::2], q[..., 1::2]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1), k


def changed(function):  # type: ignore[no-untyped-def]
    """A module that turns only the queries, by a function of (q, cos, sin)."""

    class Changed(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
            return function(q, cos.unsqueeze(1), sin.unsqueeze(1)), k

    return Changed


def turned_back(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    back = torch.cat((q[..., 8:], -q[..., :8]), dim=-1)
    return q * cos + back * sin


def read_elsewhere(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    other = half(q)
    return q * cos + other * sin + other.sum()


def overwritten(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    other = half(q)
    q.mul_(2.0)
    return q * cos + other * sin


NEARLY = {
    "turned-back": turned_back,
    "two-inputs": lambda q, c, s: q * c + half(q + 1.0) * s,
    "uneven-halves": lambda q, c, s: q * c + torch.cat((-q[..., 6:], q[..., :6]), dim=-1) * s,
    "sine-twice": lambda q, c, s: q * c + half(q) * s * s,
    "read-elsewhere": read_elsewhere,
    "overwritten-between": overwritten,
    "interleaved-but-halves": lambda q, c, s: torch.cat(
        [q[..., :8] * c[..., :8] + q[..., 8:] * s[..., :8], q[..., 8:] * c[..., :8] - q[..., :8] * s[..., :8]], dim=-1
    ),
}


def example(kind: type[nn.Module], width: int = 16):  # type: ignore[no-untyped-def]
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = kind()

        def forward(self, *values: torch.Tensor):  # type: ignore[no-untyped-def]
            return self.rotary(*values)

    return lambda: (InLayer(), (meta(2, 4, 6, width), meta(2, 2, 6, width), meta(2, 6, width), meta(2, 6, width)))


HIDDEN, HEADS, GROUPS, WIDTH = 64, 4, 2, 16
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (half(x) * sin)


def first_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    return torch.cat((whole(x[..., :width], cos, sin), x[..., width:]), dim=-1)


class Attention(nn.Module):
    """Projections, a rotation of q and of k, and one product; ``more`` is what stands between."""

    def __init__(
        self,
        turns: tuple[Turn, Turn] = (whole, whole),
        names: tuple[str, str] = ("q_proj", "k_proj"),
        exchanged: bool = False,
        more: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda q, k: (q, k),
        after: Callable[[Tensor], Tensor] = lambda y: y,
    ) -> None:
        super().__init__()
        self.head_dim, self.scaling = WIDTH, WIDTH**-0.5
        self.add_module(names[0], nn.Linear(HIDDEN, HEADS * WIDTH, bias=True))
        self.add_module(names[1], nn.Linear(HIDDEN, GROUPS * WIDTH, bias=False))
        self.v_proj = nn.Linear(HIDDEN, GROUPS * WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.__dict__["choices"] = (turns, names, exchanged, more, after)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turns, names, exchanged, more, after = self.__dict__["choices"]
        shape = (*x.shape[:-1], -1, WIDTH)
        q, k = (getattr(self, name)(x).view(shape).transpose(1, 2) for name in names)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        cos, sin = (sin, cos) if exchanged else (cos, sin)
        q, k = more(turns[0](q, cos, sin), turns[1](k, cos, sin))
        k, v = (
            one[:, :, None].expand(-1, -1, HEADS // GROUPS, -1, -1).reshape(x.shape[0], HEADS, x.shape[1], WIDTH)
            for one in (k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return self.o_proj(after(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1)))


class Attending(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.self_attn(x, cos, sin)  # type: ignore[no-any-return]


def attending(width: int = WIDTH, **choices: object):  # type: ignore[no-untyped-def]
    tables = meta(1, 6, width), meta(1, 6, width)
    return lambda: (Attending(Attention(**choices)), (meta(2, 6, HIDDEN), *tables))  # type: ignore[arg-type]


def hooked():  # type: ignore[no-untyped-def]
    layer, tensors = attending()()
    layer.self_attn.register_full_backward_hook(lambda module, gradients, results: None)
    return layer, tensors


def leaking(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    other = half(x)
    return x * cos + other * sin + other.sum()


def wrong_sign(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., middle:], -x[..., :middle]), dim=-1) * sin


class TestPair(PatternContract):
    """Queries and keys of one attention: what the operator takes."""

    pattern = Rope()
    positives = {
        "plain": (attending(), 1),
        "first-part": (attending(width=8, turns=(first_part, first_part)), 1),
        "other-names": (attending(names=("query", "key")), 2),
        "one-of-them": (attending(turns=(whole, lambda x, c, s: x)), 1),
    }
    near_misses = {
        "wrong-sign": attending(turns=(wrong_sign, wrong_sign)),
        "read-elsewhere": attending(turns=(leaking, leaking)),
        "hook": hooked,
    }

    def kernel(self, build) -> str:  # type: ignore[no-untyped-def]
        (match, certificate), *_ = self.found(build)
        assert certificate.legal and match.constants["form"] == "pair"
        return self.pattern.refuses(match, self.pattern.variants()[0])

    def test_the_operator_is_offered_for_plain_attentions(self) -> None:
        for name in ("plain", "first-part"):
            assert self.kernel(self.positives[name][0]) == "", name

    @pytest.mark.parametrize(
        ("choices", "said"),
        [
            ({"after": torch.tanh}, "also computes tanh"),
            ({"more": lambda q, k: (q * 2.0, k)}, "also computes mul"),
            ({"exchanged": True}, "does not turn by the tables"),
        ],
    )
    def test_an_attention_that_does_more_keeps_its_forward(self, choices, said) -> None:  # type: ignore[no-untyped-def]
        """Where the product no longer reads what was turned, q and k are not told apart, and each stands alone."""
        found = self.found(attending(**choices))
        if {match.constants["form"] for match, _ in found} == {"half-split"}:
            assert len(found) == 2 and "more" in choices
        else:
            assert said in self.kernel(attending(**choices))

    def test_workers_read_width_and_roles(self) -> None:
        (match, _), *_ = self.found(self.positives["first-part"][0])
        assert match.constants == {"form": "pair", "pairing": "half", "width": 8, "partial": True}
        assert match.roles == {name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        assert match.anchor == "layer.self_attn"

    def test_heads_with_norms_are_left_to_their_own_pattern(self, tiny, captured) -> None:  # type: ignore[no-untyped-def]
        pairs = captured(tiny("qwen3_moe"))
        assert not [match for pair in pairs for match in self.pattern.find(*pair)]

    def test_sizes_of_its_cost(self) -> None:
        (match, _), *_ = self.found(self.positives["plain"][0])
        kernel = self.pattern.variants()[0]
        shape = {"T": 4096, "Q": HEADS, "K": GROUPS, "D": WIDTH, "W": WIDTH, "pairing": 0}
        assert self.pattern.cost_shape(match, 4096) == shape
        assert self.pattern.kernel_cost(match, kernel, 4096) == ("qk_norm_rope", {**shape, "norm": 0})


class TestRope(PatternContract):
    pattern = Rope()
    positives = {
        "half-split": (example(HalfSplit), 2),
        "wide-head": (example(HalfSplit, width=512), 2),
        "partial": (example(Partial), 1),
        "interleaved": (example(Interleaved), 1),
    }
    near_misses = {name: example(changed(function)) for name, function in NEARLY.items()}

    def test_forms(self) -> None:
        found = {name: self.found(kind)[0][0].constants for name, (kind, _) in self.positives.items()}
        assert found["half-split"] == {"form": "half-split", "partial": False}
        assert found["partial"] == {"form": "half-split", "partial": True}
        assert found["interleaved"]["form"] == "interleaved"
