"""Kimi K3's attention layers alone at full width: KDA beside flash-linear-attention, sparse attention beside torch.

``python benchmarks/k3_layers.py [kda] [dsa] [--kda-tokens T] [--dsa-tokens T] [--repeats N] [--fla-rule]
[--append]``

A layer is the attention module from hidden states to hidden states with its projections and their adapters; a pass is
what a training step does with it: forward, forward again as recomputation, backward. The ways of one layer run in turn
on the same input, and each must agree with ours in output and gradient, or there is no result.

* ``kda``, 4,096 tokens: the plan's operators; the same layer with convolution, recurrence and gated norm of
  flash-linear-attention (``kda_layer_ratio``); the model's own code (``kda_unfused_ratio``), and with ``--fla-rule``
  that code with ``chunk_kda`` alone (``kda_fla_rule_ratio``), which tunes itself once more; ours with what its
  recurrence may keep for the backward (``kda_kept_ratio``). Without the projections, which all of them share: what is
  fused, from the projections' values to the input of the last one, beside the same of flash-linear-attention
  (``kda_fused_ratio``), and the two recurrences alone, forward and backward (``kda_op_ratio``).
* ``dsa``, 32,768 tokens: the plan's operators and the model's own torch operators (``dsa_fused_ratio``). Those need no
  cutting there: the indexer scores one head after another, so that [T, T] is what they hold.

Ratios are the other's time ÷ ours. Needs a device.
Legend: T tokens, H heads, C channels, J taps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from k3_model import Slice
from k3_slice_fusions import decisions
from k3_slice_model import Sliced, build, described
from lines import append, line
from rival_tuning import compiled_at_once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.checkpoints.models.kimi_k3 import attention
from shardwright.runtime.fuse import fusions_off
from shardwright.runtime.fused_delta_layer import DeltaLayer
from shardwright.runtime.launch.allocator import choose_allocator
from shardwright.runtime.parallelize import decoder_layers

TOKENS = {"kda": 4096, "dsa": 32_768}
REPEATS = {"kda": 10, "dsa": 2}
FUSIONS = {"kda": ("kda", "rms_norm"), "dsa": ("dsa", "rms_norm")}
IN_A_ROW = 4
"""Passes of a KDA layer between two looks at the clock."""
FARTHEST = 0.1
"""Of the norm of the difference to that of ours: bf16 on the way through one layer and back stays far below."""
Way = Callable[[Tensor], Tensor]


class OtherFunction(RuntimeError):
    """A rival that does not compute what ours does."""


@dataclass(frozen=True)
class Timed:
    """One way of a layer."""

    milliseconds: float
    spread_pct: float
    """Half the range in per cent of the median."""
    peak_bytes: int


def fla_installed() -> bool:
    return find_spec("fla") is not None


def fla_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rates: Tensor,
    shift: Tensor,
    *,
    gate: str,
    lower_bound: float,
    cu_seqlens: None = None,
) -> tuple[Tensor, Any]:
    """``chunk_kda`` in the place of our recurrence: raw gate and beta, unit length inside."""
    found: tuple[Tensor, Any] = import_module("fla.ops.kda").chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log=rates.float(),
        dt_bias=shift.float().flatten(),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=gate == "bounded",
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
    )
    return found


def fla_layer(ours: DeltaLayer) -> DeltaLayer:
    """The same layer with flash-linear-attention's convolution, recurrence and gated norm."""
    convolved = import_module("fla.modules.causal_conv1d").causal_conv1d
    normed = import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated

    def conv(x: Tensor, taps: Tensor, cu_seqlens: None = None) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = convolved(x=x, weight=taps, activation="silu", cu_seqlens=cu_seqlens)
        return found

    def norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str) -> Tensor:
        found: Tensor = normed(x, gate, weight, None, activation=activation, eps=eps)
        return found

    return replace(ours, rule=fla_rule, conv=conv, norm=norm)


def fla_in_own_code() -> AbstractContextManager[object]:
    """Inside the block the model's own layer, which makes gate and unit vectors itself, runs ``chunk_kda``."""
    chunk_kda = import_module("fla.ops.kda").chunk_kda

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = chunk_kda(q.to(v.dtype), k.to(v.dtype), v, g, beta, scale=1.0)
        return found

    return patch.object(attention, "delta_rule", rule)


def one_layer(kind: str, tiny: dict[str, Any], folder: Path, dtype: torch.dtype) -> tuple[Sliced, str, nn.Module]:
    """A model of one layer with the kernels of its kind, and its attention with its name."""
    side = build(described(Slice("kimi_k3", (f"{kind}+dense",), tiny), folder), FUSIONS[kind], dtype)
    (layer,) = decoder_layers(side.model).values()
    module = layer.get_submodule("self_attn")
    name = next(name for name, one in side.model.named_modules() if one is module)
    return side, name, module


