"""Rank 0 of eight on a fake process group: FSDP2's tracker holds the cost model's static and gathered bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

RANKS = Path(__file__).resolve().parent / "ranks"
IDS_BYTES = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("simulated")
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def simulated(checkpoint: Path, shard: int, ep: int, cp: int = 1) -> dict[str, Any]:
    words = [sys.executable, str(RANKS / "simulate.py"), str(checkpoint), str(shard), str(ep), "compute", str(cp)]
    done = subprocess.run(["timeout", "-k", "5", "120", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "ep", "cp"), [(8, 1, 1), (2, 4, 1), (4, 1, 2)])
def test_static_and_gathered_bytes_are_the_cost_models(checkpoint: Path, shard: int, ep: int, cp: int) -> None:
    found = simulated(checkpoint, shard, ep, cp)
    model = found["model"]
    static = model["frozen_base"] + model["adapter_parameters"]
    assert found["sharded"] == pytest.approx(static, rel=0.005)
    assert found["kinds"]["Inputs"] == 64 // cp * IDS_BYTES, "rank 0 runs its own tokens"
    least = model["gathered_root"] + model["gather_buffers"] / 2
    most = model["gathered_root"] + model["gather_buffers"] + max(model["gather_staging"], model["gathered_root"])
    assert 0.95 * least <= found["gathered"] <= 1.05 * most


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 4])
def test_weights_that_a_rank_keeps_whole_are_not_copied(checkpoint: Path, ep: int) -> None:
    """FSDP2 would copy the units of a group of one: frozen weights are left out of it, adapters alone pass."""
    found = simulated(checkpoint, 1, ep)
    model = found["model"]
    assert found["sharded"] == pytest.approx(model["frozen_base"] + model["adapter_parameters"], rel=0.005)
    root, buffers, staging = (model.get(name, 0) for name in ("gathered_root", "gather_buffers", "gather_staging"))
    dense = root + buffers + max(staging, root)
    assert (dense == 0) == (ep == 1)
    assert found["gathered"] <= 1.05 * dense + model["adapter_parameters"]
