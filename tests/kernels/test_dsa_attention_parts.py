"""What stands around sparse attention: the gate over dense attention, the choice between both, context parallelism.

Legend: T tokens, H heads, D, V widths, K selected keys.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter")

if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from shardwright.kernels.dsa.attention.choose import MEASURED, between, choose, crossover, times  # noqa: E402
from shardwright.kernels.dsa.attention.context import gather_keys  # noqa: E402
from shardwright.kernels.dsa.attention.reference import dsa_attention_reference  # noqa: E402
from shardwright.kernels.dsa.attention.visibility import bounds_of  # noqa: E402
from shardwright.kernels.dsa.dense import gated_mla_attention, sigmoid_gate  # noqa: E402
from shardwright.kernels.verify import relative_error  # noqa: E402
from shardwright.schemas.errors import KernelError  # noqa: E402


@outside
def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("../test_dsa_attention_parts.py")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gate_is_as_near_to_fp64_as_eagers(dtype: torch.dtype) -> None:
    """Saturated gates too: 1 - σ is not a difference of near numbers."""
    o, gate = normal(37, 3, 8).to(dtype), (normal(37, 3, 8, seed=1) * 12).to(dtype)
    dy = normal(37, 3, 8, seed=2).to(dtype)

    def run(call: Callable[[Tensor, Tensor], Tensor], kind: torch.dtype) -> list[Tensor]:
        leaves = [x.to(kind).requires_grad_() for x in (o, gate)]
        y = call(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(kind))]

    found = run(sigmoid_gate, dtype)
    eager, exact = (run(lambda o, z: o * torch.sigmoid(z), kind) for kind in (dtype, torch.float64))
    for value, plain, truth in zip(found, eager, exact, strict=True):
        assert relative_error(value, truth) <= 1.25 * relative_error(plain, truth) + 5e-7


@inside
def test_gated_dense_attention_of_packed_documents() -> None:
    """Against a causal mask over both documents, in fp64, all gradients."""
    T, H, D, V, cut = 9, 2, 12, 8, 4
    leaves = [normal(*s, seed=n).requires_grad_() for n, s in enumerate(((T, H, D), (T, H, D), (T, H, V), (T, H, V)))]
    y = gated_mla_attention(*leaves, scale=0.3, cu_seqlens=[0, cut, T])
    dy = normal(T, H, V, seed=9)
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    at = torch.arange(T)
    mask = (at[None] <= at[:, None]) & ((at[None] < cut) == (at[:, None] < cut))
    q, k, v = (x.transpose(0, 1) for x in wide[:3])
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(0, 1) * torch.sigmoid(wide[3])
    exact = [o.detach(), *torch.autograd.grad(o, wide, dy.double())]
    assert max(relative_error(a, b) for a, b in zip(found, exact, strict=True)) < 2e-6


@outside
def test_bad_input_of_the_dense_door_is_refused() -> None:
    q, v = torch.ones(4, 2, 8), torch.ones(4, 2, 4)
    for call, code in (
        (lambda: gated_mla_attention(q, q[:2], v, None, scale=1.0), "wrong-shape"),
        (lambda: gated_mla_attention(q, q, v, None, scale=1.0, cu_seqlens=[0, 3, 2, 4]), "cu-seqlens-unsorted"),
        (lambda: gated_mla_attention(q, q, v, v.bfloat16(), scale=1.0), "dtype-mixed"),
        (lambda: gated_mla_attention(q, q, v, v[:2], scale=1.0), "wrong-shape"),
        (lambda: gather_keys(q[0], v, None), "wrong-shape"),  # type: ignore[arg-type]
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == f"kernel/{code}"


H200 = "NVIDIA H200"


@outside
def test_dense_is_chosen_where_it_is_the_same_function_or_faster() -> None:
    same = choose(2048, 2048, H200, training=True)
    assert same.path == "dense" and "same function" in same.reason
    other = choose(2049, 2048, H200, training=True)
    assert other.path == "sparse" and "another function" in other.reason
    seen = MEASURED[H200]
    short, dense = choose(8192, 2048, H200, training=True, dense_is_meant=True), sum(seen.dense[8192])
    assert (
        short.path == "dense"
        and short.dense_ms == pytest.approx(dense, abs=1e-3)
        and f"{dense:.3g} ms dense" in short.reason
    )
    long, sparse = choose(32_768, 2048, H200, training=True, dense_is_meant=True), sum(seen.sparse[32_768])
    assert long.path == "sparse" and long.sparse_ms == pytest.approx(sparse + seen.indexer[32_768], abs=1e-3)
    unknown = choose(8192, 2048, "another device", training=True, dense_is_meant=True)
    assert unknown.path == "sparse" and "no times were measured" in unknown.reason


@outside
@pytest.mark.parametrize("training", [True, False])
def test_the_crossover_is_where_the_times_cross(training: bool) -> None:
    T = crossover(H200, training=training)
    before, after = (times(MEASURED[H200], at, training) for at in (T - 1024, T))
    assert before[0] <= before[1] and after[0] > after[1]
    assert 16_384 < T < 131_072


@outside
@given(st.integers(1024, 200_000))
def test_measured_points_lie_on_the_curve(T: int) -> None:
    square = {t: 1e-8 * t * t for t in (4096, 8192, 32_768)}
    assert between(square, T) == pytest.approx(1e-8 * T * T)
    assert between({8192: 2.0}, 16_384) == 4.0


RANKS, T, H, V, R, S = 2, 5, 2, 8, 4, 10
SIZES = ((S, H, V), (S, H, R), (S, V), (S, R))


def whole_problem() -> tuple[list[Tensor], Tensor, Tensor]:
    leaves = [normal(*size, seed=n).double().requires_grad_() for n, size in enumerate(SIZES)]
    index = torch.stack([torch.randperm(S, generator=torch.Generator().manual_seed(t))[:4] for t in range(S)])
    return leaves, index.to(torch.int32), normal(S, H, V, seed=8).double()


def one_rank(rank: int, folder: str) -> None:
    """Its run of queries and keys; saves output and gradients."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    leaves, index, dy = whole_problem()
    run = slice(rank * T, (rank + 1) * T)
    own = [leaf.detach()[run].clone().requires_grad_() for leaf in leaves]
    latent, k_rope = gather_keys(own[2], own[3], dist.group.WORLD)
    bounds = bounds_of(T, "cpu", [0, 4, S], first_query=rank * T, keys=S)
    o, _ = dsa_attention_reference(own[0], own[1], latent, k_rope, index[run], scale=0.3, bounds=bounds)
    found = torch.autograd.grad(o, own, dy[run])
    torch.save([o.detach(), *found], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@outside
@pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file")
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    """Each gathers all keys; a key's gradient is summed over the queries of both."""
    context = mp.spawn(one_rank, args=(str(tmp_path),), nprocs=RANKS, join=False)
    for _ in range(12):
        if context.join(timeout=10):
            break
    else:
        [process.kill() for process in context.processes]
        pytest.fail("the ranks did not end within two minutes")
    leaves, index, dy = whole_problem()
    bounds = bounds_of(S, "cpu", [0, 4, S])
    o, _ = dsa_attention_reference(*leaves, index, scale=0.3, bounds=bounds)
    exact = [o, *torch.autograd.grad(o, leaves, dy)]
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for at, truth in enumerate(exact):
        torch.testing.assert_close(torch.cat([part[at] for part in parts]), truth, rtol=1e-6, atol=1e-7)
