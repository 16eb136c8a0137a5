"""How the packed experts are verified, timed and compiled.

The base is data of a case: codes and scales are drawn once for a shape, on the case's device. Every forward starts
with an empty workspace, so a dequantised copy is always made inside what is timed.

Legend: R rows, E experts, H hidden, I expert width, F = 2I, r rank.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, Function, OpSuite, Shape, normal_on_device, row_facts
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.grouped_lora_mlp.contract import Activation
from shardwright.kernels.grouped_lora_mlp.op import Adapter
from shardwright.kernels.launched import cases_of, meta, noted
from shardwright.kernels.packed_experts import contract, rivals, workspace
from shardwright.kernels.packed_experts.cost import cost
from shardwright.kernels.packed_experts.op import packed_experts
from shardwright.kernels.packed_experts.reference import packed_experts_reference
from shardwright.kernels.packed_experts.storage import PackedStack, mxfp4_bytes, mxfp4_stack

SITU = Activation("situ", (rivals.BETA, rivals.LINEAR_BETA, 0.0))
SCALINGS = (0.5, 0.25)
RANK = 16
SMALL: dict[tuple[int, int], tuple[int, ...]] = {
    (30, 4): (7, 0, 22, 1),
    (70, 3): (0, 70, 0),
    (50, 2): (20, 10),
    (0, 3): (0, 0, 0),
}
"""Rows of each expert: none, one, one hot expert, rows that belong to nobody, no rows at all."""


@cache
def counts(R: int, E: int, device: str) -> Tensor:
    """Rows of each expert; equal parts where the sizes are none of ``SMALL``."""
    equal = tuple(R // E + (e < R % E) for e in range(E))
    return torch.tensor(SMALL.get((R, E), equal), dtype=torch.int32, device=device)


def stack(E: int, N: int, K: int, device: str, seed: int) -> PackedStack:
    """Random codes, and scales that give a weight rows of about norm one."""
    generator = torch.Generator(device).manual_seed(seed)
    packed = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, device=device, generator=generator)
    middle = 126 - (K.bit_length() // 2)
    scale = torch.randint(
        middle - 2, middle + 1, (E, N, K // 32), dtype=torch.uint8, device=device, generator=generator
    )
    return mxfp4_stack(packed, scale)


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """x; values and scales of both stacks; and the adapters' four factors where the shape has a rank."""
    R, E, H, I, r = (shape.get(name, 0) for name in ("R", "E", "H", "I", "r"))
    up, low = stack(E, 2 * I, H, device, seed), stack(E, H, I, device, seed + 1)
    sizes: list[tuple[tuple[int, ...], float]] = [((R, H), 1.0)]
    if r:
        sizes += [((E, r, H), H**-0.5), ((E, 2 * I, r), r**-0.5), ((E, r, I), I**-0.5), ((E, H, r), r**-0.5)]
    x, *factors = (
        normal_on_device(size, dtype, device, seed + 2 + at).mul_(scale) for at, (size, scale) in enumerate(sizes)
    )
    return x, up.values, up.scales, low.values, low.scales, *factors


def stacks_of(base: tuple[Tensor, ...]) -> tuple[PackedStack, PackedStack]:
    return PackedStack(base[0], base[1], "mxfp4"), PackedStack(base[2], base[3], "mxfp4")


