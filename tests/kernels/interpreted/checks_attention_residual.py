"""Attention residuals in true bf16, fp16 and fp32. Runs under TRITON_INTERPRET=1.

Legend: T tokens, R rows, H hidden.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.kernels import interpreter

interpreter.install()

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "search_spaces"))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from operators_seen import Live  # noqa: E402

from shardwright.checkpoints.models.kimi_k3.residuals import ResidualMix  # noqa: E402
from shardwright.kernels.attention_residual import cases, tuning  # noqa: E402
from shardwright.kernels.attention_residual.contract import MAX_ROWS  # noqa: E402
from shardwright.kernels.attention_residual.op import attention_residual  # noqa: E402
from shardwright.kernels.registry import operator, source_sha256  # noqa: E402
from shardwright.kernels.verify import values, verify_case, verify_repeats  # noqa: E402
from shardwright.runtime.fuse import fusions_off, install_fusions  # noqa: E402
from shardwright.schemas.errors import LegalityError  # noqa: E402
from shardwright.schemas.fusion import FusionDecision  # noqa: E402

EPS = 1e-6
SUITES = operator("attention_residual").load_suites()


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(rows: list[Tensor], norm: Tensor, projection: Tensor, eps: float = EPS) -> Tensor:
    """Row by row in fp64, by the exponentials themselves less the largest."""
    wide = [row.double() for row in rows]
    direction = norm.double() * projection.double().reshape(-1)
    logits = torch.stack([row @ direction / (row.square().mean(-1) + eps).sqrt() for row in wide])
    grown = (logits - logits.amax(0)).exp()
    return sum(w.unsqueeze(-1) * row for w, row in zip(grown / grown.sum(0), wide, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: f"R{len(suite.input_names) - 2}")
@pytest.mark.parametrize("dtype", cases.SUITE.dtypes, ids=str)
def test_error_is_no_larger_than_eagers(suite: Any, dtype: torch.dtype) -> None:
    """All dtypes, odd sizes, zero tokens, NaN-poisoned memory; norm and projection learn."""
    results = [one for shape in suite.small_shapes for one in verify_case(suite, shape, dtype, "cpu")]
    assert [one for one in results if not one.ok] == []
    assert {one.value for one in results} >= {"y", "drow_0", "dnorm", "dprojection"}


def test_two_runs_give_the_same_bits() -> None:
    assert verify_repeats(SUITES[-1], {"T": 40, "R": 9, "H": 64}, torch.bfloat16, "cpu").ok


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, MAX_ROWS), tokens=st.integers(1, 9), hidden=st.integers(2, 70), seed=st.integers(0, 99))
def test_any_number_of_rows_equals_the_formula(rows: int, tokens: int, hidden: int, seed: int) -> None:
    """Value and every gradient in fp32 against fp64's own differentiation of another spelling."""
    given_rows = [draw(tokens, hidden, seed=seed + at) for at in range(rows)]
    weights = draw(hidden, seed=seed + 50), draw(1, hidden, seed=seed + 51) * hidden**-0.5
    dy = draw(tokens, hidden, seed=seed + 52)

    def all_of(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [one.to(dtype).requires_grad_() for one in (*given_rows, *weights)]
        y = function(leaves[:rows], leaves[rows], leaves[rows + 1], EPS)
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]

    for seen, wanted in zip(all_of(attention_residual, torch.float32), all_of(exact, torch.float64), strict=True):
        scale = max(float(wanted.detach().abs().max()), float(dy.abs().max()))
        assert float((seen.double() - wanted).abs().max()) < 2e-5 * scale


def test_one_row_is_its_own_mix_bit_for_bit() -> None:
    """And what flows back is what came: its weight is 1 whatever its logit."""
    row, norm, projection, dy = (
        draw(7, 96, dtype=torch.bfloat16),
        draw(96, seed=1),
        draw(96, seed=2),
        draw(7, 96, seed=3),
    )
    leaf = row.clone().requires_grad_()
    y = attention_residual([leaf], norm.bfloat16(), projection.bfloat16(), EPS)
    (gradient,) = torch.autograd.grad(y, leaf, dy.bfloat16())
    assert torch.equal(y, row) and torch.equal(gradient, dy.bfloat16())


def test_a_row_that_all_but_wins_and_rows_of_any_size() -> None:
    """Logits of some hundreds neither overflow nor spoil the mix; sizes of rows are in the mix, not in the weights."""
    rows = [draw(5, 64, seed=at) * 10.0**at for at in range(4)]
    norm, projection = torch.ones(64), draw(64, seed=9) * 40
    seen = attention_residual(rows, norm, projection, EPS)
    wanted = exact(rows, norm, projection)
    assert torch.allclose(seen.double(), wanted, rtol=3e-5, atol=1e-4 * float(wanted.abs().max()))
    scaled = attention_residual([rows[0], rows[1] * 1e3], norm, projection / 100, 0.0)
    plain = attention_residual([rows[0], rows[1]], norm, projection / 100, 0.0)
    weight = (plain - rows[0]) / (rows[1] - rows[0])
    assert torch.allclose(scaled, rows[0] + weight * (1e3 * rows[1] - rows[0]), rtol=2e-3, atol=0.5)


