"""Which launch choices of the expert products are tuned, at which sizes, and how a candidate is judged.

One run makes all products of a layer, forward and backward, on evenly routed rows: a choice holds for all of them.

Legend: R rows, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.kernels import tuned
from shardwright.kernels.cases import Run, Shape, TuneCase, normal_on_device
from shardwright.kernels.grouped_lora_mlp import configs
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp
from shardwright.kernels.grouped_lora_mlp.reference import expert_mlp_reference

SEED, RANK = 41, 16
SIZES: tuple[Shape, ...] = (
    {"R": 65536, "E": 128, "H": 2048, "I": 768},
    {"R": 131072, "E": 896, "H": 2048, "I": 2048},
    {"R": 65536, "E": 256, "H": 7168, "I": 2048},
    {"R": 65534, "E": 14, "H": 3584, "I": 3072},
    {"R": 8192, "E": 128, "H": 2048, "I": 768},
)
"""The layers that are benchmarked: rows of a batch, on one device or on one of many; and one with few rows an expert,
which the portable product makes."""


def tune_cases() -> tuple[TuneCase, ...]:
    """The kernel of the products, the portable kernel's tile, and launches of adapters' gradients, at every size."""
    found = []
    for size in SIZES:
        R, E = size["R"], size["E"]
        bucket = tuned.bucket(R=R, E=E)
        with tuned.on(None):
            way, tile = configs.way(R, E), configs.product(2, R, E)
        ways = (configs.Way(True), configs.Way(False))
        tiles = tuple(configs.Tile(BN, 64, group, 8, stages) for BN, stages in ((256, 3), (128, 4)) for group in (1, 8))
        found.append(TuneCase("way", bucket, way, ways, _layer(size)))
        if not way.hopper:
            found.append(TuneCase("product", bucket, tile, tiles, _layer(size)))
        with tuned.on(None):
            pairs = configs.adapter_grads(R, E)
        both = (configs.AdapterGrads(True), configs.AdapterGrads(False))
        found.append(TuneCase("adapter_grads", bucket, pairs, both, _adapted(size)))
    return tuple(found)


def _layer(size: Shape) -> Callable[[], tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]]:
    R, E, H, I = (size[name] for name in ("R", "E", "H", "I"))
    rows = R // E

    def prepare() -> tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]:
        def draw(shape: tuple[int, ...], at: int, scale: float) -> Tensor:
            return normal_on_device(shape, torch.bfloat16, "cuda", SEED + at).mul_(scale)

        x = draw((R, H), 0, 1.0).requires_grad_()
        gate_up, down = draw((E, 2 * I, H), 1, H**-0.5), draw((E, H, I), 2, I**-0.5)
        dy = draw((R, H), 3, 1.0)
        counts = torch.full((E,), rows, dtype=torch.int32, device="cuda")
        few = x[:rows].detach().double().requires_grad_()
        y = expert_mlp_reference(few, gate_up[0].double(), down[0].double(), None, None, Activation(), Layout())
        (dx,) = torch.autograd.grad(y, few, dy[:rows].double())
        got: dict[str, Tensor] = {}

        def run() -> None:
            out = grouped_lora_mlp(x, counts, gate_up, down)
            (got["dx"],) = torch.autograd.grad(out, x, dy)
            got["y"] = out.detach()

        return run, lambda: [(got["y"][:rows], y.detach()), (got["dx"][:rows], dx)]

    return prepare


def _adapted(size: Shape) -> Callable[[], tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]]:
    """The same layer with adapters that learn; judged by the first expert's factors."""
    R, E, H, I = (size[name] for name in ("R", "E", "H", "I"))
    rows, shapes = R // E, ((E, RANK, H), (E, 2 * I, RANK), (E, RANK, I), (E, H, RANK))

    def prepare() -> tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]:
        def draw(shape: tuple[int, ...], at: int) -> Tensor:
            return normal_on_device(shape, torch.bfloat16, "cuda", SEED + at).mul_(shape[-1] ** -0.5)

        x, gate_up, down = draw((R, H), 0).mul_(H**0.5), draw((E, 2 * I, H), 1), draw((E, H, I), 2)
        factors = [draw(shape, 4 + at).requires_grad_() for at, shape in enumerate(shapes)]
        dy, counts = draw((R, H), 3), torch.full((E,), rows, dtype=torch.int32, device="cuda")
        few = [factor[0].detach().double().requires_grad_() for factor in factors]
        pairs = (few[0], few[1], 0.5), (few[2], few[3], 0.25)
        y = expert_mlp_reference(
            x[:rows].double(), gate_up[0].double(), down[0].double(), *pairs, Activation(), Layout()
        )
        exact = torch.autograd.grad(y, few, dy[:rows].double())
        got: list[Tensor] = []

        def run() -> None:
            up, low = Adapter(factors[0], factors[1], 0.5), Adapter(factors[2], factors[3], 0.25)
            got[:] = torch.autograd.grad(grouped_lora_mlp(x, counts, gate_up, down, up=up, low=low), factors, dy)

        return run, lambda: [(found[0], right) for found, right in zip(got, exact, strict=True)]

    return prepare
