"""The router: choice, weights, statistics and gradient, under the interpreter (own process) and on a device.

Legend: T tokens, E experts, k chosen experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from shardwright.kernels.router.contract import check_static
from shardwright.kernels.router.cost import cost
from shardwright.kernels.router.reference import choose, router_reference
from shardwright.schemas.errors import KernelError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter")

if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from shardwright.kernels.router import cases  # noqa: E402
from shardwright.kernels.router.op import router  # noqa: E402
from shardwright.kernels.verify import verify_case  # noqa: E402

SHARED = dict(scoring="softmax", groups=1, groups_kept=1, group_score="top2", scale=1.0)
V3 = dict(scoring="sigmoid", groups=8, groups_kept=4, scale=2.5)


@outside
def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("../test_router.py")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_hand(row: list[float], k: int) -> list[int]:
    """The k best by comparing (score, index) pairs in plain Python."""
    return sorted(range(len(row)), key=lambda at: (-row[at], at))[:k]


@inside
@pytest.mark.parametrize("shape", cases.SUITE.small_shapes, ids=str)
def test_error_is_no_larger_than_eagers(shape: dict[str, int]) -> None:
    """Weights, choice, counts, mean probability and dlogits; poisoned memory; no tokens too."""
    found = [r for dtype in (torch.float32, torch.bfloat16) for r in verify_case(cases.SUITE, shape, dtype, "cpu")]
    assert len(found) == 10
    assert [result for result in found if not result.ok] == []


@inside
def test_ties_go_to_the_lower_index_every_time() -> None:
    """C10: equal logit bits across the k boundary, groups of equal value, twenty runs."""
    logits = torch.zeros(2, 64)
    logits[0, [7, 20, 41, 63]] = 1.0
    runs = [router(logits, k=6) for _ in range(20)]
    assert runs[0].experts.tolist() == [[7, 20, 41, 63, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    grouped = router(torch.zeros(1, 64), k=4, scoring="sigmoid", groups=8, groups_kept=2)
    assert grouped.experts.tolist() == [[0, 1, 2, 3]]


@inside
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_choice_is_that_of_fp32_scores(scoring: str) -> None:
    """C11: scores rounded to bf16 would choose other experts; ours are those of fp64."""
    logits = normal(24, 896)
    exact = router_reference(logits.double(), k=16, scoring=scoring)[1]
    assert torch.equal(router(logits, k=16, scoring=scoring).experts, exact)
    wide = normal(2048, 896)
    score = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    rounded = choose(score.bfloat16().float(), 16).sort(-1).values
    assert (rounded != choose(score, 16).sort(-1).values).any(-1).float().mean() > 0.03


@inside
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("E", "k"), [(128, 8), (896, 16), (896, 22), (5, 2), (896, 5), (64, 6), (1, 1)])
def test_bias_picks_and_the_unbiased_score_weighs(E: int, k: int, scoring: str) -> None:
    """C12, against the formula written out in fp64."""
    logits, bias = normal(2, E), normal(E, seed=1) * (0.5 if scoring == "sigmoid" else 0.5 / E)
    found = router(logits, bias, k=k, scoring=scoring, scale=2.5)
    score, near = (v.sigmoid() if scoring == "sigmoid" else v.softmax(-1) for v in (logits.double(), logits))
    assert found.experts.tolist() == [by_hand(row, k) for row in (near + bias).tolist()]
    picked = score.gather(1, found.experts)
    torch.testing.assert_close(found.weights.double(), 2.5 * picked / picked.sum(-1, keepdim=True), rtol=1e-6, atol=0)


@inside
def test_groups_of_equal_value_keep_the_lower_ones() -> None:
    """C10 for groups: values tie across the border between kept and dropped, with and without a bias."""
    logits = torch.zeros(1, 32)
    logits[0, [9, 13, 21, 30]] = 2.0
    for bias in (None, torch.zeros(32)):
        for group_score in ("max", "top2"):
            found = router(logits, bias, k=3, scoring="sigmoid", groups=4, groups_kept=2, group_score=group_score)
            assert found.experts.tolist() == [[9, 13, 21]]


@inside
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_renormalise_and_scale(renormalise: bool, scale: float) -> None:
    logits = normal(3, 60)
    found = router(logits, k=4, scoring="softmax", renormalise=renormalise, scale=scale)
    picked = logits.double().softmax(-1).gather(1, found.experts)
    exact = scale * (picked / picked.sum(-1, keepdim=True) if renormalise else picked)
    torch.testing.assert_close(found.weights.double(), exact, rtol=1e-6, atol=0)


@inside
def test_close_scores_keep_their_real_order() -> None:
    """C13: neighbours one fp32 step apart, best last; padding lanes are never chosen."""
    E = 896
    steps = torch.arange(E, dtype=torch.int32) + torch.tensor(1.0).view(torch.int32)
    rising = steps.view(torch.float32)[None]
    assert router(rising, k=5).experts.tolist() == [[895, 894, 893, 892, 891]]
    low = torch.full((1, E), -200.0)
    assert router(low, k=5, scoring="sigmoid").experts.tolist() == [[0, 1, 2, 3, 4]]
    none = torch.full((1, 60), float("-inf"))
    none[0, 9] = 0.0
    assert router(none, k=4).experts.tolist() == [[9, 0, 1, 2]]


@inside
def test_groups_are_those_of_deepseek() -> None:
    """The published rule, written with torch.topk, on rows without ties."""
    logits, bias = normal(16, 256), normal(256, seed=2) * 0.1
    found = router(logits, bias, k=8, **V3)
    score = logits.sigmoid() + bias
    value = score.view(16, 8, 32).topk(2, dim=-1)[0].sum(-1)
    kept = torch.zeros(16, 8).scatter_(1, value.topk(4, dim=-1)[1], 1.0).repeat_interleave(32, 1)
    assert torch.equal(found.experts, score.masked_fill(kept == 0, float("-inf")).topk(8, dim=-1)[1])


@inside
def test_statistics_count_every_choice() -> None:
    logits = normal(37, 60)
    found = router(logits, k=4)
    assert torch.equal(found.counts.long(), torch.bincount(found.experts.flatten(), minlength=60))
    torch.testing.assert_close(found.mean_probability, logits.softmax(-1).mean(0), rtol=1e-6, atol=1e-9)


@inside
def test_nan_row_is_loud_and_alone() -> None:
    logits = normal(3, 60)
    clean = router(logits, k=4)
    logits[1, 17] = float("nan")
    found = router(logits, k=4)
    assert found.weights[1].isnan().all()
    assert found.experts[1, 0] == 17 and len(set(found.experts[1].tolist())) == 4
    assert torch.equal(found.weights[[0, 2]], clean.weights[[0, 2]])


@inside
def test_no_tokens_and_stride_zero_gradient() -> None:
    empty = torch.zeros(0, 64, requires_grad=True)
    found = router(empty, k=4)
    assert found.weights.shape == (0, 4) and found.counts.sum() == 0 and found.mean_probability.abs().sum() == 0
    found.weights.sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 64)
    logits = normal(5, 64).requires_grad_()
    (expanded,) = torch.autograd.grad(router(logits, k=4, renormalise=False).weights.sum(), logits)
    found = router(logits, k=4, renormalise=False)
    (real,) = torch.autograd.grad(found.weights, logits, torch.ones(5, 4))
    assert torch.equal(expanded, real) and real.abs().sum() > 0


@inside
def test_compiled_graph_gives_the_same_bits() -> None:
    logits = normal(4, 64).requires_grad_()
    traced = torch.compile(lambda x: router(x * 1.0, k=4).weights.pow(2).sum(), fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(router(logits, k=4).weights.pow(2).sum(), logits)
    assert torch.equal(torch.autograd.grad(traced(logits), logits)[0], ours)


@outside
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"k": 0}, "bad-top-k"),
        ({"k": 33}, "bad-top-k"),
        ({"k": 20, "groups": 4, "groups_kept": 1}, "bad-top-k"),
        ({"groups": 3}, "bad-groups"),
        ({"groups": 4, "groups_kept": 5}, "bad-groups"),
        ({"groups": 64, "groups_kept": 8}, "bad-groups"),
        ({"group_score": "mean"}, "bad-groups"),
        ({"scoring": "tanh"}, "bad-scoring"),
        ({"scale": float("nan")}, "bad-scale"),
    ],
)
def test_settings_are_refused(change: dict[str, object], code: str) -> None:
    with pytest.raises(KernelError) as error:
        check_static(torch.zeros(2, 64), None, **{**SHARED, "k": 4, **change})  # type: ignore[arg-type]
    assert error.value.code == f"kernel/{code}"


@outside
@pytest.mark.parametrize(
    ("logits", "bias", "code"),
    [
        (torch.zeros(2, 64, dtype=torch.float64), None, "dtype-unsupported"),
        (torch.zeros(64), None, "wrong-shape"),
        (torch.zeros(2, 64), torch.zeros(63), "wrong-shape"),
        (torch.zeros(2, 1025), None, "too-many-experts"),
    ],
)
def test_tensors_are_refused(logits: torch.Tensor, bias: torch.Tensor | None, code: str) -> None:
    with pytest.raises(KernelError) as error:
        check_static(logits, bias, k=4, **SHARED)  # type: ignore[arg-type]
    assert error.value.code == f"kernel/{code}"


@outside
def test_cost_counts_the_logits_once() -> None:
    found = cost(8192, 896, 16, "float32")
    assert found.forward.floor_bytes == 8192 * 896 * 4 + 8192 * 16 * 12 + 896 * 8
    assert found.forward.workspace_bytes == 2112 * 896 * 4
    assert found.backward is not None and found.backward.bytes_written == 8192 * 896 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("E", "k"), [(896, 16), (896, 22), (256, 8), (128, 8)])
def test_on_device_choice_is_exact_and_repeats(E: int, k: int) -> None:
    settings, biased = cases.SETTINGS[E, k]
    logits, bias = normal(4099, E).cuda(), cases.bias_of(E, "cuda") if biased else None
    given = settings._asdict()
    found, again = router(logits, bias, **given), router(logits, bias, **given)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    exact = router_reference(logits.double(), bias, **given)[1]
    assert (found.experts != exact).any(-1).sum() <= 2, "only a tie within one fp32 step may differ"
