"""Counted work into time, against hand arithmetic and H200 measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.schemas.bench import BenchLine
from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost.compute import (
    CHAIN_SHARE,
    DECODED_SHARE,
    HEAD_CHAIN_SHARE,
    Rates,
    op_time_ms,
    rounded_up,
    without_call,
)
from shardwright.search_spaces.cost.fusion import kernel_cost
from shardwright.search_spaces.cost.step_compute import head_product_bytes
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


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def kernel_line(case: str, passes: str) -> BenchLine:
    """The newest measurement of a kernel's case."""
    lines = [
        line for path in sorted(RESULTS.glob("kernels-nvidia-h200-*.jsonl")) for line in path.read_text().split("\n")
    ]
    found = [BenchLine.model_validate_json(line) for line in lines if line]
    return [one for one in found if (one.case, one.passes) == (case, passes)][-1]


def eager_ms(case: str, passes: str) -> float:
    """Device time of the eager rival that a kernel was measured beside."""
    return kernel_line(case, passes).metrics["eager_device_ms"]


@pytest.mark.parametrize(
    ("case", "op", "shape", "share"),
    [
        ("rmsnorm/16kx7168", "rms_norm", {"T": 16384, "H": 7168}, CHAIN_SHARE),
        ("add-rmsnorm/16kx7168", "add_rms_norm", {"T": 16384, "H": 7168}, CHAIN_SHARE),
        (
            "qk-norm-rope/8kx32x4x128",
            "qk_norm_rope",
            {"T": 8192, "Q": 32, "K": 4, "D": 128, "W": 128},
            HEAD_CHAIN_SHARE,
        ),
        (
            "qk-norm-rope/8kx64x8x128-w64",
            "qk_norm_rope",
            {"T": 8192, "Q": 64, "K": 8, "D": 128, "W": 64},
            HEAD_CHAIN_SHARE,
        ),
    ],
)
def test_eager_chains_take_what_they_took_on_one_h200(
    case: str, op: str, shape: dict[str, int], share: dict[str, float]
) -> None:
    """Each pass within 8 %; the second shape over heads and the norm with a sum gave no constant."""
    rates, cost = Rates(H200, "bfloat16"), provider_cost(op, "eager", shape, "bfloat16")
    assert cost.backward is not None
    forward, both = eager_ms(case, "fwd"), eager_ms(case, "fwd+dx")
    for one, measured in ((cost.forward, forward), (cost.backward, both - forward)):
        assert 1e3 * rates.chain_s(one.bytes_read + one.bytes_written, share) == pytest.approx(measured, rel=0.08)
    assert Rates(CPU, "bfloat16").chain_s(1e9, share) == Rates(CPU, "bfloat16").traffic_s(1e9)


def test_an_eager_head_and_loss_reads_its_logits_as_often_as_it_did() -> None:
    """On one H200 35.8 ms forward and 70.4 with the input's gradient; products at the rate that lasts."""
    spent = head_and_loss_ms(provider_cost("linear_cross_entropy", "eager", HEAD, "bfloat16"))
    assert spent[0] == pytest.approx(eager_ms("linear-ce/8k", "fwd"), rel=0.05)
    assert sum(spent) == pytest.approx(eager_ms("linear-ce/8k", "fwd+dx"), rel=0.05)


def test_products_of_a_fused_head_move_their_operands_while_they_compute() -> None:
    """On one H200 58.3 ms, its two products alone 57.1: beside them the loss reads the logits twice and writes once."""
    line = kernel_line("linear-ce/8k", "fwd+dx")
    spent = head_and_loss_ms(kernel_cost("linear_cross_entropy", HEAD, "bfloat16"))
    assert sum(spent) == pytest.approx(line.metrics["ours_device_ms"], rel=0.03)
    products = 4 * HEAD["T"] * HEAD["H"] * HEAD["V"] / 693e12
    passes = 3 * HEAD["T"] * HEAD["V"] * 2 / H200.memory_bandwidth_bytes_per_s
    assert sum(spent) == pytest.approx(1e3 * (products + passes), rel=5e-3)


HEAD = {"T": 8192, "H": 7168, "V": 163_840}


