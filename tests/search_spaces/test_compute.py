"""Counted work into time, against hand arithmetic and H200 measurements."""

from __future__ import annotations

import pytest

from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost.compute import Rates, op_time_ms
from shardwright.search_spaces.providers import loss_bytes, provider_cost

H200 = load_cluster("h200-1").device
CPU = load_cluster("cpu-1").device


def cost_of(flops: int, read: int, launches: int, dtype: str = "bfloat16") -> OpCost:
    one = PassCost(flops=flops, bytes_read=read, bytes_written=0, launches=launches, floor_flops=0, floor_bytes=0)
    return OpCost(op="x", provider="eager", dtype=dtype, shape={}, forward=one, backward=one)


def test_the_slower_of_flops_and_bytes_counts() -> None:
    assert op_time_ms(cost_of(693 * 10**12, 0, 1), H200, "fwd") == pytest.approx(1000)
    assert op_time_ms(cost_of(1, 425 * 10**10, 1), H200, "fwd") == pytest.approx(1000)
    assert op_time_ms(cost_of(693 * 10**12, 0, 1), H200, "fwd+bwd") == pytest.approx(2000)
    assert op_time_ms(cost_of(693 * 10**12, 0, 1), H200, "bwd") == pytest.approx(1000)


def test_launches_are_a_floor_on_a_gpu_and_a_sum_on_a_cpu() -> None:
    assert op_time_ms(cost_of(0, 0, 200), H200, "fwd") == pytest.approx(1.0)
    assert op_time_ms(cost_of(0, 15_000_000, 200, "float32"), CPU, "fwd") == pytest.approx(2.0)


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ClusterError) as error:
        op_time_ms(cost_of(1, 1, 1, "float64"), H200, "fwd")
    assert error.value.code == "cluster/no-rate"


@pytest.mark.parametrize(
    ("E", "K", "T", "H", "I", "gemm_ms", "layer_ms"),
    [
        (128, 8, 8192, 2048, 768, 1.492, 3.093),
        (896, 16, 8192, 2048, 2048, 10.300, 13.390),
        (896, 16, 4096, 3584, 1536, 10.003, 12.817),
        (256, 8, 8192, 7168, 2048, 13.609, 18.750),
    ],
)
def test_expert_layers_measured_on_one_h200(
    E: int,
    K: int,
    T: int,
    H: int,
    I: int,
    gemm_ms: float,
    layer_ms: float,
) -> None:
    """torch 2.11 grouped products alone, and a whole eager layer with sort, gather and index_add."""
    rates = Rates.of(load_cluster("h200-1"), "bfloat16", None)
    R = T * K
    seconds = rates.grouped_s(6.0 * R * H * I, 2 * (E * 3 * H * I + R * (2 * H + 3 * I)), R / E)
    assert 1e3 * seconds == pytest.approx(gemm_ms, rel=0.10)
    rows = rates.traffic_s(24 * R * H * 2)
    assert 1e3 * (seconds + rows) == pytest.approx(layer_ms, rel=0.10)


@pytest.mark.parametrize(
    ("op", "provider", "shape", "pass_name", "measured_ms", "tolerance"),
    [
        ("rms_norm", "compile", {"T": 16384, "H": 7168}, "fwd", 0.1367, 0.25),
        ("swiglu", "eager", {"T": 16384, "I": 7168}, "fwd", 0.2868, 0.10),
        ("swiglu", "eager", {"T": 16384, "I": 7168}, "fwd+bwd", 0.7788, 0.10),
        ("swiglu", "compile", {"T": 16384, "I": 7168}, "fwd+bwd", 0.4409, 0.10),
    ],
)
def test_providers_measured_on_one_h200(
    op: str, provider: str, shape: dict[str, int], pass_name: str, measured_ms: float, tolerance: float
) -> None:
    predicted = op_time_ms(provider_cost(op, provider, shape, "bfloat16"), H200, pass_name)
    assert predicted == pytest.approx(measured_ms, rel=tolerance)


def test_the_eager_loss_is_twelve_bytes_per_logit() -> None:
    """Measured 15.00 GiB at T 8192 and V 163,840."""
    assert loss_bytes("eager", "bfloat16", 8192, 7168, 163_840) == 15 * 2**30
    assert loss_bytes("shardwright", "bfloat16", 8192, 7168, 163_840) < 2**30


def test_a_calibration_replaces_the_catalogue() -> None:
    point = (CurvePoint(size=1, rate=1e12),)
    calibration = Calibration(
        device="h200",
        versions={},
        gemm_flops={"bfloat16": point},
        grouped_gemm_flops={"bfloat16": point},
        copy_bytes_per_s=point,
        attention_flops={"bfloat16": point},
        launch_overhead_s=1e-3,
    )
    rates = Rates.of(load_cluster("h200-1"), "bfloat16", calibration)
    assert rates.gemm_s(1e12, 0, 128) == rates.grouped_s(1e12, 0, 128) == rates.attention_s(1e12, 128) == 1
    assert rates.traffic_s(1e12) == 1 and rates.launch_s == 1e-3
    assert rates.origin("gemm_flops") == "measured"
    assert Rates.of(load_cluster("h200-1"), "bfloat16", None).origin("gemm_flops") == "modelled"
