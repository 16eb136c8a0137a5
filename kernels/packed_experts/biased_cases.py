"""How the packed experts with biases are verified, timed and compiled: gpt-oss's layer.

Gate and up rows alternate, biases are added before the activation and after the second product, and gate and up are
clamped. Drawn biases of the first product reach past the clamp.

Legend: R rows, E experts, H hidden, I expert width, F = 2I, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, OpSuite, Shape, normal_on_device
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.grouped_lora_mlp.contract import Activation
from shardwright.kernels.launched import cases_of, meta, noted
from shardwright.kernels.packed_experts import cases, contract, rivals, workspace
from shardwright.kernels.packed_experts.cases import BASE, SMALL, counts, stacks_of
from shardwright.kernels.packed_experts.cost import cost
from shardwright.kernels.packed_experts.op import packed_experts
from shardwright.kernels.packed_experts.reference import packed_experts_reference
from shardwright.kernels.packed_experts.storage import PackedStack

CLAMPED = Activation("clamped_swiglu", (rivals.LIMIT, rivals.SLOPE, 1.0))
BIASES = ("up_bias", "down_bias")
FAR, NEAR = 3.0, 0.5
"""Size of the biases before the activation, whose limit is 7, and after."""
GPT_OSS = {"H": 2880, "I": 2880}
SIZES = {"gpt-oss": {"R": 16384, "E": 128, **GPT_OSS}, "gpt-oss-20b": {"R": 32768, "E": 32, **GPT_OSS}}
"""4k tokens, top-4 of 128: 128 rows an expert, decoded in the loop. 8k tokens, top-4 of 32: 1,024 rows, a copy."""


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """x; values and scales of both stacks; ``up_bias [E, F]``, ``down_bias [E, H]``."""
    E, H, I = (shape[name] for name in ("E", "H", "I"))
    up_bias = normal_on_device((E, 2 * I), dtype, device, seed + 8).mul_(FAR)
    down_bias = normal_on_device((E, H), dtype, device, seed + 9).mul_(NEAR)
    return *cases.inputs(shape, dtype, device, seed), up_bias, down_bias


def fused(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """The operator, starting without a dequantised copy."""
    workspace.release()
    n = counts(x.shape[0], given[0].shape[0], str(x.device))
    up, low = stacks_of(given)
    before, after = given[4:]
    y = packed_experts(x, n, up, low, up_bias=before, down_bias=after, activation=CLAMPED, interleaved=True)
    return (y,)


def reference(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    n = counts(x.shape[0], given[0].shape[0], str(x.device))
    return (packed_experts_reference(x, n, *stacks_of(given), None, None, CLAMPED, True, *given[4:]),)


def launched(label: str, size: Shape) -> tuple[AnyCase, ...]:
    """Every launch of the operator and its gradient at one size, as in training."""
    R, E, H, I = (size[n] for n in ("R", "E", "H", "I"))

    def call() -> Tensor:
        sizes = contract.shapes("mxfp4", E, 2 * I, H), contract.shapes("mxfp4", E, H, I)
        up, low = (PackedStack(meta(v, torch.uint8), meta(s, torch.int16), "mxfp4") for v, s in sizes)
        x, n = meta((R, H), learns=True), meta((E,), torch.int32)
        before, after = meta((E, 2 * I)), meta((E, H))
        return packed_experts(x, n, up, low, up_bias=before, down_bias=after, activation=CLAMPED, interleaved=True)

    found = (case for case in cases_of(label, call) if "packed_experts" in case.kernel.fn.__module__)
    return noted(found, narrow=cases.NARROW)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    x = torch.ones((4, 64), dtype=torch.bfloat16, device=device)
    n = torch.tensor([2, 2], device=device)
    up, low = cases.stack(2, 128, 64, device, 1), cases.stack(2, 64, 64, device, 2)
    first, second = (torch.ones((2, width), dtype=torch.bfloat16, device=device) for width in (128, 64))
    learns = second.clone().requires_grad_()
    return (
        BadInput("bias-of-the-other-stack", "wrong-shape", lambda: packed_experts(x, n, up, low, up_bias=second)),
        BadInput("one-bias-for-all", "wrong-shape", lambda: packed_experts(x, n, up, low, down_bias=second[0])),
        BadInput("bias-of-fp32", "dtype-mixed", lambda: packed_experts(x, n, up, low, up_bias=first.float())),
        BadInput("bias-that-learns", "trains-the-base", lambda: packed_experts(x, n, up, low, down_bias=learns)),
    )


SUITE = OpSuite(
    op="packed_experts",
    inputs=inputs,
    input_names=("x", *BASE, *BIASES),
    output_names=("y",),
    frozen=(),
    constant=(*BASE, *BIASES),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={
        "dequantise+grouped_mm": lambda: cases.rival(keeps=False),
        "dequantise_once+grouped_mm": lambda: cases.rival(keeps=True),
    },
    small_shapes=tuple({"R": R, "E": E, "H": 128, "I": 64} for R, E in SMALL),
    large_shapes=({"R": 900, "E": 7, "H": 1024, "I": 448}, {"R": 6000, "E": 7, "H": 1024, "I": 448}),
    bench=tuple(
        BenchCase(f"moe-mxfp4/{name}", size, torch.bfloat16, ("fwd", "fwd+dx")) for name, size in SIZES.items()
    ),
    compile_cases=lambda: launched("moe-mxfp4/gpt-oss", SIZES["gpt-oss"]),
    facts=cases.facts,
    bad_inputs=bad_inputs,
    dtypes=(torch.bfloat16,),
)