def head_and_loss_ms(cost: OpCost) -> list[float]:
    """Of both passes."""
    rates, spent = Rates(H200, "bfloat16"), []
    assert cost.backward is not None
    for one in (cost.forward, cost.backward):
        products = head_product_bytes(one, cost.forward.workspace_bytes, 2, **cost.shape)
        beside = rates.traffic_s(one.bytes_read + one.bytes_written - products)
        flops = 2 * HEAD["T"] * HEAD["H"] * HEAD["V"] * (one.flops // (2 * HEAD["T"] * HEAD["H"] * HEAD["V"]))
        spent.append(1e3 * (rates.gemm_s(flops, products, HEAD["T"]) + beside))
    return spent


def test_products_of_a_step_run_at_the_rate_that_lasts() -> None:
    """The measured one; for a calibration without it the catalogue's; a CPU has no limit of power."""
    short = Calibration(device="x", versions={}, gemm_flops={"bfloat16": (CurvePoint(size=8192, rate=790e12),)})
    lasting = short.model_copy(update={"sustained_flops": {"bfloat16": 700e12}})
    assert Rates(H200, "bfloat16", short).gemm_s(693e12, 0.0, 8192) == pytest.approx(1.0)
    assert Rates(H200, "bfloat16", lasting).gemm_s(700e12, 0.0, 8192) == pytest.approx(1.0)
    assert Rates(CPU, "float32", short).gemm_s(790e12, 0.0, 8192) > 1.0
    slow = short.model_copy(update={"gemm_flops": {"bfloat16": (CurvePoint(size=8192, rate=100e12),)}})
    assert Rates(H200, "bfloat16", slow).gemm_s(100e12, 0.0, 8192) == pytest.approx(1.0), "no faster than its curve"


def test_uneven_groups_take_at_least_what_their_fit_says() -> None:
    """A curve of equal groups at one width is no promise for narrow experts: 1.37 ms for both products on one H200."""
    curve = Calibration(device="x", versions={}, grouped_gemm_flops={"bfloat16": (CurvePoint(size=512, rate=690e12),)})
    flops, moved = 6.0 * 65536 * 2048 * 768, 2.0 * (128 * 3 * 2048 * 768 + 65536 * (2 * 2048 + 3 * 768))
    rates = Rates(H200, "bfloat16", curve)
    assert 1e3 * rates.grouped_s(flops, moved, 512.0, library=True) == pytest.approx(1.37, rel=0.06)
    assert rates.grouped_s(flops, moved, 512.0) == pytest.approx(flops / 690e12)


def ours_ms(case: str, passes: str) -> float:
    """Time of our kernel in that case, the newest."""
    lines = [
        line for path in sorted(RESULTS.glob("kernels-nvidia-h200-*.jsonl")) for line in path.read_text().split("\n")
    ]
    found = [BenchLine.model_validate_json(line) for line in lines if line]
    return [one.ours or 0.0 for one in found if (one.case, one.passes) == (case, passes)][-1]


BEST = Calibration(
    device="x",
    versions={},
    grouped_gemm_flops={"bfloat16": (CurvePoint(size=32, rate=74e12), CurvePoint(size=2048, rate=689e12))},
    sustained_flops={"bfloat16": 790e12},
)
"""Short calls, as the kernels' cases are timed: no limit of power."""


@pytest.mark.parametrize(
    ("case", "T", "K", "E", "H", "I"),
    [
        ("moe/128e8", 8192, 8, 128, 2048, 768),
        ("moe/896e16", 8192, 16, 896, 2048, 2048),
        ("moe/256e8", 8192, 8, 256, 7168, 2048),
        ("moe/k3-ep64", 4096, 16, 14, 3584, 3072),
    ],
)
def test_our_grouped_products_take_what_they_took_on_one_h200(
    case: str, T: int, K: int, E: int, H: int, I: int
) -> None:
    """Forward and the input's gradient, each as one pass: within 20 %, at 146 to 4,681 rows an expert."""
    rows = T * K
    flops, moved = 6.0 * rows * H * I, 2.0 * (E * 3 * H * I + rows * (2 * H + 3 * I))
    one = 1e3 * Rates(H200, "bfloat16", BEST).tiled_s(flops, moved, rows / E)
    assert one == pytest.approx(ours_ms(case, "fwd"), rel=0.20)
    assert 2 * one == pytest.approx(ours_ms(case, "fwd+dx"), rel=0.20)


@pytest.mark.parametrize(("case", "T"), [("moe-mxfp4/k3-ep64-2k", 2048), ("moe-mxfp4/k3-ep64-4k", 4096)])
def test_products_of_packed_weights_take_what_they_took_on_one_h200(case: str, T: int) -> None:
    """Even rows there: whole tiles of 160 rows, one or two an expert; uneven ones leave half of the last empty."""
    tiles = -(-T // 14 // 160)
    held = 14 * tiles * 160
    assert ours_ms(case, "fwd") == pytest.approx(1e3 * 6.0 * held * 3584 * 3072 / (DECODED_SHARE * 689e12), rel=0.16)
    flops, rates = 6.0 * T * 3584 * 3072, Rates(H200, "bfloat16", BEST)
    priced = rates.decoded_s(flops, 0.0, T / 14)
    assert priced == pytest.approx(flops * rounded_up(T / 14, 160.0) / (DECODED_SHARE * 689e12))
    stored = 14 * 3 * 3584 * 3072 * 17 / 32
    assert rates.decoded_s(6.0 * 3584 * 3072, stored, 1 / 14) >= stored / (1.13 * rates.bandwidth)


def test_few_rows_an_expert_cost_whole_tiles_or_their_weights() -> None:
    """Half of the last tile is empty; an expert with any row has one; below that weights bound."""
    assert rounded_up(1920.0, 192) == pytest.approx(10.5 / 10)
    assert rounded_up(96.0, 192) == pytest.approx(2.0)
    assert rounded_up(0.25, 64) == pytest.approx(64.0)
    rates = Rates(H200, "bfloat16", BEST)
    weights = 2.0 * 256 * 3 * 6144 * 2048
    few, fewer = (rates.tiled_s(6.0 * 256 * rows * 6144 * 2048, weights, rows) for rows in (16.0, 1.0))
    assert few == fewer == pytest.approx(weights / (1.13 * rates.bandwidth))
    assert Rates(CPU, "float32").tiled_s(1e9, 1e6, 8.0) == Rates(CPU, "float32").grouped_s(1e9, 1e6, 8.0)
    slow = BEST.model_copy(update={"sustained_flops": {"bfloat16": 345e12}})
    many = [Rates(H200, "bfloat16", one).tiled_s(1e15, 1e9, 4096.0) for one in (BEST, slow)]
    assert many[1] / many[0] == pytest.approx(689 / 345, rel=1e-3), "no faster than what lasts"


def test_a_rank_copies_its_part_before_a_gather() -> None:
    rates = Rates(H200, "bfloat16")
    assert rates.gather_input_s(8e9, 4) == pytest.approx(2 * 2e9 / rates.bandwidth)
    assert rates.gather_input_s(8e9, 1) == 0.0
