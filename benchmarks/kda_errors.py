"""Errors of KDA's outputs and gradients beside flash-linear-attention's, both against the recurrence in fp64.

``python benchmarks/kda_errors.py [SETTING ...] [--gates GATE ...] [--append]`` runs each setting on one GPU. All three
get the same bf16 inputs; the exact values are autograd's through the recurrence on them in fp64 (``recurrence``:
``kda_recurrent_reference`` without its documents, and in time linear in T also backward).
An error is the norm of the difference over the norm of the exact tensor, both over ``TOKENS`` tokens of the setting:
a shorter one is drawn several times, of which the recurrence takes all at once, as further heads. Gradients of beta
and of the gate's speed come mostly from the last tokens of a head, before its final state, so that few heads drawn
once would be judged by luck. Settings:

* ``usual-8k``, ``usual-32k``: the benchmark's inputs at T 8,192 and 32,768;
* ``saturated``: gates of which nearly all are fully open or fully closed;
* ``zero-beta``: every second token writes nothing, its beta being 0 to rounding;
* ``repeated-keys``: one key for 64 tokens on end, each written with a beta near 1.

flash-linear-attention runs with the first of each kernel's candidates that works: they differ in time, and in the
order of sums in fp32, far below the rounding of bf16.

Legend: T tokens, H heads (32 here), K = V = 128.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from lines import append, line
from rival_tuning import first_that_runs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwright.kernels.kda.cases import INPUT_NAMES, inputs
from shardwright.kernels.kda.op import kda
from shardwright.kernels.kda.reference import log_decay, unit
from shardwright.kernels.kda.rivals import flash_linear_attention

Given = tuple[Tensor, ...]
Way = Callable[..., tuple[Tensor, ...]]
SIZES: Mapping[str, tuple[int, int]] = {
    "usual-8k": (8192, 32),
    "saturated": (4096, 32),
    "zero-beta": (4096, 32),
    "repeated-keys": (4096, 32),
    "usual-32k": (32_768, 32),
}
"""T and H."""
GATES = ("bounded", "softplus")
RESULTS = ("o", "final_state", *(f"d{name}" for name in INPUT_NAMES))
TOKENS = 32_768
SEED = 41
RUN = 64
"""Tokens that share a key: a chunk of both implementations."""
SEGMENT = 128
"""Tokens whose states the exact backward holds at once: 4 GB each time with 256 heads."""
HEAD_DIMS: Mapping[str, int] = {"A_log": 0, "dt_bias": 0, "initial_state": 1, "final_state": 1}
"""Where the heads are, in what has no tokens; else behind batch and tokens."""


class Draw(NamedTuple):
    """Inputs, and what weighs the outputs whose sum is differentiated, in bf16."""

    tensors: Given
    ends: Given


def given(setting: str, device: str, tokens: int | None = None, seed: int = SEED) -> Given:
    """q, k, v, raw gate, raw beta in bf16; A_log, dt_bias and the initial state in fp32."""
    T, H = SIZES[setting]
    found = dict(zip(INPUT_NAMES, inputs(_shape(tokens or T, H), torch.bfloat16, device, seed), strict=True))
    if setting == "saturated":
        found["g"] = found["g"].sign() * (12 + found["g"].abs())
    elif setting == "zero-beta":
        found["beta"][:, ::2] = -40.0
    elif setting == "repeated-keys":
        found["k"] = found["k"][:, ::RUN].repeat_interleave(RUN, dim=1)[:, : tokens or T].contiguous()
        found["beta"] = found["beta"].abs() + 3
    return tuple(found.values())


def draw(setting: str, device: str, tokens: int | None = None, seed: int = SEED) -> Draw:
    """Inputs of a setting and the weights of its outputs ``o`` and ``final_state``."""
    tensors = given(setting, device, tokens, seed)
    like = (tensors[INPUT_NAMES.index("v")], tensors[INPUT_NAMES.index("initial_state")])
    source = torch.Generator(device).manual_seed(seed)
    ends = tuple(torch.randn(one.shape, generator=source, device=device, dtype=torch.bfloat16) for one in like)
    return Draw(tensors, ends)


def _shape(T: int, H: int) -> dict[str, int]:
    return {"T": T, "H": H, "K": 128, "V": 128}


def results(way: Way, drawn: Draw, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Outputs, and gradients of their weighted sum, in fp64; from inputs in ``dtype``."""
    learning = [one.detach().to(dtype or one.dtype).requires_grad_(True) for one in drawn.tensors]
    outputs = way(*learning)
    weights = [end.to(one.dtype) for end, one in zip(drawn.ends, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, learning, weights)
    return {name: one.detach().double() for name, one in zip(RESULTS, (*outputs, *gradients), strict=True)}


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    gate: str,
) -> tuple[Tensor, Tensor]:
    """Token after token for one document and as many value heads as key heads, in the inputs' dtype.

    A segment's inputs are taken apart once: a token read by its index would cost a gradient of all T in the backward.
    Its states are made again there.
    """
    decay = log_decay(g, A_log, dt_bias, gate=gate, lower_bound=-5.0).exp()
    rows = [unit(q)[0] * q.shape[-1] ** -0.5, unit(k)[0], v[0], decay[0], beta.sigmoid()[0]]
    S, outputs = state[0], []
    for segment in zip(*(one.split(SEGMENT) for one in rows), strict=True):
        o, S = checkpoint(_steps, S, *segment, use_reentrant=False)
        outputs.append(o)
    return torch.cat(outputs)[None], S[None]


