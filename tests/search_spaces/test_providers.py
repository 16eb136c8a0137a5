"""What providers cost: bounds, growth with every size, and the figures that libraries and measurements publish."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schemas.errors import KernelError
from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost.compute import op_time_ms
from shardwright.search_spaces.provider_libraries import FLA, LIBRARY_KERNELS, LIGER, libraries
from shardwright.search_spaces.providers import PROVIDER_COSTS, PROVIDERS, REWRITTEN, provider_cost

H200 = load_cluster("h200-1").device
SHAPES: dict[str, dict[str, int]] = {
    "rms_norm": {"T": 4096, "H": 2048},
    "add_rms_norm": {"T": 4096, "H": 2048},
    "swiglu": {"T": 4096, "I": 768},
    "experts": {"R": 32768, "H": 2048, "I": 768, "E": 128},
    "moe_layer": {"T": 4096, "K": 8, "E": 128, "H": 2048, "I": 768},
    "linear_cross_entropy": {"T": 4096, "H": 2048, "V": 151_936},
    "router": {"T": 4096, "E": 128, "k": 8},
    "gated_rms_norm": {"T": 4096, "H": 32, "D": 128},
    "latent_norm": {"T": 4096, "W": 576, "H": 512},
    "qk_norm_rope": {"T": 4096, "Q": 32, "K": 4, "D": 128, "W": 128},
    "rope": {"T": 4096, "Q": 32, "K": 4, "D": 128, "W": 64},
    "dsa": {"T": 4096, "H": 64, "N": 64, "D": 128, "K": 2048, "V": 512, "R": 64},
    "dsa_pooled": {"T": 4096, "H": 64, "N": 0, "D": 0, "K": 2111, "V": 512, "R": 0},
    "delta_rule": {"T": 4096, "H": 16, "HV": 32, "K": 128, "V": 128},
    "delta_rule_layer": {"T": 4096, "H": 16, "HV": 32, "K": 128, "V": 128, "J": 4},
    "kda": {"T": 4096, "H": 32, "K": 128, "V": 128},
    "gated_delta": {"T": 4096, "H": 16, "HV": 32, "K": 128, "V": 128},
    "short_conv": {"T": 4096, "C": 4096, "J": 4},
    "mla_gated": {"T": 4096, "H": 64, "A": 128, "B": 128, "R": 64, "V": 512, "N": 0, "D": 0, "K": 0},
    "mla": {"T": 4096, "N": 64, "D": 128, "V": 128, "R": 64, "L": 512},
    "qkv_merge": {"T": 4096, "H": 2048, "N": 5120, "P": 3},
    "experts_loop": {"R": 16384, "H": 2048, "I": 768, "E": 16},
    "experts_embedding": {"T": 4096, "K": 64, "H": 1024, "E": 16384},
    "gate_up_merge": {"T": 4096, "H": 2048, "N": 1536, "P": 2},
    "shared_expert": {"T": 4096, "H": 2048, "I": 768},
    "latent_moe": {"T": 4096, "H": 7168, "L": 3584, "norms": 1},
    "attention_residual": {"T": 4096, "R": 9, "H": 7168},
    "residual_rows": {"T": 4096, "R": 9, "H": 7168, "S": 0},
    "hyper_connection": {"T": 4096, "N": 4, "H": 4096, "S": 20},
    "situ": {"T": 4096, "I": 6144},
    "activation": {"T": 4096, "I": 768, "A": 2, "S": 4},
    "lora_linear": {"T": 4096, "H": 2048, "N": 4096, "r": 16},
}
FURTHER: tuple[tuple[str, dict[str, int]], ...] = (
    ("delta_rule", {**SHAPES["delta_rule"], "channels": 0}),
    ("delta_rule_layer", {**SHAPES["delta_rule_layer"], "channels": 0}),
    ("rope", {"T": 4096, "Q": 32, "K": 0, "D": 64, "W": 64, "pairing": 1}),
    ("mla_gated", {**SHAPES["mla_gated"], "N": 64, "D": 128, "K": 2048}),
    ("mla", {**SHAPES["mla"], "causal": 0}),
    ("mla", {**SHAPES["mla"], "causal": 0, "spelled": 1}),
    ("shared_expert", {**SHAPES["shared_expert"], "U": 1, "P": 1, "O": 1}),
    ("shared_expert", {**SHAPES["shared_expert"], "U": 2, "P": 1, "O": 1}),
    ("residual_rows", {**SHAPES["residual_rows"], "S": 1}),
    ("residual_rows", {**SHAPES["residual_rows"], "S": 0, "apart": 1}),
    ("activation", {**SHAPES["activation"], "A": 1, "S": 2, "wide": 1}),
    ("lora_linear", {**SHAPES["lora_linear"], "E": 8}),
)
"""Other forms of the same operators."""

NOT_SIZES = frozenset(
    {"channels", "pairing", "causal", "spelled", "wide", "apart", "U", "P", "O", "norms", "A", "S", "k", "K"}
)
"""Sizes that name a form, or whose doubling another size bounds."""

WAYS: list[tuple[str, str, dict[str, int]]] = [
    (op, provider, shape)
    for op, shape in [*SHAPES.items(), *FURTHER]
    for provider in (
        *(PROVIDERS if op in PROVIDER_COSTS else ()),
        *REWRITTEN.get(op, ()),
        *(kernel.library.provider for kernel in LIBRARY_KERNELS.get(op, ())),
    )
]


def moved_bytes(cost: OpCost) -> list[int]:
    return [one.bytes_read + one.bytes_written for one in (cost.forward, cost.backward) if one is not None]


def test_every_described_operator_has_an_example() -> None:
    assert set(SHAPES) == {*PROVIDER_COSTS, *LIBRARY_KERNELS}


@pytest.mark.parametrize(("op", "shape"), [*((op, SHAPES[op]) for op in PROVIDER_COSTS), *FURTHER])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_provider_beats_the_floor_and_compile_moves_no_more_than_eager(
    op: str, shape: dict[str, int], dtype: str
) -> None:
    eager, compiled = (provider_cost(op, provider, shape, dtype) for provider in PROVIDERS)
    for one, other in ((eager.forward, compiled.forward), (eager.backward, compiled.backward)):
        assert one is not None and other is not None
        assert one.bytes_read + one.bytes_written >= other.bytes_read + other.bytes_written >= 0.999 * other.floor_bytes
        assert one.launches >= other.launches >= 1
        assert other.flops >= other.floor_flops > 0


@pytest.mark.parametrize(("op", "provider", "shape"), WAYS)
def test_every_way_moves_and_computes_at_least_the_floor(op: str, provider: str, shape: dict[str, int]) -> None:
    """Both passes together: some do work of the backward in the forward."""
    cost = provider_cost(op, provider, shape, "bfloat16")
    assert cost.provider == provider and cost.backward is not None
    floor = cost.forward.floor_bytes + cost.backward.floor_bytes
    assert sum(moved_bytes(cost)) >= 0.98 * floor
    flops = cost.forward.floor_flops + cost.backward.floor_flops
    assert cost.forward.flops + cost.backward.flops >= 0.98 * flops
    assert min(cost.forward.launches, cost.backward.launches) >= 1


@given(way=st.sampled_from(WAYS), which=st.integers(0, 7), times=st.integers(2, 5), data=st.data())
@settings(max_examples=300, deadline=None)
def test_cost_grows_with_every_size(
    way: tuple[str, str, dict[str, int]], which: int, times: int, data: st.DataObject
) -> None:
    """A size times a power of two: neither bytes nor flops fall, nor the time where launches do not hide it."""
    op, provider, shape = way
    shrunk = data.draw(st.sampled_from((1, 2, 4, 8)))
    start = {name: size if name in NOT_SIZES else max(1, size // shrunk) for name, size in shape.items()}
    names = [name for name in shape if name not in NOT_SIZES]
    grown = {**start, names[which % len(names)]: start[names[which % len(names)]] * 2**times}
    small, large = (provider_cost(op, provider, sizes, "bfloat16") for sizes in (start, grown))
    for one, other in zip(moved_bytes(small), moved_bytes(large), strict=True):
        assert other >= one
    assert small.backward is not None and large.backward is not None
    assert large.forward.flops >= small.forward.flops and large.backward.flops >= small.backward.flops
    busy = H200.model_copy(update={"launch_overhead_s": 0.0})
    assert op_time_ms(large, busy, "fwd+bwd") >= op_time_ms(small, busy, "fwd+bwd")


def test_flash_linear_attention_moves_what_its_authors_kernels_are_known_to_move() -> None:
    """Counted elsewhere from its sources: 37 tensor-widths forward and 84 backward; launches: 11 and 34, one H200."""
    for T, H in ((8192, 32), (32768, 96)):
        cost = provider_cost("kda", "fla", {"T": T, "H": H, "K": 128, "V": 128}, "bfloat16")
        forward, backward = (one / (T * H * 128 * 2) for one in moved_bytes(cost))
        assert forward == pytest.approx(37, rel=0.03) and backward == pytest.approx(84, rel=0.03)
        assert cost.backward is not None
        assert (cost.forward.launches, cost.forward.launches + cost.backward.launches) == (11, 34)


@pytest.mark.parametrize(
    ("op", "shape", "pass_name", "measured_ms", "tolerance"),
    [
        ("rms_norm", {"T": 16384, "H": 7168}, "fwd", 0.1287, 0.20),
        ("swiglu", {"T": 16384, "I": 7168}, "fwd", 0.1675, 0.05),
        ("swiglu", {"T": 16384, "I": 7168}, "fwd+bwd", 0.4436, 0.05),
        ("linear_cross_entropy", {"T": 8192, "H": 7168, "V": 163_840}, "fwd+dx", 62.16, 0.12),
    ],
)
def test_liger_as_measured_on_one_h200(
    op: str, shape: dict[str, int], pass_name: str, measured_ms: float, tolerance: float
) -> None:
    assert op_time_ms(provider_cost(op, "liger", shape, "bfloat16"), H200, pass_name) == pytest.approx(
        measured_ms, rel=tolerance
    )


def test_a_counted_time_is_no_more_than_the_measured_one() -> None:
    """One H200, T 32,768, H 32: 3.74 ms forward and 17.39 both; counted traffic alone is a bound from below."""
    cost = provider_cost("kda", "fla", {"T": 32768, "H": 32, "K": 128, "V": 128}, "bfloat16")
    assert 0.5 * 3.74 < op_time_ms(cost, H200, "fwd") < 3.74
    assert 0.4 * 17.39 < op_time_ms(cost, H200, "fwd+bwd") < 17.39


def test_the_loss_by_chunks_holds_no_more_logits_than_its_input() -> None:
    shape = {"T": 8192, "H": 7168, "V": 163_840}
    cost = provider_cost("linear_cross_entropy", "liger", shape, "bfloat16")
    assert cost.forward.workspace_bytes == 512 * 163_840 * 2 and cost.forward.launches == 16 * 4 + 6
    assert cost.forward.workspace_bytes < 2 * 8192 * 7168 * 2


def test_merging_saves_launches_and_reads_of_the_input() -> None:
    apart, merged = (
        provider_cost("qkv_merge", provider, SHAPES["qkv_merge"], "bfloat16") for provider in ("eager", "merged")
    )
    x = 4096 * 2048 * 2
    assert apart.forward.bytes_read - merged.forward.bytes_read == 2 * x
    assert (apart.forward.launches, merged.forward.launches) == (3, 1)
    assert apart.forward.flops == merged.forward.flops == 2 * 4096 * 2048 * 5120


def test_absorbing_costs_more_where_sequences_are_trained() -> None:
    """Per pair and head 2·(192 + 128) flops expanded and 2·(576 + 512) absorbed: 3.4 times as many."""
    expanded, absorbed = (
        provider_cost("mla", provider, {**SHAPES["mla"], "T": 65536}, "bfloat16") for provider in ("eager", "absorbed")
    )
    ratio = absorbed.forward.flops / expanded.forward.flops
    assert ratio == pytest.approx((576 + 512) / (192 + 128), rel=0.02)


@pytest.mark.parametrize(
    ("op", "constants", "found"),
    [
        ("rms_norm", {"form": "cast-then-scale"}, ["liger"]),
        ("rms_norm", {"form": "rounded-offset"}, []),
        ("swiglu", {"form": "split", "gate": "silu"}, ["liger"]),
        ("swiglu", {"form": "split", "gate": "situ"}, []),
        ("rope", {"form": "interleaved"}, []),
        ("attention_residual", {"form": "scored"}, ["liger", "fla"]),
        ("moe_layer", {"gate": "silu", "biased": True, "transposed": False, "split": "halves"}, []),
        ("router", {}, []),
    ],
)
def test_a_library_stands_beside_what_it_computes(op: str, constants: dict[str, object], found: list[str]) -> None:
    assert [library.provider for library in libraries((op,), constants)] == found


def test_a_library_stands_beside_several_operators_where_it_has_them_all() -> None:
    for rule in ("kda", "gated_delta"):
        assert libraries(("short_conv", rule, "gated_rms_norm"), {"form": "channels"}) == (FLA,)
    assert libraries(("short_conv", "linear_cross_entropy"), {}) == ()


def test_libraries_say_which_version_was_read() -> None:
    assert "liger-kernel 0.8.5" in LIGER.source and "fla-core 0.6.0" in FLA.source
    assert LIGER.not_installable.startswith("not installable")


def test_unknown_operators_are_named() -> None:
    for arguments, code in (
        (("fft", "eager", {}, "bfloat16"), "kernel/unknown-operator"),
        (("swiglu", "tvm", SHAPES["swiglu"], "bfloat16"), "kernel/unknown-provider"),
        (("swiglu", "fla", SHAPES["swiglu"], "bfloat16"), "kernel/unknown-provider"),
        (("kda", "eager", SHAPES["kda"], "bfloat16"), "kernel/unknown-provider"),
        (("swiglu", "eager", SHAPES["swiglu"], "int8"), "kernel/unknown-dtype"),
    ):
        with pytest.raises(KernelError) as error:
            provider_cost(*arguments)
        assert error.value.code == code