def normal_state(side: Sliced, tokens: int, dtype: torch.dtype) -> Tensor:
    """``[1, T, hidden]`` as a norm leaves it."""
    model: Any = side.model
    hidden = model.get_input_embeddings().weight.shape[1]
    generator = torch.Generator(side.device.torch_device).manual_seed(0)
    return torch.randn(1, tokens, hidden, generator=generator, dtype=dtype, device=side.device.torch_device)


def one_pass(way: Way, x: Tensor, side: Sliced) -> tuple[Tensor, Tensor]:
    """Forward, forward again, backward: the output and the gradient of the input."""
    x = x.detach().requires_grad_(True)
    side.optimizer.clear()
    with side.device.attention():
        out: Tensor = checkpoint(way, x, use_reentrant=False)
        out.backward(torch.ones_like(out))
    assert x.grad is not None
    return out.detach(), x.grad


def compared(
    ways: dict[str, Way], x: Tensor, side: Sliced, repeats: int, in_a_row: int = 1
) -> tuple[dict[str, Timed], dict[str, float]]:
    """Every way in turn, after one pass of each that must agree with the first's.

    Args:
        in_a_row: passes between two looks at the clock, so that the host is ahead of the device.

    Returns:
        Times, and distances to the first.

    Raises:
        OtherFunction: a way that is farther from the first than ``FARTHEST``.
    """
    first, *others = ways
    expected = one_pass(ways[first], x, side)
    distances = {}
    for name in others:
        with compiled_at_once() if torch.cuda.is_available() else nullcontext():
            found = one_pass(ways[name], x, side)
        distances[name] = max(_distance(a, b) for a, b in zip(found, expected, strict=True))
        if not distances[name] < FARTHEST:
            raise OtherFunction(f"{name} is {distances[name]:.3g} away from {first}")
        del found
    del expected
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0)
    for name in [name for _ in range(1 + repeats) for name in ways]:
        _reset_peak()
        times[name].append(_timed(partial(one_pass, ways[name], x, side), in_a_row))
        peaks[name] = _peak()
    return {name: _of(spent[1:], peaks[name]) for name, spent in times.items()}, distances


def kda(
    tiny: dict[str, Any], tokens: int, repeats: int, dtype: torch.dtype, with_fla_rule: bool = False
) -> dict[str, float]:
    """Metrics of a delta-rule layer."""
    with tempfile.TemporaryDirectory() as folder:
        side, name, module = one_layer("kda", tiny, Path(folder), dtype)
    (decision,) = decisions(side.model, ("kda",))
    ours = DeltaLayer.of(module, name, decision)
    x = normal_state(side, tokens, dtype)

    def own(x: Tensor) -> Tensor:
        with fusions_off(side.switches):
            found: Tensor = module(x)
        return found

    def own_with_fla(x: Tensor) -> Tensor:
        with fla_in_own_code():
            return own(x)

    ways: dict[str, Way] = {"ours": lambda x: ours(x, None), "unfused": own}
    if "keep" in signature(ours.rule).parameters:
        kept = replace(ours, rule=partial(ours.rule, keep=True))
        ways["kept"] = lambda x: kept(x, None)
    if fla_installed():
        fla = fla_layer(ours)
        ways |= {"fla": lambda x: fla(x, None)} | ({"fla_rule": own_with_fla} if with_fla_rule else {})
    times, distances = compared(ways, x, side, repeats, IN_A_ROW)
    metrics = _metrics("kda", times, distances)
    if fla_installed():
        metrics |= {"kda_layer_ratio": metrics.pop("kda_fla_ratio"), **recurrences(ours, x, side, repeats)}
        metrics |= between_projections(ours, fla_layer(ours), x, repeats)
    return metrics


def between_projections(ours: DeltaLayer, fla: DeltaLayer, x: Tensor, repeats: int) -> dict[str, float]:
    """What is fused, of both on the same projections of x: forward, forward again as recomputation, backward."""
    with torch.no_grad():
        made = ours.projections(x)
    learning = {path: value.detach().requires_grad_(True) for path, value in made.items()}

    def one(layer: DeltaLayer) -> None:
        out = checkpoint(layer.between, learning, x.shape[:2], None, use_reentrant=False)
        torch.autograd.grad(out, list(learning.values()), torch.ones_like(out))

    found = in_turns({"between": partial(one, ours), "fla_between": partial(one, fla)}, repeats)
    return {
        "kda_between_ms": found["between"].milliseconds,
        "kda_fla_between_ms": found["fla_between"].milliseconds,
        "kda_fused_ratio": found["fla_between"].milliseconds / found["between"].milliseconds,
    }