def _steps(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for qt, kt, vt, at, bt in zip(*(one.unbind(0) for one in (q, k, v, decay, beta)), strict=True):
        S = S * at[..., None]
        missing = vt - torch.bmm(kt[:, None], S)[:, 0]
        S = torch.baddbmm(S, (bt[:, None] * kt)[..., None], missing[:, None])
        outputs.append(torch.bmm(qt[:, None], S)[:, 0])
    return torch.stack(outputs), S


def head_dim(name: str) -> int:
    """Where the heads are in an input or a result."""
    return HEAD_DIMS.get(name.removeprefix("d") if name in RESULTS[2:] else name, 2)


def exact(gate: str, draws: Sequence[Draw]) -> list[dict[str, Tensor]]:
    """The recurrence in fp64 on several draws, whose heads go side by side; the results of each."""
    ends = [torch.cat(ones, head_dim(name)) for name, *ones in zip(RESULTS, *(d.ends for d in draws), strict=False)]
    tensors = [torch.cat(ones, head_dim(n)) for n, *ones in zip(INPUT_NAMES, *(d.tensors for d in draws), strict=True)]
    found = results(lambda *t: recurrence(*t, gate=gate), Draw(tuple(tensors), tuple(ends)), torch.float64)
    pieces = {name: one.chunk(len(draws), head_dim(name)) for name, one in found.items()}
    return [{name: ones[at] for name, ones in pieces.items()} for at in range(len(draws))]


def ours(gate: str) -> Way:
    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        o, final = kda(*tensors, gate=gate, output_final_state=True)
        assert final is not None
        return o, final

    return run


def squares(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum of squares of each tensor's difference; ``inf`` where a value is not finite."""
    return {
        name: float((found[name] - one).square().sum()) if bool(found[name].isfinite().all()) else float("inf")
        for name, one in expected.items()
    }


def relative(parts: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Relative error of each tensor over all draws, from each draw's sums of squares."""
    whole = {name: sum(float(one[name].square().sum()) for one in expected) for name in expected[0]}
    return {name: (sum(part[name] for part in parts) / size) ** 0.5 for name, size in whole.items()}


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each tensor of one draw; ``inf`` where a value is not finite."""
    return relative([squares(found, expected)], [expected])


def measured(setting: str, gate: str, device: str, rival: Way, tokens: int | None = None) -> dict[str, float]:
    """Errors of every tensor by both, and the largest ratio of ours to the rival's."""
    count = max(1, TOKENS // (tokens or SIZES[setting][0]))
    draws = [draw(setting, device, tokens, SEED + len(INPUT_NAMES) * at) for at in range(count)]
    expected = exact(gate, draws)
    own = relative([squares(results(ours(gate), d), e) for d, e in zip(draws, expected, strict=True)], expected)
    with first_that_runs():
        other = relative([squares(results(rival, d), e) for d, e in zip(draws, expected, strict=True)], expected)
    metrics = {f"ours_{name}": value for name, value in own.items()}
    metrics |= {f"fla_{name}": value for name, value in other.items()}
    return metrics | {"worst_ratio": max(own[name] / other[name] for name in own)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="default: all")
    parser.add_argument("--gates", nargs="*", choices=GATES, default=GATES)
    parser.add_argument("--append", action="store_true", help="add the lines to benchmarks/results")
    args = parser.parse_args(arguments)
    for setting in args.settings or SIZES:
        for gate in args.gates:
            began = time.perf_counter()
            metrics = measured(
                setting, gate, "cuda", flash_linear_attention(gate, lambda q, state: None, gate == "bounded")
            )
            worst = max(metrics, key=lambda name: metrics[name] if name.startswith("ours_") else -1.0)
            found = line(
                {
                    "bench": "kda-errors",
                    "case": f"kda/errors-{setting}-{gate}",
                    "passes": "fwd+bwd",
                    "unit": "relative error",
                    "ours": metrics[worst],
                    "rival": "fla",
                    "rival_value": metrics[worst.replace("ours_", "fla_")],
                    "metrics": metrics,
                }
            )
            sys.stdout.write(f"{found.model_dump_json()}\n")
            sys.stdout.write(f"{setting} {gate} {time.perf_counter() - began:.1f} s\n")
            sys.stdout.flush()
            if args.append:
                append([found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
