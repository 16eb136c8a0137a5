"""Latent attention expanded and absorbed; each form is proved by the other."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.mla import Mla
from shardwright.agents.structure.testkit import Example, PatternContract, captured_examples, meta

HEADS, NOPE, ROT, VALUE, LATENT = 4, 8, 6, 10, 16


class Attention(nn.Module):
    """Expanded, with the key joined from its two parts."""

    heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, self.heads * (NOPE + ROT), bias=False)
        self.kv_a = nn.Linear(64, LATENT + ROT, bias=False)
        self.kv_b = nn.Linear(LATENT, self.heads * (NOPE + VALUE), bias=False)
        self.scale = (NOPE + ROT) ** -0.5

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = self.q_proj(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        latent, rot = self.kv_a(x).split([LATENT, ROT], dim=-1)
        return q, torch.tanh(latent), torch.sin(rot).unsqueeze(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, latent, rot = self.parts(x)
        both = self.kv_b(latent).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        return self.attend(q, self.key(both, rot), both[..., NOPE:])

    def key(self, both: torch.Tensor, rot: torch.Tensor) -> torch.Tensor:
        return torch.cat([both[..., :NOPE], rot.expand(-1, self.heads, -1, -1)], dim=-1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Written(Attention):
    """Expanded, with the key written into an empty tensor."""

    def key(self, both: torch.Tensor, rot: torch.Tensor) -> torch.Tensor:
        key = both.new_empty(*both.shape[:-1], NOPE + ROT)
        key[..., :NOPE].copy_(both[..., :NOPE])
        key[..., NOPE:].copy_(rot.expand(-1, self.heads, -1, -1))
        return key

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)


class ManyHeads(Attention):
    """So wide that the differential test takes fewer and narrower heads."""

    heads = 32


class Absorbed(Attention):
    """No keys and values: the expansion's matrix is moved to the queries and to the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, latent, rot = self.parts(x)
        latent = latent.unsqueeze(1)
        weight = self.kv_b.weight.view(self.heads, NOPE + VALUE, LATENT)
        scores = torch.matmul(torch.matmul(q[..., :NOPE], weight[:, :NOPE]), latent.transpose(-2, -1))
        scores = (scores + torch.matmul(q[..., NOPE:], rot.transpose(-2, -1))) * self.scale
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        return self.result(torch.matmul(weights, latent), weight)

    def result(self, mixed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.matmul(mixed, weight[:, NOPE:].transpose(-2, -1))


class RotFirst(Attention):
    """The shared part before the own one."""

    def key(self, both: torch.Tensor, rot: torch.Tensor) -> torch.Tensor:
        return torch.cat([rot.expand(-1, self.heads, -1, -1), both[..., :NOPE]], dim=-1)


class KeyUsed(Attention):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        q, latent, rot = self.parts(x)
        both = self.kv_b(latent).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        key = self.key(both, rot)
        return self.attend(q, key, both[..., NOPE:]), key.sum()


class WrittenOver(Written):
    """The shared part written over the own one."""

    def key(self, both: torch.Tensor, rot: torch.Tensor) -> torch.Tensor:
        key = both.new_empty(*both.shape[:-1], NOPE + ROT)
        key[..., :NOPE].copy_(both[..., :NOPE])
        key[..., 2 : 2 + ROT].copy_(rot.expand(-1, self.heads, -1, -1))
        return key


class TwoLatents(Attention):
    """Values of another latent than the keys'."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, latent, rot = self.parts(x)
        one, other = (
            self.kv_b(value).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for value in (latent, latent + 1.0)
        )
        return self.attend(q, self.key(one, rot), other[..., NOPE:])


class Random(Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


class AbsorbedOtherRows(Absorbed):
    """The result by the rows that made the scores."""

    def result(self, mixed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.matmul(mixed, weight[:, :NOPE].transpose(-2, -1))


def inside(kind: type[nn.Module]) -> Example:
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = kind()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.self_attn(x)

    return lambda: (InLayer(), (meta(2, 7, 64),))


class TestMla(PatternContract):
    pattern = Mla()
    positives = {
        "written": (inside(Written), 1),
        "joined": (inside(Attention), 1),
        "absorbed": (inside(Absorbed), 1),
        "many-heads": (inside(ManyHeads), 1),
    }
    near_misses = {
        "shared-part-first": inside(RotFirst),
        "key-used-elsewhere": inside(KeyUsed),
        "written-over": inside(WrittenOver),
        "two-latents": inside(TwoLatents),
        "dropout": inside(Random),
        "absorbed-other-rows": inside(AbsorbedOtherRows),
    }

    def test_forms_are_bound(self) -> None:
        seen = {name: self.found(example)[0][0].constants for name, (example, _) in self.positives.items()}
        assert {name: c["form"] for name, c in seen.items()} == {
            "written": "expanded",
            "joined": "expanded",
            "absorbed": "absorbed",
            "many-heads": "expanded",
        }
        assert (seen["written"]["key"], seen["joined"]["key"]) == ("written", "joined")
        assert all((c["nope"], c["value"]) == (NOPE, VALUE) for c in seen.values())

    def test_many_heads_are_tested_with_few(self) -> None:
        (pair, *_), _ = captured_examples(inside(ManyHeads))
        (match,) = self.pattern.find(*pair)
        small = self.pattern.sizes(match)
        rows = match.region.spec("weight").shape[0]
        assert small.of(rows) == small.of(ManyHeads.heads) * (small.of(NOPE) + small.of(VALUE)) < rows
        assert small.of(NOPE + ROT) == small.of(NOPE) + small.of(ROT)
