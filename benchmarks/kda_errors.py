"""Errors of KDA's outputs and gradients beside flash-linear-attention's, both against the recurrence in fp64.

``python benchmarks/kda_errors.py [SETTING ...] [--append]`` runs each setting with both gates on one GPU. All
three get the same bf16 inputs; the exact values are autograd's through the recurrence on them in fp64 (``recurrence``:
``kda_recurrent_reference`` without its documents, and in time linear in T also backward).
An error is the norm of the difference over the norm of the exact tensor. Settings:

* ``usual-8k``, ``usual-32k``: the benchmark's inputs at T 8,192 and 32,768;
* ``saturated``: gates of which nearly all are fully open or fully closed;
* ``zero-beta``: every second token writes nothing, its beta being 0 to rounding;
* ``repeated-keys``: one key for 64 tokens on end, each written with a beta near 1.

flash-linear-attention tunes itself when it first runs; its candidates are compiled together.

Legend: T tokens, H heads (4 here), K = V = 128.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from lines import append, line
from rival_tuning import compiled_at_once
from torch import Tensor

from shardwright.kernels.kda.cases import INPUT_NAMES, inputs
from shardwright.kernels.kda.op import kda
from shardwright.kernels.kda.reference import log_decay, unit
from shardwright.kernels.kda.rivals import flash_linear_attention

Given = tuple[Tensor, ...]
Way = Callable[..., tuple[Tensor, ...]]
SIZES: Mapping[str, tuple[int, int]] = {
    "usual-8k": (8192, 4),
    "saturated": (4096, 4),
    "zero-beta": (4096, 4),
    "repeated-keys": (4096, 4),
    "usual-32k": (32_768, 4),
}
"""T and H."""
GATES = ("bounded", "softplus")
SEED = 41
RUN = 64
"""Tokens that share a key: a chunk of both implementations."""


def given(setting: str, device: str, tokens: int | None = None) -> Given:
    """q, k, v, raw gate, raw beta in bf16; A_log, dt_bias and the initial state in fp32."""
    T, H = SIZES[setting]
    found = dict(zip(INPUT_NAMES, inputs(_shape(tokens or T, H), torch.bfloat16, device, SEED), strict=True))
    if setting == "saturated":
        found["g"] = found["g"].sign() * (12 + found["g"].abs())
    elif setting == "zero-beta":
        found["beta"][:, ::2] = -40.0
    elif setting == "repeated-keys":
        found["k"] = found["k"][:, ::RUN].repeat_interleave(RUN, dim=1)[:, : tokens or T].contiguous()
        found["beta"] = found["beta"].abs() + 3
    return tuple(found.values())


def _shape(T: int, H: int) -> dict[str, int]:
    return {"T": T, "H": H, "K": 128, "V": 128}


def results(way: Way, tensors: Given, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Outputs, and gradients of their sum weighted by fixed random numbers, in fp64; from inputs in ``dtype``."""
    learning = [one.detach().to(dtype or one.dtype).requires_grad_(True) for one in tensors]
    outputs = way(*learning)
    draw = torch.Generator(tensors[0].device).manual_seed(SEED)
    ends = [torch.randn(one.shape, generator=draw, device=one.device, dtype=torch.bfloat16) for one in outputs]
    gradients = torch.autograd.grad(
        outputs, learning, [end.to(one.dtype) for end, one in zip(ends, outputs, strict=True)]
    )
    names = ("o", "final_state", *(f"d{name}" for name in INPUT_NAMES))
    return {name: one.detach().double() for name, one in zip(names, (*outputs, *gradients), strict=True)}


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

    Inputs are taken apart once: a token read by its index would cost a gradient of all T in the backward.
    """
    decay = log_decay(g, A_log, dt_bias, gate=gate, lower_bound=-5.0).exp()
    rows = [unit(q)[0] * q.shape[-1] ** -0.5, unit(k)[0], v[0], decay[0], beta.sigmoid()[0]]
    S, outputs = state[0], []
    for qt, kt, vt, at, bt in zip(*(one.unbind(0) for one in rows), strict=True):
        S = S * at[..., None]
        missing = vt - torch.bmm(kt[:, None], S)[:, 0]
        S = torch.baddbmm(S, (bt[:, None] * kt)[..., None], missing[:, None])
        outputs.append(torch.bmm(qt[:, None], S)[:, 0])
    return torch.stack(outputs)[None], S[None]


def exact(gate: str, tensors: Given) -> dict[str, Tensor]:
    return results(lambda *t: recurrence(*t, gate=gate), tensors, torch.float64)


def ours(gate: str) -> Way:
    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        o, final = kda(*tensors, gate=gate, output_final_state=True)
        assert final is not None
        return o, final

    return run


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each tensor; ``inf`` where a value is not finite."""
    return {
        name: float((found[name] - one).norm() / one.norm()) if bool(found[name].isfinite().all()) else float("inf")
        for name, one in expected.items()
    }


def measured(setting: str, gate: str, device: str, rival: Way) -> dict[str, float]:
    """Errors of every tensor by both, and the largest ratio of ours to the rival's."""
    tensors = given(setting, device)
    expected = exact(gate, tensors)
    own = errors(results(ours(gate), tensors), expected)
    with compiled_at_once():
        other = errors(results(rival, tensors), expected)
    metrics = {f"ours_{name}": value for name, value in own.items()}
    metrics |= {f"fla_{name}": value for name, value in other.items()}
    return metrics | {"worst_ratio": max(own[name] / other[name] for name in own)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="default: all")
    parser.add_argument("--append", action="store_true", help="add the lines to benchmarks/results")
    args = parser.parse_args(arguments)
    for setting in args.settings or SIZES:
        for gate in GATES:
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
