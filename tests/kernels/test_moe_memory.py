"""Rows that are alive inside the backward of expert layers: each goes when nothing after it reads it.

Every allocation of the kernels' Python side is seen (``new_empty``, ``empty_like``, ``empty``), and a storage counts
until its last owner has let it go, autograd's saved tensors included.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.

Legend: T tokens, K experts a token, R = T·K rows, E experts, H hidden, I expert width, F = 2I, r rank.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="is already inside")
def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("../test_moe_memory.py")


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

    from shardwright.kernels.grouped_lora_mlp import compute
    from shardwright.kernels.grouped_lora_mlp.contract import Activation
    from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp
    from shardwright.kernels.moe_layer import compute as moe_compute
    from shardwright.kernels.moe_layer.op import moe_layer
    from shardwright.kernels.packed_experts import cases, workspace
    from shardwright.kernels.packed_experts import compute as packed_compute
    from shardwright.kernels.packed_experts import configs as packed_configs
    from shardwright.kernels.packed_experts.op import packed_experts

T, K, E, H, I, RANK = 64, 8, 8, 72, 32, 2
R, F, BYTES = T * K, 2 * I, 4
LAUNCHES = ("launch_product", "launch_gate_up", "launch_shrink", "launch_adapter_grads", "launch_activation_bwd",
            "launch_combine", "launch_weight_grad", "launch_down", "launch_dx")  # fmt: skip
SMALL = 40000
"""Bytes of all that is not rows of H, I or F values: factors' gradients, low-rank products, lists of tiles."""


