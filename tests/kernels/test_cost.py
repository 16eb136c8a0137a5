"""Counted work against closed forms, floors and real launches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.kernels.add_rms_norm.cost import cost as add_cost
from shardwright.kernels.registry import OPERATORS, operator
from shardwright.kernels.rms_norm.cost import cost

H200_BYTES_PER_S = 4.3e12


def test_floors_of_the_stated_case() -> None:
    """T 16384, H 7168, bf16: 0.109 ms forward, 0.164 backward; with the residual 0.218 each."""
    norm, added = (f(16384, 7168, "bfloat16") for f in (cost, add_cost))
    assert norm.backward is not None and added.backward is not None
    passes = (norm.forward, norm.backward, added.forward, added.backward)
    floors = [p.floor_bytes / H200_BYTES_PER_S * 1e3 for p in passes]
    assert floors == pytest.approx([0.1092, 0.1639, 0.2185, 0.2185], abs=1e-4)


@given(
    T=st.integers(0, 1 << 20),
    H=st.integers(1, 8192),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    learns=st.booleans(),
)
def test_no_pass_moves_less_than_its_floor(T: int, H: int, dtype: str, learns: bool) -> None:
    for function in (cost, add_cost):
        found = function(T, H, dtype, weight_gradient=learns)
        assert found.backward is not None
        for p in (found.forward, found.backward):
            assert p.bytes_read + p.bytes_written >= p.floor_bytes
            assert p.flops >= p.floor_flops


def test_a_frozen_weight_needs_one_launch_and_no_workspace() -> None:
    frozen, learning = cost(4096, 576, "bfloat16"), cost(4096, 576, "bfloat16", weight_gradient=True)
    assert frozen.backward is not None and learning.backward is not None
    assert (frozen.backward.launches, frozen.backward.workspace_bytes) == (1, 0)
    assert (learning.backward.launches, learning.backward.workspace_bytes) == (2, 264 * 576 * 4)


def test_only_rstd_is_saved() -> None:
    assert cost(1000, 576, "bfloat16").saved_bytes == 4000
    assert add_cost(1000, 576, "bfloat16").saved_bytes == 4000


EVERY = [(name, at) for name, entry in OPERATORS.items() for at in range(1 + len(entry.more_suites))]


@pytest.mark.parametrize(("name", "at"), EVERY)
def test_every_pass_is_counted_and_moves_no_less_than_its_floor(name: str, at: int) -> None:
    """Flops, bytes, launches and what is kept, at every benchmark size; no tokens cost nothing below zero."""
    pytest.importorskip("triton", reason="suites name triton kernels")
    suite = operator(name).load_suites()[at]
    for case in suite.bench:
        found = suite.cost(**case.shape, dtype=str(case.dtype).rpartition(".")[2])
        assert found.op == name and found.provider == "shardwright" and found.backward is not None
        for p in (found.forward, found.backward):
            assert p.launches > 0 and p.bytes_read > 0 and p.bytes_written > 0
            assert p.bytes_read + p.bytes_written >= p.floor_bytes and p.flops >= p.floor_flops
        assert max(found.forward.floor_bytes, found.forward.floor_flops) > 0
    for shape in suite.small_shapes:
        suite.cost(**shape, dtype="float32")


SIZES = {
    "128e8": (8192, 8, 128, 2048, 768),
    "896e16": (8192, 16, 896, 2048, 2048),
    "k3-ep64": (65534, 1, 14, 3584, 3072),
}
"""Metadata in one launch after the ranks, in three, and none: rows that were received."""


@pytest.mark.parametrize("r", [0, 16])
@pytest.mark.parametrize("name", SIZES)
def test_launches_of_experts_are_those_that_happen(name: str, r: int) -> None:
    """Experts are kernels of ours only: counted launches are the recorded ones, forward and backward.

    With learning routing weights too: their gradient rides on the sum to tokens.
    """
    pytest.importorskip("triton", reason="launches are triton's")
    from shardwright.kernels.grouped_lora_mlp.cost import cost as grouped_cost
    from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp
    from shardwright.kernels.launched import meta, recorded
    from shardwright.kernels.moe_layer.cost import cost as moe_cost
    from shardwright.kernels.moe_layer.op import moe_layer

    T, K, E, H, I = SIZES[name]
    up = low = None
    if r:
        shapes = ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r))
        a, b, c, d = (meta(shape, learns=True) for shape in shapes)
        up, low = Adapter(a, b, 0.5), Adapter(c, d, 0.5)
    x, stacks = meta((T, H), learns=True), (meta((E, 2 * I, H)), meta((E, H, I)))
    forward: list[str] = []
    backward: list[str] = []
    with recorded(log=forward):
        if name == "k3-ep64":
            found = grouped_cost(T, E, H, I, "bfloat16", r=r)
            y = grouped_lora_mlp(x, meta((E,), torch.int32), *stacks, up=up, low=low)
        else:
            found = moe_cost(T, K, E, H, I, "bfloat16", r=r)
            y = moe_layer(x, meta((T, K), torch.int64), meta((T, K), learns=True), *stacks, up=up, low=low)
    with recorded(log=backward):
        y.backward(torch.empty_like(y))
    assert found.backward is not None
    assert (found.forward.launches, found.backward.launches) == (len(forward), len(backward)), (forward, backward)
