"""The front door of latent attention: selected keys, all keys, the up-projection, and where the two cross.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.
Legend: T queries, S keys, H heads, N, V widths of key and value, C latent width, r rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside the interpreter")

if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from shardwright.kernels.dsa import cases, crossover  # noqa: E402
from shardwright.kernels.dsa.attention.choose import read_times  # noqa: E402
from shardwright.kernels.dsa.op import latent_attention  # noqa: E402
from shardwright.kernels.dsa.reference import latent_attention_reference  # noqa: E402
from shardwright.kernels.dsa.up_projection import Adapter, UpProjection  # noqa: E402
from shardwright.kernels.registry import OPERATORS  # noqa: E402
from shardwright.kernels.verify import relative_error, verify_case  # noqa: E402
from shardwright.schemas.bench import BenchLine  # noqa: E402

H, N, V, C, RANK = 3, 4, 5, 7, 2


@outside
def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("../test_dsa.py")


@inside
@pytest.mark.parametrize("name", ["SUITE", "DOOR_SUITE", "DENSE_SUITE"])
def test_error_is_no_larger_than_eagers(name: str) -> None:
    suite = getattr(cases, name)
    found = [r for shape in suite.small_shapes for r in verify_case(suite, shape, torch.bfloat16, "cpu")]
    if torch.float32 in suite.dtypes:
        found += verify_case(suite, suite.small_shapes[0], torch.float32, "cpu")
    assert found and [r for r in found if not r.ok] == []


@inside
@pytest.mark.parametrize("bad", cases.bad_inputs("cpu"), ids=lambda bad: bad.name)
def test_bad_input_is_refused_with_its_code(bad: Any) -> None:
    from shardwright.schemas.errors import KernelError

    with pytest.raises(KernelError) as caught:
        bad.call()
    assert caught.value.code == f"kernel/{bad.code}"


@inside
@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_a_layer_that_rotates_nothing_through_the_front_door(chosen: bool, gated: bool) -> None:
    """Kimi K3's form: no rotated parts, selected keys or all, gate on and off; outputs and gradients against fp64."""
    T, shapes = 6, ((6, H, 8), (6, 16), (H * 16, 16), *(((6, H, 8),) if gated else ()))
    leaves = [normal(*shape, seed=at).detach().float().requires_grad_() for at, shape in enumerate(shapes)]
    index = torch.tensor([[t, -1] if t == 0 else [0, t] for t in range(T)], dtype=torch.int32) if chosen else None
    bounds = torch.tensor([[0, t + 1] for t in range(T)], dtype=torch.int32)

    def call(function: Any, q: Tensor, latent: Tensor, weight: Tensor, *gate: Tensor, **more: Any) -> Any:
        up = UpProjection(weight, H, 8, 8)
        return function(q, None, latent, None, up, index, *gate, scale=0.3, **more)

    o, _ = call(latent_attention, *leaves, bounds=bounds if chosen else None)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = call(latent_attention_reference, *wide, bounds=bounds)
    dy = normal(*o.shape, seed=9).detach()
    found = [o.detach(), *torch.autograd.grad(o, leaves, dy.float())]
    truth = [exact.detach(), *torch.autograd.grad(exact, wide, dy)]
    assert max(relative_error(a, b) for a, b in zip(found, truth, strict=True)) < 2e-6


@outside
def test_the_registered_cost_knows_dense_attention_too() -> None:
    """No selection: all pairs up to the query, keys of plain and rotated width, one pass of the gate."""
    T, b = 1000, 2
    found = OPERATORS["dsa"].load_cost()(T, 8, "bfloat16", N=0, D=0, K=0, V=512, R=64, A=128, B=96)
    assert found.forward.flops == 2 * sum(range(1, T + 1)) * 8 * (128 + 64 + 96)
    assert found.forward.bytes_written == 2 * T * 8 * 96 * b and found.shape == {"T": T, "H": 8, "D": 192, "V": 96}
    few = OPERATORS["dsa"].load_cost()(T, 8, "bfloat16", N=0, D=0, K=64, V=512, R=64, A=128, B=96)
    assert few.shape["K"] == 64 and few.forward.flops < found.forward.flops


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@outside
@pytest.mark.parametrize("adapted", [False, True])
def test_absorbed_products_are_those_of_expanded_keys_and_values(adapted: bool) -> None:
    """q · (W_k c) and Σ p (W_v c), with the adapter as one merged matrix: products, and every gradient."""
    weight, a, b = normal(H * (N + V), C, seed=1), normal(RANK, C, seed=2), normal(H * (N + V), RANK, seed=3)
    q, latent, shares = normal(6, H, N, seed=4), normal(8, C, seed=5), normal(6, H, 8, seed=6)
    up = UpProjection(weight, H, N, V, Adapter(a, b, 0.5) if adapted else None)
    merged = (weight + 0.5 * b @ a if adapted else weight).view(H, N + V, C)
    keys = torch.einsum("hnc,sc->shn", merged[:, :N], latent)
    values = torch.einsum("hvc,sc->shv", merged[:, N:], latent)
    expected = (torch.einsum("thn,shn->ths", q, keys), torch.einsum("ths,shv->thv", shares, values))
    mixed = torch.einsum("ths,sc->thc", shares, latent)
    found = (torch.einsum("thc,sc->ths", up.absorb(q), latent), up.values(mixed))
    expanded = up.expand(latent)
    torch.testing.assert_close(expanded[0], keys)
    torch.testing.assert_close(expanded[1], values)
    leaves = [q, latent, shares, weight, *((a, b) if adapted else ())]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
        used = torch.autograd.grad(one.sin().sum(), leaves, allow_unused=True, retain_graph=True)
        wanted = torch.autograd.grad(other.sin().sum(), leaves, allow_unused=True, retain_graph=True)
        for mine, theirs in zip(used, wanted, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs)


