"""Counted work into time, against hand arithmetic and H200 measurements."""

from __future__ import annotations

import pytest

from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost.compute import Rates, op_time_ms, without_call
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


def test_a_call_that_was_waited_for_is_taken_out_of_a_measured_rate() -> None:
    """Calls that take 50 us beside 600 TFLOP/s, as a host times them one by one, give back the 600."""
    sizes, heads = (2048, 8192, 32768), 2 * 16 * 128
    curve = tuple(CurvePoint(size=n, rate=heads * n**2 / (5e-5 + heads * n**2 / 6e14)) for n in sizes)
    found = without_call(curve, 2)
    assert curve[0].rate < 4e14
    assert [point.rate for point in found[:2]] == pytest.approx([max(p.rate for p in curve)] * 2, rel=1e-6)
    assert found[2].rate == pytest.approx(6e14, rel=0.01)
    alone = (CurvePoint(size=512, rate=1e12),)
    assert without_call(alone, 3) == alone


def test_rates_without_a_call_are_a_gpu_s_only() -> None:
    curve = (CurvePoint(size=512, rate=1e12), CurvePoint(size=1024, rate=4e12), CurvePoint(size=4096, rate=5e12))
    calibration = Calibration(device="any", versions={}, gemm_flops={"bfloat16": curve})
    gpu, cpu = (Rates.of(load_cluster(name), "bfloat16", calibration) for name in ("h200-1", "cpu-2"))
    assert cpu.gemm_s(1e12, 0, 512) == pytest.approx(1.0)
    assert gpu.gemm_s(1e12, 0, 512) < 0.5


def test_attention_s_backward_against_a_profile() -> None:
    """One H200, cuDNN, 4 x 4,096 tokens, 32 heads of 128: 0.956 ms forward, 3.205 backward with its helper kernels."""
    rates = Rates.of(load_cluster("h200-1"), "bfloat16", None)
    assert rates.attention_backward_s(0.956e-3, 4 * 4096 * 32 * 128) == pytest.approx(3.205e-3, rel=0.05)


def test_attention_under_a_mask_against_64_heads_more() -> None:
    """One H200, eager sparse attention at 8,192 tokens: 35.7 ms with 64 heads of 192 + 128, 51.4 with 128."""
    rates = Rates.of(load_cluster("h200-1"), "bfloat16", None)
    heads = 2.0 * 8192**2 * 64 * (192 + 128)
    assert 1e3 * rates.masked_attention_s(heads, 8192.0) == pytest.approx(51.4 - 35.7, rel=0.05)