def test_rows_are_read_where_they_lie_and_never_written() -> None:
    rows = [draw(3, 5, 64, seed=at) for at in range(3)]
    before = [row.clone() for row in rows]
    leaves = [row.requires_grad_(at != 1) for at, row in enumerate(rows)]
    norm, projection = torch.ones(64), draw(1, 64, seed=9)
    y = attention_residual(leaves, norm, projection, EPS)
    found = torch.autograd.grad(y.sum(), [leaves[0], leaves[2]])
    assert y.shape == rows[0].shape and [one.shape for one in found] == [rows[0].shape] * 2
    assert all(torch.equal(a.detach(), b) for a, b in zip(rows, before, strict=True))


def test_pieces_of_a_sequence_give_the_bits_of_the_whole() -> None:
    """No token knows another: ranks that hold pieces of rows may mix them as they are."""
    *rows, norm, projection = SUITES[-1].inputs({"T": 12, "R": 9, "H": 96}, torch.bfloat16, "cpu", 3)
    dy = draw(12, 96, seed=8, dtype=torch.bfloat16)

    def mixed(piece: slice) -> list[Tensor]:
        leaves = [row[piece].clone().requires_grad_() for row in rows]
        y = attention_residual(leaves, norm, projection, EPS)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[piece])]

    halves = zip(mixed(slice(0, 5)), mixed(slice(5, 12)), strict=True)
    assert all(torch.equal(whole, torch.cat(parts)) for whole, parts in zip(mixed(slice(0, 12)), halves, strict=True))


def test_traced_it_is_one_node_with_the_same_bits() -> None:
    """Fake tensors, and the registered operator beside the short way, values and gradients."""
    given_inputs = cases.SUITE.inputs({"T": 6, "H": 96}, torch.bfloat16, "cpu", 3)
    dy = [draw(6, 96, seed=8, dtype=torch.bfloat16)]
    short = values(cases.fused, given_inputs, dy)

    class Traces(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Traces():
        traced = values(cases.fused, given_inputs, dy)
    assert {"shardwright::attention_residual_forward", "shardwright::attention_residual_backward"} <= set(seen)
    assert all(torch.equal(a, b) for a, b in zip(short, traced, strict=True))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one).requires_grad_() for one in given_inputs]
        y = attention_residual(fakes[:2], fakes[2], fakes[3], EPS)
        assert [g.shape for g in torch.autograd.grad(y.sum(), fakes)] == [one.shape for one in given_inputs]


@pytest.mark.parametrize("case", tuning.SWEEP, ids=lambda case: case.name)
def test_what_a_sweep_times_is_right(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch fills what the sweep compares, on a small tensor; widths that Kimi K3 has are among them."""
    monkeypatch.setattr(tuning, "ELEMENTS", 40 * 600)
    monkeypatch.setattr(tuning, "CHECKED", 24)
    monkeypatch.setattr(tuning, "normal_on_device", cases.normal)
    run, outputs = case.prepare(600, torch.float32, "cpu", 1)
    candidates = case.candidates(600)
    assert len(candidates) > 20 and len(case.candidates(7168)) > 10
    for launch in candidates[:: len(candidates) // 5]:
        for produced, _ in outputs:
            produced.fill_(float("nan"))
        run(launch)
        for produced, exact in outputs:
            assert bool(torch.isfinite(produced).all())
            assert torch.allclose(produced[-len(exact) :].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 9])
def test_it_keeps_two_numbers_of_a_row_and_one_of_a_token(rows: int) -> None:
    """What the memory model counts: ``4·(2·R + 1)`` a token beside the result, the rows' gradients in backward."""
    T, H = 24, 64
    given_rows = [draw(T, H, seed=at, dtype=torch.bfloat16).requires_grad_() for at in range(rows)]
    norm, projection = torch.ones(H, dtype=torch.bfloat16), draw(H, seed=9, dtype=torch.bfloat16)
    with Live() as held:
        y = attention_residual(given_rows, norm, projection, EPS)
        kept, held.peak = held.now, 0
        found = torch.autograd.grad(y, given_rows, torch.ones_like(y))
    row = 2 * T * H
    assert kept == 4 * (2 * rows + 1) * T + row
    assert held.peak - kept == pytest.approx(row * (rows + 1), abs=64)
    assert len(found) == rows


def decision(**changed: Any) -> FusionDecision:
    fields: dict[str, Any] = {
        "proposal_id": "0" * 16,
        "pattern": "attention_residual",
        "variant": "kernel",
        "provider": "shardwright",
        "op": "attention_residual",
        "modules": ("mix",),
        "roles": {"norm": "weight"},
        "constants": {"form": "scored", "eps": "1e-06"},
        "source_sha256": source_sha256("attention_residual"),
        "tolerance": "0.02",
    }
    return FusionDecision.model_validate({**fields, **changed})


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = ResidualMix(64, EPS)
        self.proj = torch.nn.Linear(64, 1, bias=False)

    def forward(self, *rows: Tensor) -> Tensor:
        out: Tensor = self.mix(rows, self.proj.weight)
        return out


def test_a_worker_exchanges_the_mix_of_a_live_layer() -> None:
    """Rows with gaps too: they are made dense first."""
    layer = Layer()
    switches = install_fusions(layer, (decision(),))
    rows = [draw(2, 5, 64, seed=at) for at in range(3)]
    rows[1] = draw(2, 64, 5, seed=4).mT
    seen = layer(*rows)
    with fusions_off(switches):
        assert torch.allclose(seen, layer(*rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changed", [{"roles": {}}, {"constants": {"form": "attended", "eps": "1e-06"}}])
def test_a_decision_that_says_too_little_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(LegalityError) as caught:
        install_fusions(Layer(), (decision(**changed),))
    assert caught.value.code == "legality/fusion-residual"
