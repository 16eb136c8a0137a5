"""The Hopper product on a Hopper GPU: every layout, rank and activation against fp64 and the portable product."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

from shardwright.kernels import tuned  # noqa: E402
from shardwright.kernels.grouped_lora_mlp import configs  # noqa: E402
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout  # noqa: E402
from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp  # noqa: E402
from shardwright.kernels.grouped_lora_mlp.reference import grouped_lora_mlp_reference  # noqa: E402
from shardwright.kernels.moe_layer.op import moe_layer  # noqa: E402

E, H, I = 8, 192, 200
COUNTS = [462, 366, 0, 192, 180, 65, 20, 96]
"""Two and three tiles, none, one whole, a ragged one, and one row more than a consumer owns. Last rows of 14, 1, 20 and
32 lie across."""


@pytest.fixture(params=[True, False], ids=["hopper", "portable"])
def hopper(request: pytest.FixtureRequest) -> Iterator[bool]:
    with tuned.override("grouped_lora_mlp", "way", configs.Way(request.param)):
        yield request.param


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("rank", "order", "kind", "interleaved"),
    [
        (0, "out_in", "swiglu", False),
        (16, "out_in", "situ", False),
        (64, "in_out", "clamped_swiglu", True),
        (16, "out_in", "swiglu", True),
        (32, "in_out", "swiglu", False),
    ],
)
def test_rows_and_gradients(hopper: bool, rank: int, order: str, kind: str, interleaved: bool) -> None:
    torch.manual_seed(rank + 7)
    out_in, F = order == "out_in", 2 * I
    x = draw(sum(COUNTS) + 9, H).requires_grad_()
    gate_up = draw(E, F, H) / H**0.5
    down = draw(E, H, I) / I**0.5
    counts = torch.tensor(COUNTS, device="cuda")
    factors = [draw(E, rank, H) / H**0.5, draw(E, F, rank), draw(E, rank, I) / I**0.5, draw(E, H, rank)] if rank else []
    leaves = [x, *(f.requires_grad_() for f in factors)]
    activation, layout = Activation(kind, (1.7, 1.3, 0.5)), Layout(order, interleaved)  # type: ignore[arg-type]
    up = Adapter(leaves[1], leaves[2], 0.5) if rank else None
    low = Adapter(leaves[3], leaves[4], 0.25) if rank else None
    stored = (gate_up, down) if out_in else (gate_up.mT.contiguous(), down.mT.contiguous())
    y = grouped_lora_mlp(x, counts, *stored, up=up, low=low, activation=activation, layout=layout)
    dy = draw(*y.shape)
    found = torch.autograd.grad(y, leaves, dy)

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    pairs = [(wide[1], wide[2], 0.5), (wide[3], wide[4], 0.25)] if rank else [None, None]
    right = grouped_lora_mlp_reference(
        wide[0], counts, *(w.double() for w in stored), pairs[0], pairs[1], activation, layout
    )
    wanted = torch.autograd.grad(right, wide, dy.double())
    plain = [leaf.detach().requires_grad_() for leaf in leaves]
    pairs = [(plain[1], plain[2], 0.5), (plain[3], plain[4], 0.25)] if rank else [None, None]
    eager = grouped_lora_mlp_reference(plain[0], counts, *stored, pairs[0], pairs[1], activation, layout)
    others = torch.autograd.grad(eager, plain, dy)
    names = ("y", "dx", "a", "b", "c", "d")
    for name, ours, plainly, truth in zip(names, (y, *found), (eager, *others), (right, *wanted), strict=False):
        error, allowed = (float((one.double() - truth).norm() / truth.norm()) for one in (ours, plainly))
        # A clamp's gradient jumps: whoever rounds before it to bf16 puts some values on its other side.
        assert error < max(1.2e-2, 1.1 * allowed), (name, error, allowed)
    assert not y[sum(COUNTS) :].any() and not found[0][sum(COUNTS) :].any()


@pytest.mark.parametrize(("rank", "order", "interleaved"), [(0, "out_in", False), (16, "in_out", True)])
def test_biases(hopper: bool, rank: int, order: str, interleaved: bool) -> None:
    """Both products' epilogues add the bias of their own columns, ragged ones too."""
    torch.manual_seed(rank + 3)
    x, counts = draw(sum(COUNTS), H), torch.tensor(COUNTS, device="cuda")
    gate_up, down, up_bias, down_bias = draw(E, 2 * I, H) / H**0.5, draw(E, H, I) / I**0.5, draw(E, 2 * I), draw(E, H)
    if order == "in_out":
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    low = (draw(E, rank, I) / I**0.5, draw(E, H, rank), 0.25) if rank else None
    how = Activation("clamped_swiglu", (7.0, 1.7, 1.0)), Layout(order, interleaved)  # type: ignore[arg-type]
    biases = {"up_bias": up_bias, "down_bias": down_bias}
    y = grouped_lora_mlp(
        x, counts, gate_up, down, low=None if low is None else Adapter(*low), activation=how[0], layout=how[1], **biases
    )
    wide = [tensor.double() for tensor in (x, gate_up, down, up_bias, down_bias)]
    pair = None if low is None else (low[0].double(), low[1].double(), low[2])
    truth = grouped_lora_mlp_reference(wide[0], counts, wide[1], wide[2], None, pair, *how, wide[3], wide[4])
    assert float((y.double() - truth).norm() / truth.norm()) < 1.2e-2


