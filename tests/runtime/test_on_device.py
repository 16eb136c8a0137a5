"""Whole runs on CUDA: a tiny bf16 model with both norm fusions, the fused experts, router, head and loss; then export.

One rank uses ``moe_layer``, two ranks ``grouped_lora_mlp`` between dispatch and combine. Every run proves its fusions
on one batch and its first loss and gradient norm against the plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.kernels.registry import OPERATORS, source_sha256
from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.export.peft import export_adapter
from shardwright.schemas.cluster import ClusterRef
from shardwright.schemas.fusion import FusionDecision

pytest.importorskip("triton", reason="kernels need triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = ("model.layers.0", "model.layers.1")
MOE = "model.layers.1.mlp"
NORMS = (*tuple(f"{layer}.input_layernorm" for layer in LAYERS), "model.norm")
EPS = {"eps": "0.000001"}
RECIPE = {
    "precision": {"base": "bfloat16"},
    "lora": {"rank": 16, "alpha": "32", "targets": ["attention", "experts", "dense_mlp"]},
}


def decision(op: str, modules: tuple[str, ...], roles: dict[str, str], constants: dict[str, Any]) -> FusionDecision:
    return FusionDecision(
        proposal_id=f"{op}.1",
        pattern=op,
        variant="fused",
        provider="shardwright",
        op=op,
        modules=modules,
        roles=roles,
        constants=constants,
        source_sha256=source_sha256(op),
        tolerance="0.02",
    )


def fusions(experts: str) -> tuple[FusionDecision, ...]:
    """Those of the registered operators that the model has a place for."""
    layer = {
        "first_norm": "input_layernorm",
        "branch": "self_attn",
        "norm": "post_attention_layernorm",
        "mlp": "mlp",
    }
    routing = {"k": 2, "scoring": "softmax", "renormalise": True}
    wanted = (
        ("rms_norm", NORMS, {"weight": "weight"}, EPS),
        ("add_rms_norm", LAYERS, layer, EPS),
        (experts, (f"{MOE}.experts",), {}, {"activation": "swiglu"}),
        ("router", (f"{MOE}.gate",), {"weight": "weight"}, routing),
        ("linear_cross_entropy", ("lm_head",), {"weight": "weight"}, {}),
    )
    return tuple(decision(*one) for one in wanted if one[0] in OPERATORS)


def cluster(devices: int) -> ClusterRef:
    return ClusterRef(
        name="here",
        digest="ab" * 32,
        device_type="cuda",
        device_name=torch.cuda.get_device_name(0),
        world_size=devices,
        devices_per_node=devices,
        backend="nccl",
    )


def sound(job: Any) -> None:
    record = job.record
    assert record.status == "trained" and len(job.losses) == 5
    assert job.losses[-1] < job.losses[0]
    checks = {check.name: check for check in record.checks}
    assert all(check.passed for check in checks.values()), [c.evidence for c in checks.values() if not c.passed]
    assert {"fusions-equal", "first-loss", "gradient-norm", "adapters-moved", "base-unchanged"} <= set(checks)
    assert 0 < (record.measured_peak_bytes or 0) < 2 << 30
    export_adapter(job.run_dir, job.example.checkpoint)
    assert all(check.passed for check in check_adapter(job.run_dir, job.example.checkpoint))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_one_rank_with_everything_fused(
    qwen: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int], checkpointing: str
) -> None:
    job = make_job(
        qwen, strategy(checkpointing=checkpointing), recipe=RECIPE, fusions=fusions("moe_layer"), cluster=cluster(1)
    )
    assert single_rank(job) == 0
    sound(job)


def test_fused_losses_stay_near_eager_ones(
    qwen: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int]
) -> None:
    jobs = [
        make_job(qwen, strategy(), recipe=RECIPE, fusions=chosen, cluster=cluster(1))
        for chosen in ((), fusions("moe_layer"))
    ]
    for job in jobs:
        assert single_rank(job) == 0
    assert jobs[1].losses == pytest.approx(jobs[0].losses, rel=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_with_received_rows_fused(qwen: Any, make_job: Any, strategy: Any, run_many: Any) -> None:
    chosen = fusions("grouped_lora_mlp")
    jobs = [
        make_job(qwen, strategy(ep=2, checkpointing="full"), recipe=RECIPE, fusions=chosen, cluster=cluster(2)),
        make_job(qwen, strategy(shard=2), recipe=RECIPE, fusions=fusions("moe_layer"), cluster=cluster(2)),
    ]
    run_many(2, jobs)
    for job in jobs:
        sound(job)