class Memory:
    """Bytes of storages that are alive, of those that were made while it watched."""

    def __init__(self) -> None:
        self.made: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def live(self) -> int:
        return sum(size for storage, size in self.made if not storage.expired())

    def take(self, made: Tensor) -> Tensor:
        gc.collect()  # a launch of triton's interpreter leaves closures that refer to themselves and to its arguments
        storage = made.untyped_storage()
        self.made.append((StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.live())
        return made


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """Allocations are seen; launches, which allocate nothing, are left out."""
    memory = Memory()
    with monkeypatch.context() as patch:
        for room in (compute, moe_compute, packed_compute, packed_compute.launches):
            for name in LAUNCHES:
                if hasattr(room, name):
                    patch.setattr(room, name, lambda *given, **named: None)
        for owner, name in ((Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty")):
            plain = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, plain=plain, **k: memory.take(plain(*a, **k)))
        yield memory


def draw(*shape: int, seed: int) -> Tensor:
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def factors(gated: bool, dtype: torch.dtype = torch.float32, rank: int = RANK) -> list[Tensor]:
    width = F if gated else I
    shapes = (E, rank, H), (E, width, rank), (E, rank, I), (E, H, rank)
    return [draw(*shape, seed=5 + n).to(dtype).requires_grad_() for n, shape in enumerate(shapes)]


def adapters(given: list[Tensor]) -> dict[str, Adapter]:
    return {"up": Adapter(*given[:2], 0.5), "low": Adapter(*given[2:], 0.5)} if given else {}


def most_alive(
    layer: Callable[[Tensor], Tensor], leaves: list[Tensor], recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> int:
    """The most bytes alive at once in the backward, of what was made in both passes."""
    with watched(monkeypatch) as memory:
        y = checkpoint(layer, leaves[0], use_reentrant=False) if recomputed else layer(leaves[0])
        dy, end = torch.ones(y.shape, dtype=y.dtype), get_gradient_edge(y)
        del y
        memory.most = 0
        torch.autograd.grad(end, leaves, dy)
        return memory.most


def whole(gated: bool, lora: bool) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    x, logits = draw(T, H, seed=1).requires_grad_(), draw(T, E, seed=2).requires_grad_()
    stacks = draw(E, F if gated else I, H, seed=3), draw(E, H, I, seed=4)
    given = factors(gated) if lora else []
    weights, ids = logits.detach().softmax(-1).topk(K)
    weights.requires_grad_()

    def layer(x: Tensor) -> Tensor:
        activation = Activation("swiglu" if gated else "relu2")
        return moe_layer(x, ids, weights, *stacks, **adapters(given), activation=activation)

    return layer, [x, weights, *given]


def received() -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """Rows that no other tensor holds, as a dispatch makes them."""
    x, given = draw(R, H, seed=1).requires_grad_(), factors(True)
    stacks = draw(E, F, H, seed=3), draw(E, H, I, seed=4)
    counts = torch.tensor([R // 2, 0, R // 4, R // 8, R // 8, 0, 0, 0])

    def layer(x: Tensor) -> Tensor:
        rows = x.new_empty(x.shape).copy_(x)
        return grouped_lora_mlp(rows, counts, *stacks, **adapters(given))

    return layer, [x, *given]


@inside
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "frozen"])
@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "kept"])
def test_beside_the_rows_of_dx_only_one_gradient_is_alive(
    gated: bool, lora: bool, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole layer: dgu stands where gu stood, dh where h stood. h itself outlives dh only where autograd holds it,
    which it does of a layer that is not recomputed."""
    layer, leaves = whole(gated, lora)
    most = most_alive(layer, leaves, recomputed, monkeypatch)
    width = F if gated else I
    held = I if lora and not recomputed else 0
    tokens = 2 * T * H * BYTES
    at_dx, at_dh = (width + H + held) * R * BYTES, (width + I) * R * BYTES
    assert at_dx <= most <= max(at_dx, at_dh) + tokens + SMALL


@inside
def test_received_rows_go_before_their_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_lora_mlp, recomputed: at most what its forward leaves, x, gu and h, beside what that gives, y."""
    layer, leaves = received()
    most = most_alive(layer, leaves, True, monkeypatch)
    assert (F + H) * R * BYTES <= most <= (2 * H + F + I) * R * BYTES + SMALL


@inside
@pytest.mark.parametrize("dequantise", [True, False], ids=["copied", "decoded"])
def test_packed_experts_let_go_too(dequantise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a copy of the stacks at most what the forward leaves and gives; decoded in the loop dgu is beside gu, until
    the activation is differentiated."""
    rows, hidden, width, rank = 192, 64, 64, 4
    monkeypatch.setattr(packed_configs, "dequantises", lambda *given, **named: dequantise)
    stacks = cases.stack(E, 2 * width, hidden, "cpu", 1), cases.stack(E, hidden, width, "cpu", 2)
    counts = torch.tensor([90, 0, 50, 52, 0, 0, 0, 0])
    sizes = (E, rank, hidden), (E, 2 * width, rank), (E, rank, width), (E, hidden, rank)
    given = [draw(*size, seed=3 + n).bfloat16().requires_grad_() for n, size in enumerate(sizes)]
    x = draw(rows, hidden, seed=9).bfloat16().requires_grad_()
    workspace.release()
    workspace.dequantised(stacks)  # so that the copies are not counted

    def layer(x: Tensor) -> Tensor:
        received = x.new_empty(x.shape).copy_(x)
        return packed_experts(received, counts, *stacks, **adapters(given))

    most = most_alive(layer, [x, *given], True, monkeypatch)
    forward, backward = 2 * hidden + 3 * width, hidden + 4 * width
    learned = sum(factor.numel() for factor in given) * 2
    assert most <= (forward if dequantise else max(forward, backward)) * rows * 2 + learned + 8192
    workspace.release()


@inside
@pytest.mark.parametrize("of", ["whole", "received", "packed"])
def test_a_retained_graph_keeps_its_rows(of: str) -> None:
    """Twice through one graph, then a last time, then recomputed: the same bits, which rows written over gu or h would
    not give."""
    x, counts = draw(12, 64, seed=1), torch.tensor([7, 0, 4])
    weights = draw(12, 2, seed=2).requires_grad_()
    ids = torch.tensor([[0, 2], [2, 1], [0, 1]]).repeat(4, 1)
    stacks = draw(3, 64, 64, seed=3), draw(3, 64, 32, seed=4)
    sizes = (3, 4, 64), (3, 64, 4), (3, 4, 32), (3, 64, 4)
    dtype = torch.bfloat16 if of == "packed" else torch.float32
    given = [draw(*size, seed=5 + n).to(dtype).requires_grad_() for n, size in enumerate(sizes)]
    packed = [cases.stack(3, N, depth, "cpu", N + depth) for N, depth in ((128, 64), (64, 64))]
    if of == "packed":
        sizes = (3, 4, 64), (3, 128, 4), (3, 4, 64), (3, 64, 4)
        given = [draw(*size, seed=5 + n).to(dtype).requires_grad_() for n, size in enumerate(sizes)]

    def layer(x: Tensor) -> Tensor:
        if of == "whole":
            return moe_layer(x, ids, weights, *stacks, **adapters(given))
        if of == "received":
            return grouped_lora_mlp(x, counts, *stacks, **adapters(given))
        return packed_experts(x, counts, *packed, **adapters(given))

    leaves = [x.to(dtype).requires_grad_(), *([weights] if of == "whole" else []), *given]
    y, again = layer(leaves[0]), checkpoint(layer, leaves[0], use_reentrant=False)
    dy = draw(*y.shape, seed=30).to(dtype)
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    last, recomputed = (torch.autograd.grad(of_graph, leaves, dy) for of_graph in (y, again))
    for one, *others in zip(first, second, last, recomputed, strict=True):
        assert float(one.abs().max()) > 0
        assert all(torch.equal(one, other) for other in others)
