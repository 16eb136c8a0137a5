"""Head and cross-entropy: loss, gradients, labels, memory; interpreted (own process) and on a device.

Legend: T tokens, H hidden, V vocabulary, r LoRA rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from shardwright.kernels.linear_cross_entropy import configs, contract
from shardwright.kernels.linear_cross_entropy.cost import cost
from shardwright.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from shardwright.schemas.errors import KernelError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter")
on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from shardwright.kernels.linear_cross_entropy import cases, labels  # noqa: E402
from shardwright.kernels.linear_cross_entropy.chunks import over_vocabulary  # noqa: E402
from shardwright.kernels.linear_cross_entropy.op import linear_cross_entropy  # noqa: E402
from shardwright.kernels.timing import median_ms, peak_bytes  # noqa: E402
from shardwright.kernels.verify import poisoned_memory, relative_error, verify_case, verify_repeats  # noqa: E402


@outside
def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("../test_linear_cross_entropy.py")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def problem(T: int = 13, H: int = 24, V: int = 301) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = normal(T, H).requires_grad_(), normal(V, H, seed=1) * 0.3
    targets = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(2))
    targets[3] = -100
    return x, weight, targets


@inside
@pytest.mark.parametrize("lora", [False, True])
def test_error_is_no_larger_than_eagers(lora: bool) -> None:
    """Loss, dx and LoRA's gradients; all dtypes, small and odd vocabularies, poisoned memory, same bits."""
    suite = cases.LORA_SUITE if lora else cases.SUITE
    found = [
        r for shape in suite.small_shapes for dtype in suite.dtypes for r in verify_case(suite, shape, dtype, "cpu")
    ]
    found.append(verify_repeats(suite, suite.small_shapes[0], torch.bfloat16, "cpu"))
    assert len(found) == (2, 4)[lora] * 12 + 1
    assert [result for result in found if not result.ok] == []


