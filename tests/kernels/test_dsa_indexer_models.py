"""The lightning indexer beside the modules of transformers: the same keys chosen, both rotary layouts.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.

Legend: T tokens.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")

if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from shardwright.kernels.dsa.indexer.op import dsa_indexer  # noqa: E402

MODELS = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32Indexer", "half-split"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaIndexer", "interleaved"),
}
T = 14


@pytest.mark.skipif(INTERPRETED, reason="is already inside")
def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("../test_dsa_indexer_models.py")


@inside
@pytest.mark.parametrize("name", MODELS)
def test_choice_is_the_models_own(name: str) -> None:
    """Projections and norm by the module, rotation, scores and choice by us; fp32 on both sides."""
    config_name, class_name, layout = MODELS[name]
    package = f"transformers.models.{name}"
    modelling = pytest.importorskip(f"{package}.modeling_{name}")
    config = getattr(importlib.import_module(f"{package}.configuration_{name}"), config_name)(
        hidden_size=48, q_lora_rank=24, index_n_heads=4, index_head_dim=32, index_topk=5, qk_rope_head_dim=16
    )
    torch.manual_seed(3)
    indexer = getattr(modelling, class_name)(config, 0)
    hidden, q_latent = torch.randn(1, T, 48), torch.randn(1, T, 24)
    angles = torch.arange(T)[:, None] * (0.5 ** torch.arange(8))[None]
    twice = torch.cat((angles, angles), -1)[None]
    mask = torch.full((T, T), float("-inf")).triu(1)[None]
    own = indexer(hidden, q_latent, (twice.cos(), twice.sin()), mask, torch.arange(T)[None], None)[0]
    with torch.no_grad():
        q = indexer.wq_b(q_latent)[0].view(T, 4, 32)
        k = indexer.k_norm(indexer.wk(hidden))[0]
        weights = indexer.weights_proj(hidden)[0]
    found = dsa_indexer(q, k, weights, top_k=5, cos=angles.cos(), sin=angles.sin(), layout=layout)
    other = dsa_indexer(q, k, weights, top_k=5, cos=angles.cos(), sin=angles.sin(), layout=swapped(layout))
    for t in range(T):
        assert {key for key in found[t].tolist() if key >= 0} == {key for key in own[t].tolist() if key <= t}
    assert not torch.equal(found, other), "the layouts give different choices here"


def swapped(layout: str) -> str:
    """The other layout."""
    return "interleaved" if layout == "half-split" else "half-split"