def layer_line(T: int, passes: str, ours: float, dense: float, indexer: float, device: str = "A") -> str:
    return BenchLine(
        bench="kernels",
        case=f"dsa-layer/T{T}k-H64",
        passes=passes,
        ours=ours,
        device=device,
        versions={},
        commit="abc",
        date="2026-01-01",
        metrics={"dense_cudnn_ms": dense, "indexer_ms": indexer},
    ).model_dump_json()


@outside
def test_times_are_renewed_from_result_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forward and backward apart, the indexer apart; the crossing is where the sums are equal."""
    lines = [layer_line(8, "fwd", 5.0, 2.0, 1.0), layer_line(8, "fwd+bwd", 13.0, 8.0, 1.0)]
    lines += [layer_line(16, "fwd", 10.0, 8.0, 2.0), layer_line(16, "fwd+bwd", 26.0, 32.0, 2.0)]
    lines += [layer_line(32, "fwd", 20.0, 32.0, 4.0)]
    results, into = tmp_path / "lines.jsonl", tmp_path / "times.json"
    results.write_text("\n".join(lines) + "\n")
    assert crossover.main([str(results), "--into", str(into)]) == 0
    found = read_times(into)["A"]
    assert found.dense == {8192: (2.0, 6.0), 16_384: (8.0, 24.0)}
    assert found.sparse == {8192: (4.0, 8.0), 16_384: (8.0, 16.0)} and found.indexer == {8192: 1.0, 16_384: 2.0}
    # dense 8·(T/8192)², sparse with indexer 13·T/8192: equal at T = 8192 · 13/8 = 13312.
    assert "sparse is faster from T 14336 on (forward and backward)" in capsys.readouterr().out
    assert json.loads(into.read_text())["A"]["basis"].endswith("commit abc")


@outside
@pytest.mark.parametrize("lines", [[], ["fwd"], ["A", "B"]])
def test_lines_that_say_too_little_are_refused(lines: list[str], tmp_path: Path) -> None:
    made = [layer_line(8, "fwd", 5.0, 2.0, 1.0, device) for device in lines]
    if len(lines) == 2:
        made += [layer_line(16, "fwd+bwd", 26.0, 32.0, 2.0, device) for device in lines]
    results, into = tmp_path / "lines.jsonl", tmp_path / "times.json"
    results.write_text("\n".join(made))
    assert crossover.main([str(results), "--into", str(into)]) != 0
    assert not into.exists()


@outside
def test_one_call_of_the_suite_times_every_case() -> None:
    """``suite --ops dsa dsa_attention dsa_indexer dsa_kl``: each with a cost to state TFLOP/s by, and its rival."""
    from shardwright.kernels.registry import operator

    found = {
        (case.case, passes): suite
        for name in ("dsa", "dsa_attention", "dsa_indexer", "dsa_kl")
        for suite in operator(name).load_suites()
        for case in suite.bench
        for passes in case.passes
    }
    sparse = {(f"dsa/T{T}k-H{heads}", passes) for T in (8, 32) for heads in (64, 128) for passes in ("fwd", "bwd")}
    layers = {(f"dsa-layer/T{T}k-H64", passes) for T in (32, 64) for passes in ("fwd", "fwd+bwd")}
    indexers = {(f"dsa-indexer/T{T}k", "fwd") for T in (8, 16, 32)}
    others = {("dsa-kl/T8k", "fwd+bwd"), ("dsa-gqa/T8k-H32-G2", "fwd"), ("gated-mla/T8k-H96", "fwd")}
    assert sparse | layers | indexers | others <= {*found}
    for key in sparse | indexers | others | layers:
        suite = found[key]
        (shape,) = {tuple(case.shape.items()) for case in suite.bench if case.case == key[0]}
        counted = suite.cost(**dict(shape), dtype="bfloat16")
        assert counted.forward.floor_flops > 1e11 and counted.backward is not None
    assert all("eager" in found[key].rivals for key in indexers | {("dsa/T8k-H64", "fwd"), ("dsa-kl/T8k", "fwd+bwd")})
    assert all(found[key].extras is cases.dense_beside for key in layers)