def fused(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """The operator, starting without a dequantised copy."""
    workspace.release()
    factors, up, low = given[4:], None, None
    if factors:
        up, low = Adapter(factors[0], factors[1], SCALINGS[0]), Adapter(factors[2], factors[3], SCALINGS[1])
    n = counts(x.shape[0], given[0].shape[0], str(x.device))
    return (packed_experts(x, n, *stacks_of(given), up=up, low=low, activation=SITU),)


def reference(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    factors, up, low = given[4:], None, None
    if factors:
        up, low = (factors[0], factors[1], SCALINGS[0]), (factors[2], factors[3], SCALINGS[1])
    n = counts(x.shape[0], given[0].shape[0], str(x.device))
    return (packed_experts_reference(x, n, *stacks_of(given), up, low, SITU),)


def rival(*, keeps: bool) -> Function:
    """Dequantise, then grouped products; the checkpoint's own byte order is prepared outside what is timed.

    Where biases are given it is gpt-oss's layer, else K3's.
    """
    made: dict[int, tuple[Tensor, tuple[rivals.Bytes, rivals.Bytes]]] = {}

    def mlp(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        held = made.get(id(given[0]))
        if held is None or held[0] is not given[0]:
            gate_up, down = stacks_of(given)
            made.clear()
            made[id(given[0])] = held = (given[0], (mxfp4_bytes(gate_up), mxfp4_bytes(down)))
        ends = counts(x.shape[0], given[0].shape[0], str(x.device)).cumsum(0).to(torch.int32)
        between = rivals.gpt_oss(given[4], given[5], ends, x.shape[0]) if given[4:] else rivals.k3()
        return (rivals.DequantiseThenGrouped.apply(x, ends, *held[1], keeps, between),)

    return mlp


def facts(case: BenchCase) -> dict[str, float]:
    """The distribution of rows over experts."""
    return row_facts(counts(case.shape["R"], case.shape["E"], "cuda"))


NARROW = {"zero_tail_kernel": "it only stores", "begin_kernel": "one count an expert, then stores alone"}
"""Kernels without a 16-byte load."""


def launched(label: str, size: Shape) -> tuple[AnyCase, ...]:
    """Every launch of the operator and its gradients at one size, as in training."""
    R, E, H, I, r = (size.get(n, 0) for n in ("R", "E", "H", "I", "r"))

    def call() -> Tensor:
        a, b, c, d = (meta(s, learns=True) for s in ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r)))
        up, low = (Adapter(a, b, SCALINGS[0]), Adapter(c, d, SCALINGS[1])) if r else (None, None)
        sizes = contract.shapes("mxfp4", E, 2 * I, H), contract.shapes("mxfp4", E, H, I)
        stacks = (PackedStack(meta(v, torch.uint8), meta(s, torch.int16), "mxfp4") for v, s in sizes)
        x, n = meta((R, H), learns=True), meta((E,), torch.int32)
        return packed_experts(x, n, *stacks, up=up, low=low, activation=SITU)

    why = "one register, kept once outside the loop"
    cases = noted(
        (case for case in cases_of(label, call) if "packed_experts" in case.kernel.fn.__module__),
        narrow=NARROW,
        spills={"packed_gate_up_kernel": (16, why)},
    )
    return tuple(cases)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    up, low = stack(2, 128, 64, device, 1), stack(2, 64, 64, device, 2)
    x, n = torch.ones((4, 64), device=device, dtype=torch.bfloat16), torch.tensor([2, 2], device=device)
    other = PackedStack(up.values, up.scales, "nf4")  # type: ignore[arg-type]
    narrow = torch.zeros((1, 4, 24), dtype=torch.uint8, device=device)
    few = torch.zeros((1, 4, 1), dtype=torch.uint8, device=device)
    return (
        BadInput("rows-of-fp32", "dtype-unsupported", lambda: packed_experts(x.float(), n, up, low)),
        BadInput("counts-of-other-experts", "wrong-shape", lambda: packed_experts(x, n[:1], up, low)),
        BadInput("stacks-exchanged", "wrong-shape", lambda: packed_experts(x, n, low, up)),
        BadInput("unknown-packing", "unknown-packing", lambda: packed_experts(x, n, other, low)),
        BadInput("width-of-half-a-block", "misaligned-width", lambda: mxfp4_stack(narrow[..., :16], few)),
        BadInput("scales-missing", "wrong-shape", lambda: mxfp4_stack(narrow, few.repeat(1, 1, 2))),
        BadInput(
            "interleaved-without-a-gate",
            "unknown-layout",
            lambda: packed_experts(x, n, up, low, activation=Activation("relu2"), interleaved=True),
        ),
    )


BASE = ("gate_up", "gate_up_scales", "down", "down_scales")
FACTORS = ("up_a", "up_b", "down_a", "down_b")
K3 = {"E": 14, "H": 3584, "I": 3072}
ROWS = {"2k": 2048, "4k": 4096, "64k": 65536}
"""Received rows: weights decoded in the loop; a dequantised copy in training alone; a copy always."""


def _suite(lora: bool) -> OpSuite:
    """``fwd+dx`` is the training pass of a frozen base: gradients of x and of the adapters."""
    prefix, rank = ("moe-mxfp4-lora", {"r": RANK}) if lora else ("moe-mxfp4", {})
    small = {"r": 6} if lora else {}
    bench = tuple(
        BenchCase(f"{prefix}/k3-ep64-{name}", {"R": R, **K3, **rank}, torch.bfloat16, ("fwd", "fwd+dx"))
        for name, R in ROWS.items()
    )
    again, kept = (lambda: rival(keeps=False)), (lambda: rival(keeps=True))
    return OpSuite(
        op="packed_experts",
        inputs=inputs,
        input_names=("x", *BASE, *FACTORS) if lora else ("x", *BASE),
        output_names=("y",),
        frozen=(),
        constant=BASE,
        fused=fused,
        reference=reference,
        cost=cost,
        rivals={} if lora else {"dequantise+grouped_mm": again, "dequantise_once+grouped_mm": kept},
        small_shapes=tuple({"R": R, "E": E, "H": 128, "I": 64, **small} for R, E in SMALL),
        large_shapes=(
            {"R": 900, "E": 7, "H": 1024, "I": 448, **rank},
            {"R": 6000, "E": 7, "H": 1024, "I": 448, **rank},
        ),
        bench=() if lora else bench,
        compile_cases=lambda: tuple(c for case in bench[:2] for c in launched(case.case, case.shape)),
        facts=facts,
        bad_inputs=None if lora else bad_inputs,
        dtypes=(torch.bfloat16,),
    )


SUITE, LORA_SUITE = _suite(False), _suite(True)