def one_after_another(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product whose sums grow term by term in fp32, as one thread of a plain device product adds them."""
    total = torch.zeros(left.shape[0], right.shape[1])
    for at in range(left.shape[1]):
        total += left[:, at : at + 1] * right[at : at + 1]
    return total


@inside
def test_fp32_products_over_the_vocabulary_add_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the label's own term every later addition rounds at its step; pieces keep such runs short.

    T 4, V 32,768: with a term-by-term product the error of dx halves at least when the vocabulary is cut.
    """
    V, H = 32_768, 8
    gradient = torch.rand((4, V), generator=torch.Generator().manual_seed(3)) * 2 / V
    gradient[:, 5] -= 1
    weight = normal(V, H, seed=4)
    exact = gradient.double() @ weight.double()

    def mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(one_after_another(left, right))

    def addmm(to: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(to + one_after_another(left, right))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    errors = {}
    for block in (V, 2048):
        monkeypatch.setattr(configs, "VOCABULARY_BLOCK", block)
        errors[block] = relative_error(over_vocabulary(gradient, weight, torch.empty(4, H)), exact)
    assert errors[2048] < 0.5 * errors[V]


@outside
@pytest.mark.parametrize("V", [1, 8191, 8192, 8193, 163_840])
def test_pieces_cover_the_vocabulary_once(V: int) -> None:
    pieces = configs.vocabulary_pieces(V, 4)
    assert [at for start, stop in pieces for at in (start, stop)][1:-1:2] == [start for start, _ in pieces[1:]]
    assert pieces[0][0] == 0 and pieces[-1][1] == V and all(stop - start <= 8192 for start, stop in pieces)
    assert configs.vocabulary_pieces(V, 2) == ((0, V),)


@inside
def test_a_stride_zero_gradient_equals_ones() -> None:
    """D6: ``loss.sum().backward()`` sends an expanded gradient."""
    x, weight, targets = problem()
    (expanded,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets, reduction="none").sum(), x)
    rows = linear_cross_entropy(x, weight, targets, reduction="none")
    (real,) = torch.autograd.grad(rows, x, torch.ones(13))
    assert torch.equal(expanded, real) and real.abs().sum() > 0


@inside
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_bytes", [1, 4096, 1 << 30])
def test_lora_on_the_head_in_any_chunks(reduction: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, a few rows, all rows at once: loss, dx, dA and dB are those of fp64."""
    monkeypatch.setattr(configs, "CHUNK_BYTES", chunk_bytes)
    x, weight, targets = problem()
    a, b = (normal(4, 24, seed=3) * 0.2).requires_grad_(), (normal(301, 4, seed=4) * 0.2).requires_grad_()
    with poisoned_memory():
        loss = linear_cross_entropy(x, weight, targets, a, b, lora_scale=0.5, reduction=reduction)
        found = torch.autograd.grad(loss, (x, a, b))
    wide = [t.detach().double().requires_grad_() for t in (x, a, b)]
    exact = linear_cross_entropy_reference(
        wide[0], weight.double(), targets, wide[1], wide[2], lora_scale=0.5, reduction=reduction
    )
    truth = torch.autograd.grad(exact, wide)
    assert relative_error(loss, exact) < 1e-6
    assert all(relative_error(g, t) < 2e-6 for g, t in zip(found, truth, strict=True))


@inside
def test_unreduced_loss_weighs_every_row() -> None:
    """D9: the incoming gradient of row 0 is 0; the others still count, each with its own weight."""
    x, weight, targets = problem(T=4)
    targets[3] = -100
    incoming = torch.tensor([0.0, 1.0, 2.0, 3.0])
    (found,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets, reduction="none"), x, incoming)
    (truth,) = torch.autograd.grad(F.cross_entropy(x @ weight.t(), targets, reduction="none"), x, incoming)
    torch.testing.assert_close(found, truth, rtol=2e-5, atol=1e-7)
    assert found[0].abs().sum() == 0 and found[3].abs().sum() == 0 and found[1].abs().sum() > 0


@inside
def test_vocabulary_smaller_than_a_block_and_loss_twice() -> None:
    """D10: V = 3; the second loss from the same tensors is the first, and the inputs keep their bits."""
    x, weight = normal(4, 16).requires_grad_(), normal(3, 16, seed=1)
    targets = torch.tensor([0, 2, 1, 2])
    kept = x.detach().clone(), weight.clone()
    first, second = linear_cross_entropy(x, weight, targets), linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(first, F.cross_entropy(x @ weight.t(), targets), rtol=1e-6, atol=0)
    assert first > 0.01 and torch.equal(first, second)
    first.backward()
    assert torch.equal(x.detach(), kept[0]) and torch.equal(weight, kept[1])


@inside
def test_given_token_count_is_the_divisor() -> None:
    """Two micro-batches divided by their common count add up to the loss and gradient of the whole."""
    x, weight, targets = problem()
    tokens = (targets != -100).sum()
    halves = [linear_cross_entropy(x[s], weight, targets[s], tokens=tokens) for s in (slice(0, 6), slice(6, 13))]
    whole = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(sum(halves), whole, rtol=1e-6, atol=0)
    (parts,) = torch.autograd.grad(halves[0] + halves[1], x)
    torch.testing.assert_close(parts, torch.autograd.grad(whole, x)[0], rtol=1e-4, atol=1e-7)


@inside
def test_no_counting_token() -> None:
    """As torch defines it: a mean over nothing is NaN with gradient 0, a sum is 0; zero rows too."""
    x, weight, targets = problem()
    none = torch.full_like(targets, -100)
    for reduction, expected in (("mean", float("nan")), ("sum", 0.0)):
        loss = linear_cross_entropy(x, weight, none, reduction=reduction)
        assert loss.isnan() if expected != expected else loss == expected
        assert torch.autograd.grad(loss, x)[0].abs().sum() == 0
    empty = torch.zeros(0, 24, requires_grad=True)
    loss = linear_cross_entropy(empty, weight, targets[:0], reduction="sum")
    assert loss == 0 and torch.autograd.grad(loss, empty)[0].shape == (0, 24)


@inside
@pytest.mark.parametrize("label", [301, -1, -101, 1 << 40])
def test_label_out_of_range_is_typed(label: int) -> None:
    x, weight, targets = problem()
    targets[5] = label
    with pytest.raises(KernelError, match=f"first is {label} in row 5") as error:
        linear_cross_entropy(x, weight, targets)
    assert error.value.code == "kernel/label-out-of-range"


@inside
def test_nan_stays_in_its_row_and_extremes_are_finite() -> None:
    x, weight, targets = problem()
    with torch.no_grad():
        x[2, 0] = float("nan")
    rows = linear_cross_entropy(x, weight, targets, reduction="none")
    assert rows.isnan().nonzero().flatten().tolist() == [2]
    (dx,) = torch.autograd.grad(rows, x, torch.ones(13))
    assert dx.isnan().any(-1).nonzero().flatten().tolist() == [2]
    huge = torch.full((2, 24), 1e4, requires_grad=True)
    loss = linear_cross_entropy(huge, weight, targets[:2])
    torch.testing.assert_close(loss, F.cross_entropy(huge @ weight.t(), targets[:2]), rtol=1e-5, atol=0)
    assert torch.autograd.grad(loss, huge)[0].isfinite().all()


@inside
def test_leading_axes_and_compiled_graph() -> None:
    x, weight, targets = problem(T=12)
    (flat,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets), x)
    folded = x.detach().reshape(3, 4, 24).requires_grad_()
    (found,) = torch.autograd.grad(linear_cross_entropy(folded, weight, targets.reshape(3, 4)), folded)
    assert torch.equal(found.reshape(12, 24), flat)
    traced = torch.compile(
        lambda t: linear_cross_entropy(t * 1.0, weight, targets), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(torch.autograd.grad(traced(x), x)[0], flat)


def static(**change: object) -> None:
    given: dict[str, object] = {
        "x": torch.zeros(2, 8),
        "weight": torch.zeros(5, 8),
        "targets": torch.zeros(2, dtype=torch.int64),
        "lora_a": None,
        "lora_b": None,
        "lora_scale": 1.0,
        "reduction": "mean",
    }
    contract.check_static(**{**given, **change})  # type: ignore[arg-type]


@outside
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"weight": torch.zeros(5, 8, dtype=torch.bfloat16)}, "dtype-mixed"),
        ({"targets": torch.zeros(2, dtype=torch.int32)}, "dtype-unsupported"),
        ({"weight": torch.zeros(5, 7)}, "wrong-shape"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "wrong-shape"),
        ({"reduction": "median"}, "bad-reduction"),
        ({"weight_learns": True}, "weight-learns"),
        ({"lora_a": torch.zeros(2, 8)}, "lora-incomplete"),
        ({"lora_a": torch.zeros(2, 8), "lora_b": torch.zeros(5, 3)}, "wrong-shape"),
        ({"lora_a": torch.zeros(2, 8), "lora_b": torch.zeros(5, 2), "lora_scale": float("inf")}, "bad-scale"),
        (
            {"lora_a": torch.zeros(2, 8), "lora_b": torch.zeros(5, 2), "reduction": "none", "lora_learns": True},
            "reduction-unsupported",
        ),
        ({"tokens": torch.ones(2)}, "wrong-shape"),
        ({"tokens": torch.ones(()), "reduction": "sum"}, "bad-reduction"),
    ],
)
def test_inputs_are_refused(change: dict[str, object], code: str) -> None:
    static()
    with pytest.raises(KernelError) as error:
        static(**change)
    assert error.value.code == f"kernel/{code}"


@outside
def test_workspace_is_bounded_at_the_largest_head() -> None:
    """Logits of a chunk and dx stay within 0.5 GiB at T 8192, H 7168, V 163,840."""
    found = cost(8192, 7168, 163_840, "bfloat16")
    assert configs.chunk_rows(8192, 163_840, 2) == 1152
    assert found.forward.workspace_bytes + found.saved_bytes < 512 * 1024**2
    assert found.forward.floor_flops == 2 * 2 * 8192 * 7168 * 163_840


@outside
@pytest.mark.parametrize("T", [0, 1, 127, 128, 8192])
@pytest.mark.parametrize("V", [3, 301, 163_840, 10_000_000])
def test_chunks_fit_and_are_whole_tiles(T: int, V: int) -> None:
    rows = configs.chunk_rows(T, V, 2)
    assert rows >= 1
    assert rows == 1 or rows * configs.stride(V) * 2 <= configs.CHUNK_BYTES
    assert rows >= T or rows < configs.TILE_ROWS or rows % configs.TILE_ROWS == 0


@outside
@pytest.mark.parametrize("r", [0, 16])
def test_cost_counts_lora_once(r: int) -> None:
    bare, found = cost(8192, 7168, 163_840, "bfloat16"), cost(8192, 7168, 163_840, "bfloat16", r=r)
    low = 6 * 8192 * r * (7168 + 163_840)
    assert found.forward.floor_flops - bare.forward.floor_flops == low
    assert low < 0.01 * bare.forward.floor_flops, "LoRA on the head is a hundredth of the products"
    assert found.forward.bytes_read + found.forward.bytes_written >= found.forward.floor_bytes
    assert found.saved_bytes - bare.saved_bytes == r * (7168 + 163_840) * 4


@pytest.mark.gpu
@on_device
def test_on_device_time_and_memory_beside_the_products() -> None:
    """At most a tenth above the two matrix products alone, in half a GiB."""
    x = cases.inputs(cases.LARGE, torch.bfloat16, "cuda", 7)[0].requires_grad_()
    run = lambda: torch.autograd.grad(cases.fused(x)[0], x)  # noqa: E731
    assert peak_bytes(run) <= 512 * 1024**2
    assert median_ms(run) <= 1.10 * median_ms(lambda: cases.products_only(x.detach()))


@pytest.mark.gpu
@on_device
def test_on_device_bad_label_is_loud_now_and_typed_later() -> None:
    x = normal(4, 64).to("cuda", torch.bfloat16).requires_grad_()
    weight = normal(128, 64, seed=1).to("cuda", torch.bfloat16)
    loss = linear_cross_entropy(x, weight, torch.tensor([1, 2, 900, 3], device="cuda"))
    assert loss.isnan()
    with pytest.raises(KernelError, match="first is 900 in row 2"):
        labels.raise_pending(wait=True)
    labels.raise_pending(wait=True)
