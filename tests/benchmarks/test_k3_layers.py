"""Attention layers alone at tiny width, with plain references as operators and stand-ins for flash-linear-attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import k3_layers
from k3_slice import TINY_K3
from rival_tuning import compiled_at_once

from shardwright.kernels.kda.reference import kda_recurrent_reference
from shardwright.kernels.registry import OPERATORS

TOKENS = 21
PLAIN = {
    "kda": "kda.reference:kda_recurrent_reference",
    "short_conv": "short_conv.reference:short_conv_reference",
    "gated_rms_norm": "gated_rms_norm.reference:gated_rms_norm_reference",
}


@pytest.fixture(autouse=True)
def plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for op, path in PLAIN.items():
        monkeypatch.setitem(OPERATORS, op, replace(OPERATORS[op], op_path=path))
    monkeypatch.setattr(k3_layers, "FUSIONS", {"kda": (), "dsa": ()})


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    use_gate_in_kernel: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: None = None,
) -> tuple[Tensor, Any]:
    """Token after token, by the library's documented meaning of its arguments; K, V widths."""
    assert cu_seqlens is None
    heads, width = q.shape[2:]
    if use_gate_in_kernel:
        assert A_log is not None and dt_bias is not None and lower_bound is not None and safe_gate
        assert A_log.shape == (heads,) and dt_bias.shape == (heads * width,) and A_log.dtype == torch.float32
        g = lower_bound * torch.sigmoid(A_log.exp().view(heads, 1) * (g + dt_bias.view(heads, width)))
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta)
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (width**-0.5 if scale is None else scale)
    state = torch.zeros(q.shape[0], heads, width, v.shape[-1], dtype=q.dtype)
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t].unsqueeze(-1), error)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, 1), state


def causal_conv1d(*, x: Tensor, weight: Tensor, activation: str, cu_seqlens: None) -> tuple[Tensor, None]:
    assert activation == "silu" and cu_seqlens is None
    taps, channels = weight.shape[1], weight.shape[0]
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=channels)).transpose(1, 2), None


def rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor, bias: None, *, activation: str, eps: float) -> Tensor:
    assert bias is None and activation == "sigmoid"
    return F.rms_norm(x, (x.shape[-1],), weight, eps) * torch.sigmoid(g)


def stand_in(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any]) -> None:
    """The library's modules that are used, under its names."""
    parts = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": rule},
        "fla.modules": {},
        "fla.modules.causal_conv1d": {"causal_conv1d": causal_conv1d},
        "fla.modules.norm": {},
        "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": rms_norm_gated},
    }
    for name, functions in parts.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


def test_every_way_of_a_delta_rule_layer_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, the library's three parts, its rule in the model's own code, and the model's own code agree to 1e-5."""
    stand_in(monkeypatch, chunk_kda)
    metrics = k3_layers.kda(TINY_K3, TOKENS, 1, torch.float32, with_fla_rule=True)
    assert {"kda_layer_ratio", "kda_fla_rule_ratio", "kda_unfused_ratio", "kda_op_ratio"} <= set(metrics)
    assert metrics["kda_layer_ratio"] == pytest.approx(metrics["kda_fla_ms"] / metrics["kda_ours_ms"])
    assert metrics["kda_fused_ratio"] == pytest.approx(metrics["kda_fla_between_ms"] / metrics["kda_between_ms"])
    assert metrics["kda_op_ratio"] == pytest.approx(metrics["kda_fla_op_ms"] / metrics["kda_op_ms"])
    distances = {way: metrics[f"kda_{way}_distance"] for way in ("fla", "fla_rule", "unfused")}
    assert max(distances.values()) < 1e-5, distances


def test_another_function_gives_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda *given, **settings: (2 * chunk_kda(*given, **settings)[0].square(), None))
    with pytest.raises(k3_layers.OtherFunction, match="fla"):
        k3_layers.kda(TINY_K3, TOKENS, 1, torch.float32)


def test_without_the_library_there_is_no_ratio_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k3_layers, "fla_installed", lambda: False)
    metrics = k3_layers.kda(TINY_K3, TOKENS, 1, torch.float32)
    assert "kda_unfused_ratio" in metrics and not {"kda_fused_ratio", "kda_op_ratio"} & set(metrics)


def test_a_sparse_layer_is_timed_beyond_its_choice() -> None:
    """More tokens than are chosen, so that the indexer runs."""
    tokens = TINY_K3["index_topk"] + 5
    metrics = k3_layers.dsa(TINY_K3, tokens, 1, torch.float32)
    assert metrics["dsa_fused_ratio"] == pytest.approx(metrics["dsa_unfused_ms"] / metrics["dsa_ours_ms"])
    assert metrics["dsa_unfused_distance"] < 1e-5


def test_unknown_layers_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert k3_layers.main(["mamba"]) == 2
    assert "mamba" in capsys.readouterr().err


def test_recurrence_of_the_stand_in_is_the_operators() -> None:
    """The stand-in is no copy of the reference: the two agree because both are the delta rule."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, g = (torch.randn(2, 9, 3, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    beta, rates = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((2, 9, 3), (3,)))
    shift = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    expected, _ = kda_recurrent_reference(q, k, v, g, beta, rates, shift, gate="bounded", lower_bound=-5.0)
    gate = -5.0 * torch.sigmoid(rates.exp().view(3, 1) * (g + shift))
    found, _ = chunk_kda(q, k, v, gate, beta.sigmoid(), use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Kernel:
    """What an autotuner runs: remembers how."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.fn = lambda x, BLOCK: None

    def run(self, *args: Any, warmup: bool, BLOCK: int, **kwargs: Any) -> None:
        self.calls.append((BLOCK, warmup))


def test_a_rivals_candidates_are_compiled_before_the_first_is_timed() -> None:
    """Each once as a warm-up, then each as the tuner has it; the best is what the tuner chose; undone afterwards."""
    triton = pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner

    kernel = Kernel()
    configs = [triton.Config({"BLOCK": size}) for size in (16, 32, 64)]
    times = iter([3.0, 1.0, 2.0])

    def bench(call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        return [next(times)] * 3

    before = Autotuner.prune_configs
    with compiled_at_once(2):
        tuner = Autotuner(kernel, ["x"], configs, ["x"], None, None, do_bench=bench)
        tuner.run(7, grid=(1,), warmup=False)
        tuner.run(7, grid=(1,), warmup=False)
    assert kernel.calls[:3] == [(16, True), (32, True), (64, True)]
    assert kernel.calls[3:] == [(16, False), (32, False), (64, False), (32, False), (32, False)]
    assert Autotuner.prune_configs is before