def recurrences(ours: DeltaLayer, x: Tensor, side: Sliced, repeats: int) -> dict[str, float]:
    """Our recurrence and flash-linear-attention's on what the layer gives them, forward and backward."""
    seen: list[tuple[Any, ...]] = []

    def keep(*given: Any, **settings: Any) -> Any:
        seen.append((given, settings))
        return ours.rule(*given, **settings)

    with torch.no_grad():
        replace(ours, rule=keep)(x, None)
    ((given, settings),) = seen

    def both(rule: Callable[..., tuple[Tensor, Any]]) -> None:
        learning = [one.detach().requires_grad_(True) for one in given[:5]]
        out, _ = rule(*learning, *given[5:], **settings)
        torch.autograd.grad(out, learning, torch.ones_like(out))

    found = in_turns({"op": partial(both, ours.rule), "fla_op": partial(both, fla_rule)}, repeats)
    return {
        "kda_op_ms": found["op"].milliseconds,
        "kda_fla_op_ms": found["fla_op"].milliseconds,
        "kda_op_ratio": found["fla_op"].milliseconds / found["op"].milliseconds,
    }


def in_turns(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, Timed]:
    """Every run in turn, ``IN_A_ROW`` times between two looks at the clock; the first two rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name in [name for _ in range(repeats + 2) for name in runs]:
        times[name].append(_timed(runs[name], IN_A_ROW))
    return {name: _of(spent[2:], 0) for name, spent in times.items()}


def dsa(tiny: dict[str, Any], tokens: int, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    """Metrics of a gated sparse attention."""
    with tempfile.TemporaryDirectory() as folder:
        side, _, module = one_layer("dsa", tiny, Path(folder), dtype)
    x = normal_state(side, tokens, dtype)

    def own(x: Tensor) -> Tensor:
        with fusions_off(side.switches):
            found: Tensor = module(x)
        return found

    times, distances = compared({"ours": module, "unfused": own}, x, side, repeats)
    metrics = _metrics("dsa", times, distances)
    return metrics | {"dsa_fused_ratio": metrics.pop("dsa_unfused_ratio")}


def _metrics(what: str, times: dict[str, Timed], distances: dict[str, float]) -> dict[str, float]:
    ours = times["ours"].milliseconds
    found: dict[str, float] = {}
    for name, one in times.items():
        found |= {f"{what}_{name}_ms": one.milliseconds, f"{what}_{name}_spread_pct": one.spread_pct}
        if one.peak_bytes:
            found[f"{what}_{name}_peak_bytes"] = one.peak_bytes
    for name, distance in distances.items():
        found |= {f"{what}_{name}_ratio": times[name].milliseconds / ours, f"{what}_{name}_distance": distance}
    return found


def _of(spent: list[float], peak: int) -> Timed:
    middle = statistics.median(spent)
    return Timed(1e3 * middle, 50 * (max(spent) - min(spent)) / middle, peak)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _timed(run: Callable[[], object], in_a_row: int) -> float:
    """Seconds of one call."""
    _wait()
    began = time.perf_counter()
    for _ in range(in_a_row):
        run()
    _wait()
    return (time.perf_counter() - began) / in_a_row


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def measured(name: str, tokens: int, repeats: int = 0, with_fla_rule: bool = False) -> dict[str, float]:
    """Metrics of one layer at full width."""
    runs: dict[str, Callable[..., dict[str, float]]] = {"kda": partial(kda, with_fla_rule=with_fla_rule), "dsa": dsa}
    run = runs[name]
    found = {f"{name}_tokens": tokens, **run({}, tokens, repeats or REPEATS[name], torch.bfloat16)}
    return {key: round(float(value), 5) for key, value in found.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="k3_layers.py")
    parser.add_argument("layers", nargs="*", help="kda, dsa; both unless told")
    parser.add_argument("--kda-tokens", type=int, default=TOKENS["kda"])
    parser.add_argument("--dsa-tokens", type=int, default=TOKENS["dsa"])
    parser.add_argument("--repeats", type=int, default=0, help="timed passes of each way; 10 and 2 unless told")
    parser.add_argument("--fla-rule", action="store_true", help="also the model's own code with the library's rule")
    parser.add_argument("--append", action="store_true", help="append to benchmarks/results")
    options = parser.parse_args(arguments)
    names = options.layers or list(TOKENS)
    if unknown := [name for name in names if name not in TOKENS]:
        sys.stderr.write(f"unknown: {', '.join(unknown)}; known: {', '.join(TOKENS)}\n")
        return 2
    if "kda" in names and not fla_installed():
        sys.stderr.write("flash-linear-attention is not installed: no kda_fused_ratio and no kda_op_ratio\n")
    for name in names:
        metrics = measured(name, getattr(options, f"{name}_tokens"), options.repeats, options.fla_rule)
        made = line(
            {
                "bench": "k3-slice",
                "case": f"k3-layers/{name}-h200",
                "passes": "fwd+fwd+bwd",
                "ours": metrics[f"{name}_ours_ms"],
                "metrics": metrics,
            }
        )
        sys.stdout.write(made.model_dump_json() + "\n")
        sys.stdout.flush()
        if options.append:
            append([made])
    return 0


if __name__ == "__main__":
    choose_allocator(os.environ)
    raise SystemExit(main())