@pytest.mark.parametrize("rank", [0, 16])
def test_gathered_rows_have_the_bits_of_contiguous_ones(rank: int) -> None:
    """Rows past a tile's end are zeros where rows are gathered, and another expert's rows where they are not."""
    torch.manual_seed(rank + 5)
    ids = torch.repeat_interleave(torch.arange(E, device="cuda"), torch.tensor(COUNTS, device="cuda"))[:, None]
    ids = ids[torch.randperm(len(ids), device="cuda")]
    x, gate_up, down = draw(len(ids), H), draw(E, 2 * I, H) / H**0.5, draw(E, H, I) / I**0.5
    up = Adapter(draw(E, rank, H) / H**0.5, draw(E, 2 * I, rank), 0.5) if rank else None
    with tuned.override("grouped_lora_mlp", "way", configs.Way(True)):
        layer = moe_layer(x, ids, torch.ones_like(ids, dtype=torch.bfloat16), gate_up, down, up=up)
        order = ids.flatten().argsort(stable=True)
        rows = grouped_lora_mlp(x[order], torch.tensor(COUNTS, device="cuda"), gate_up, down, up=up)
    assert float(rows.float().norm()) > 0 and torch.equal(layer[order], rows)


def test_same_bits_every_run(hopper: bool) -> None:
    x, gate_up, down = draw(sum(COUNTS), H), draw(E, 2 * I, H), draw(E, H, I)
    counts = torch.tensor(COUNTS, device="cuda")
    first = grouped_lora_mlp(x, counts, gate_up, down)
    assert all(torch.equal(first, grouped_lora_mlp(x, counts, gate_up, down)) for _ in range(5))


def test_stacks_past_two_to_the_31(hopper: bool) -> None:
    """The last of 80 experts of 4096 x 8192 starts 2.6e9 values into its stack."""
    experts, width, hidden = 80, 2048, 8192
    x, one = draw(200, hidden), draw(2 * width, hidden) / hidden**0.5
    gate_up = torch.empty((experts, 2 * width, hidden), device="cuda", dtype=torch.bfloat16)
    gate_up[-1] = one
    down = torch.empty((experts, hidden, width), device="cuda", dtype=torch.bfloat16)
    down[-1] = draw(hidden, width) / width**0.5
    counts = torch.zeros(experts, dtype=torch.int64, device="cuda")
    counts[-1] = 200
    alone = grouped_lora_mlp(x, counts[-1:], gate_up[-1:].contiguous(), down[-1:].contiguous())
    assert torch.equal(grouped_lora_mlp(x, counts, gate_up, down), alone)
