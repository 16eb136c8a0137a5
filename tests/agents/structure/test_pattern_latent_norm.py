"""The split of a joint projection and the norm of its latent part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwright.agents.structure.patterns.latent_norm import LatentNorm
from shardwright.agents.structure.testkit import PatternContract, meta

WHOLE, LATENT = 48, 32


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LATENT))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def split(norm: nn.Module, joint: Tensor) -> tuple[Tensor, Tensor]:
    latent, rest = joint.split([LATENT, WHOLE - LATENT], dim=-1)
    return norm(latent), rest


def last_part(norm: nn.Module, joint: Tensor) -> tuple[Tensor, Tensor]:
    rest, latent = joint.split([WHOLE - LATENT, LATENT], dim=-1)
    return norm(latent), rest


def rest_overlaps(norm: nn.Module, joint: Tensor) -> tuple[Tensor, Tensor]:
    return norm(joint[..., :LATENT]), joint[..., LATENT - 1 :]


def latent_read(norm: nn.Module, joint: Tensor) -> tuple[Tensor, Tensor]:
    latent, rest = joint.split([LATENT, WHOLE - LATENT], dim=-1)
    return norm(latent) + latent, rest


def overwritten(norm: nn.Module, joint: Tensor) -> tuple[Tensor, Tensor]:
    latent, rest = joint.split([LATENT, WHOLE - LATENT], dim=-1)
    joint.mul_(2.0)
    return norm(latent), rest


def example(function: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]):  # type: ignore[no-untyped-def]
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv_a_layernorm = Norm()

        def forward(self, joint: Tensor) -> Tensor:
            latent, rest = function(self.kv_a_layernorm, joint)
            return torch.cat((latent, rest.sin()), dim=-1)

    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Attention()

        def forward(self, joint: Tensor) -> Tensor:
            return self.self_attn(joint)  # type: ignore[no-any-return]

    return lambda: (InLayer(), (meta(2, 6, WHOLE),))


def hooked():  # type: ignore[no-untyped-def]
    layer, tensors = example(split)()
    layer.self_attn.kv_a_layernorm.register_full_backward_hook(lambda module, gradients, results: None)
    return layer, tensors


class TestLatentNorm(PatternContract):
    pattern = LatentNorm()
    positives = {"split": (example(split), 1)}
    near_misses = {
        "last-part": example(last_part),
        "rest-overlaps": example(rest_overlaps),
        "latent-read": example(latent_read),
        "overwritten-between": example(overwritten),
        "gradient-hook": hooked,
    }

    def test_it_is_shown_and_not_installed(self) -> None:
        (match, certificate), *_ = self.found(example(split))
        kernel = self.pattern.variants()[0]
        assert certificate.legal and kernel.op == "latent_norm" and "inside the attention" in kernel.not_installable
        assert match.roles == {"norm": "kv_a_layernorm"} and match.anchor == "layer.self_attn"
        assert self.pattern.cost_shape(match, 128) == {"T": 128, "W": WHOLE, "H": LATENT}
