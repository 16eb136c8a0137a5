"""The lightning indexer at full length on a device: exact for its own scores, bounded memory, equal bits.

Legend: T queries and keys.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

from shardwright.kernels.dsa.indexer import alarms, cases, configs, launches
from shardwright.kernels.dsa.indexer.op import default_scale, dsa_indexer
from shardwright.kernels.dsa.indexer.reference import scores_reference, select_reference
from shardwright.kernels.dsa.kl import cases as kl_cases
from shardwright.kernels.dsa.kl.op import dsa_kl
from shardwright.kernels.timing import peak_bytes
from shardwright.kernels.verify import relative_error
from shardwright.schemas.errors import KernelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

K, ROWS = 2048, 48


def drawn(T: int) -> tuple[Tensor, ...]:
    return cases.inputs({"T": T, "N": 64, "D": 128}, torch.bfloat16, "cuda", 3)


@pytest.mark.parametrize(("T", "bounds"), [(8192, (0, 100, 5000, 5000, 8192)), (8192, ()), (16_384, ()), (40_000, ())])
def test_choice_is_exact_for_its_own_scores(T: int, bounds: tuple[int, ...]) -> None:
    """Rows drawn from every chunk, against a stable sort of the scores that the kernel wrote; scores against fp64.

    At T 40,000 rows are longer than registers hold.
    """
    q, k, weights = drawn(T)
    lengths = torch.tensor(bounds) if bounds else None
    found = dsa_indexer(q, k, weights, top_k=K, cu_seqlens=lengths)
    alarms.raise_pending(wait=True)
    assert torch.equal(found, dsa_indexer(q, k, weights, top_k=K, cu_seqlens=lengths))
    place, scale = launches.place(T, T, 0, lengths, alarms.fresh(q)), default_scale(q)
    score = launches.scorer(q, k, weights, place, scale, K)
    for chunk in configs.chunks(T, 0):
        scores = torch.empty(chunk.rows * chunk.stride, device="cuda")
        score(chunk, scores)
        at = torch.randint(0, chunk.rows, (ROWS,), device="cuda")
        t, keys = at + chunk.first, torch.arange(min(chunk.stride, T), device="cuda")
        seen = keys[None] <= t[:, None]
        if place.starts is not None:
            seen &= keys[None] >= place.starts[t][:, None]
        own = torch.where(seen, scores.view(chunk.rows, chunk.stride)[at][:, : len(keys)], 0.0)
        # A query that takes all its keys has no score: any will do.
        own = torch.where(seen.sum(-1, keepdim=True) <= K, 0.0, own)
        assert torch.equal(found[t], select_reference(own, seen, K))
        many = t[seen.sum(-1) > K][:4]
        exact = scores_reference(q[many].double(), k[: len(keys)].double(), weights[many].double(), scale)
        mine = scores.view(chunk.rows, chunk.stride)[many - chunk.first][:, : len(keys)]
        live = seen[seen.sum(-1) > K][:4]
        assert len(many) == 0 or relative_error(mine[live], exact[live]) < 1e-5


def test_memory_is_linear_in_queries() -> None:
    """256 MiB of scores and the indices; a square of scores would be 4 GiB at T 32,768."""
    T = 32_768
    q, k, weights = drawn(T)
    peak = peak_bytes(lambda: dsa_indexer(q, k, weights, top_k=K))
    assert peak <= configs.SCORE_BYTES + 4 * T * K + (1 << 20)


def test_loss_memory_and_both_orders() -> None:
    """The sparse stage at T 8,192: workspace within bounds; dk by atomics near dk in a fixed order."""
    made = kl_cases.sparse_inputs(kl_cases.LARGE, torch.bfloat16, "cuda", 7)
    leaves = [x.clone().requires_grad_() for x in made[:3]]

    def run(deterministic: bool) -> tuple[Tensor, ...]:
        loss = dsa_kl(*leaves, *made[3:], attention_scale=kl_cases.attention_scale(576), deterministic=deterministic)
        return torch.autograd.grad(loss, leaves)

    gradients = 2 * made[0].numel() * made[0].element_size() + (64 << 20)
    assert peak_bytes(lambda: run(False)) <= configs.SCORE_BYTES + gradients
    fixed, again, atomics = run(True), run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(fixed, again, strict=True))
    assert all(relative_error(a, b) < 2e-3 for a, b in zip(atomics, fixed, strict=True))


def test_faults_are_raised_without_a_wait() -> None:
    """The call itself returns; the error comes with the next call once the device has answered."""
    q, k, weights = drawn(4096)
    q[3000, 5, 7] = float("nan")
    found = dsa_indexer(q, k, weights, top_k=K)
    torch.cuda.synchronize()
    with pytest.raises(KernelError, match="1 rows of scores hold NaN"):
        dsa_indexer(q, k, weights, top_k=K)
    assert found[3000].tolist() == list(range(K)), "NaN ranks highest, the smaller key first"
    alarms._pending.clear()
