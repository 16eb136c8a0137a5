"""Biases, learning stacks, padded rows, and the launches that are one where they were several.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.

Legend: T tokens, K experts a token, E experts, R rows, H hidden, I expert width, F = 2I, r rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="is already inside")
def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("../test_moe_training.py")


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

    from shardwright.kernels import tuned
    from shardwright.kernels.grouped_lora_mlp import configs as grouped_configs
    from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
    from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp
    from shardwright.kernels.grouped_lora_mlp.reference import grouped_lora_mlp_reference
    from shardwright.kernels.moe_layer.op import moe_layer
    from shardwright.kernels.moe_layer.reference import moe_layer_reference
    from shardwright.kernels.permute import configs as permute_configs
    from shardwright.kernels.permute.op import combine, gather_rows, route
    from shardwright.kernels.permute.reference import route_reference
    from shardwright.kernels.permute.tiles import make_tiles
    from shardwright.kernels.verify import poisoned_memory
    from shardwright.schemas.errors import KernelError

E, H, I, RANK, T, K = 4, 24, 16, 4, 9, 2
FIRST = ("x", "weights", "gate_up", "down", "up_bias", "down_bias")
FACTORS = ("up_a", "up_b", "down_a", "down_b")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids() -> Tensor:
    """Expert 2 gets no token; one slot is a sentinel."""
    found = torch.tensor([0, 1, 3])[torch.randint(0, 3, (T, K), generator=torch.Generator().manual_seed(4))]
    found[3, 1] = -1
    return found


def layer(flips: bool = False) -> dict[str, Tensor]:
    """Every tensor of a layer, by name."""
    shapes = (
        ((T, H), 1.0), ((T, K), 0.5), ((E, 2 * I, H), H**-0.5), ((E, H, I), I**-0.5), ((E, 2 * I), 0.7), ((E, H), 0.7),
        ((E, RANK, H), H**-0.5), ((E, 2 * I, RANK), 0.5), ((E, RANK, I), I**-0.5), ((E, H, RANK), 0.5),
    )  # fmt: skip
    found = {n: draw(*s, seed=i) * f for i, (n, (s, f)) in enumerate(zip((*FIRST, *FACTORS), shapes, strict=True))}
    if flips:
        found |= {name: found[name].mT.contiguous() for name in ("gate_up", "down")}
    return found


def outcome(
    function: Callable[..., Tensor], given: dict[str, Tensor], learning: tuple[str, ...], wide: bool
) -> dict[str, Tensor]:
    """Output and gradients of what learns, by name; in fp64 where ``wide``."""
    leaves = {n: (t.double() if wide else t.clone()).requires_grad_(n in learning) for n, t in given.items()}
    y = function(**leaves)
    dy = draw(*y.shape, seed=40).to(y.dtype)
    found = torch.autograd.grad(y, [leaves[name] for name in learning], dy)
    return {"y": y.detach(), **dict(zip(learning, found, strict=True))}


def close(near: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert near.keys() == exact.keys()
    for name, right in exact.items():
        error = float((near[name].double() - right).norm() / right.norm())
        assert error < 3e-6, (name, error)


def whole(
    activation: Any, layout: Any, lora: bool, biased: bool, trains: bool, reference: bool
) -> Callable[..., Tensor]:
    """``moe_layer``, or its reference, as a function of a layer's tensors."""
    experts = ids()

    def run(**t: Tensor) -> Tensor:
        biases: Any = {n: t[n] for n in ("up_bias", "down_bias")} if biased else {}
        pairs = ((t["up_a"], t["up_b"], 0.5), (t["down_a"], t["down_b"], 0.25)) if lora else (None, None)
        first = t["x"], experts, t["weights"], t["gate_up"], t["down"]
        if reference:
            return moe_layer_reference(*first, *pairs, activation, layout, **biases)
        up, low = (None if pair is None else Adapter(*pair) for pair in pairs)
        return moe_layer(*first, up=up, low=low, activation=activation, layout=layout, trains_base=trains, **biases)

    return run


@inside
@pytest.mark.parametrize(
    ("order", "interleaved", "lora"), [("out_in", False, False), ("in_out", True, True)], ids=["plain", "gpt-oss-lora"]
)
def test_biases_of_experts(order: Any, interleaved: bool, lora: bool) -> None:
    """As gpt-oss has them (clamped SwiGLU, columns interleaved, [E, in, out]) and in plain order: output, dx, the
    routing weights' gradient, which holds the down bias, and the adapters'."""
    given = layer(flips=order == "in_out")
    how = Activation("clamped_swiglu", (1.2, 1.7, 1.0)), Layout(order, interleaved)
    learning = ("x", "weights", *(FACTORS if lora else ()))
    with poisoned_memory():
        near = outcome(whole(*how, lora, True, False, False), given, learning, wide=False)
    close(near, outcome(whole(*how, lora, True, False, True), given, learning, wide=True))
    bare = outcome(whole(*how, lora, False, False, True), given, learning, wide=True)
    assert all(not torch.allclose(near[n].double(), bare[n], rtol=1e-3) for n in ("y", "x", "weights"))


@inside
@pytest.mark.parametrize(("order", "lora"), [("out_in", False), ("in_out", True)])
def test_stacks_learn_where_asked(order: Any, lora: bool) -> None:
    """Full training of the whole layer, with adapters beside it and without; an expert without rows gets zeros."""
    given = layer(flips=order == "in_out")
    how = Activation(), Layout(order)
    learning = ("x", "weights", "gate_up", "down", *(FACTORS if lora else ()))
    with poisoned_memory():
        near = outcome(whole(*how, lora, True, True, False), given, learning, wide=False)
    close(near, outcome(whole(*how, lora, True, True, True), given, learning, wide=True))
    assert near["gate_up"][2].abs().sum() == near["down"][2].abs().sum() == 0


@inside
def test_one_stack_may_learn_alone_and_rows_may_be_received() -> None:
    """``grouped_lora_mlp`` with a learning down stack and biases; rows of nobody add nothing."""
    given, counts = {n: t for n, t in layer().items() if n not in FACTORS}, torch.tensor([3, 0, 4, 1])

    def run(op: Any, tail: tuple[Any, ...], **named: Any) -> Callable[..., Tensor]:
        def call(x: Tensor, weights: Tensor, **t: Tensor) -> Tensor:
            biases = {"up_bias": t["up_bias"], "down_bias": t["down_bias"]}
            found: Tensor = op(x, counts, t["gate_up"], t["down"], *tail, **biases, **named)
            return found

        return call

    with poisoned_memory():
        near = outcome(run(grouped_lora_mlp, (), trains_base=True), given, ("x", "down"), wide=False)
    close(
        near, outcome(run(grouped_lora_mlp_reference, (None, None, Activation(), Layout())), given, ("x", "down"), True)
    )
    assert near["y"][8:].abs().sum() == near["x"][8:].abs().sum() == near["down"][1].abs().sum() == 0


@inside
@pytest.mark.parametrize("multiple", [2, 8, 5])
def test_padded_rows(multiple: int) -> None:
    """Whole multiples an expert, none for one without rows; zeros in, never read, no gradient out."""
    given = ids()
    at, (counts, _, _) = route(given, E, multiple), route_reference(given, E)
    padded = (counts + multiple - 1) // multiple * multiple
    assert torch.equal(at.routed.long(), counts) and torch.equal(at.counts.long(), padded) and at.counts[2] == 0
    ends = padded.cumsum(0)
    starts = (ends - padded).tolist()
    owner = {int(at.place[t, k]): (t, k) for t in range(T) for k in range(K) if given[t, k] >= 0}
    for e, (start, count) in enumerate(zip(starts, counts.tolist(), strict=True)):
        assert all(given[owner[row]] == e for row in range(start, start + count))
    free = [row for row in range(at.rows) if row not in owner]
    assert len(owner) == T * K - 1 and at.entry[free].eq(-1).all()
    assert all(int(at.entry[row]) == t * K + k for row, (t, k) in owner.items())
    _, first, last = (t[: int(at.tiles.count)].tolist() for t in at.tiles.lists())
    assert [row for a, b in zip(first, last, strict=True) for row in range(a, b)] == list(range(int(ends[-1])))
    x = draw(T, H).requires_grad_()
    with poisoned_memory():
        rows = gather_rows(x, at)
        given_back = torch.where(rows.detach().abs().sum(1, keepdim=True) > 0, 1.0, torch.nan)
        (dx,) = torch.autograd.grad(rows, x, given_back.expand_as(rows))
    assert rows[free].abs().sum() == 0
    assert torch.equal(dx, (given >= 0).sum(1, keepdim=True).expand(T, H).float())
    y = torch.full((at.rows, H), float("nan"))
    y[list(owner)] = draw(len(owner), H, seed=1)
    leaves = [y.requires_grad_(), draw(T, K, seed=2).requires_grad_()]
    out = combine(leaves[0], at, leaves[1])
    dy, dweights = torch.autograd.grad(out.sum(), leaves)
    assert out.isfinite().all() and dweights.isfinite().all()
    assert dy[free].abs().sum() == 0 and dy[list(owner)].abs().sum() > 0


@inside
def test_experts_on_padded_rows_are_those_on_packed_ones() -> None:
    """The split path, padded to whole multiples of 8, gives the layer's own numbers, biases included."""
    given, learning = layer(), ("x", "weights", "up_a", "up_b", "down_a", "down_b")

    def split(**t: Tensor) -> Tensor:
        at = route(ids(), E, 8)
        up, low = Adapter(t["up_a"], t["up_b"], 0.5), Adapter(t["down_a"], t["down_b"], 0.25)
        biases = {"up_bias": t["up_bias"], "down_bias": t["down_bias"]}
        y = grouped_lora_mlp(gather_rows(t["x"], at), at.counts, t["gate_up"], t["down"], up=up, low=low, **biases)
        return combine(y, at, t["weights"])

    with poisoned_memory():
        near = outcome(split, given, learning, wide=False)
    close(near, outcome(whole(Activation(), Layout(), True, True, False, True), given, learning, wide=True))


@inside
@pytest.mark.parametrize(("tokens", "slots", "experts"), [(700, 3, 5), (90, 16, 200), (1, 1, 1)])
def test_places_in_one_launch_are_those_of_three(tokens: int, slots: int, experts: int) -> None:
    """Several chunks, sentinels, more experts than a chunk's tile: all metadata, bit for bit."""
    given = torch.randint(-1, experts + 1, (tokens, slots), generator=torch.Generator().manual_seed(1))
    found = []
    for choice in (True, False):
        with tuned.override("permute", "metadata", permute_configs.Metadata(choice)), poisoned_memory():
            found.append(route(given, experts))
    one, three = found
    count, rows = int(three.tiles.count), int(three.counts.sum())
    assert torch.equal(one.counts, three.counts) and torch.equal(one.place, three.place)
    assert torch.equal(one.entry[:rows], three.entry[:rows]) and torch.equal(one.tiles.offsets, three.tiles.offsets)
    assert int(one.tiles.count) == count
    for a, b in zip(one.tiles.lists(), three.tiles.lists(), strict=True):
        assert torch.equal(a[:count], b[:count])


@inside
def test_a_pair_of_adapter_gradients_is_two_bit_for_bit() -> None:
    given, found = layer(), []
    for paired in (True, False):
        with tuned.override("grouped_lora_mlp", "adapter_grads", grouped_configs.AdapterGrads(paired)):
            run = whole(Activation(), Layout(), True, False, False, False)
            found.append(outcome(run, given, ("x", "weights", *FACTORS), wide=False))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(found[0][name].abs().sum() > 0 for name in FACTORS)


@inside
def test_routing_weights_alone() -> None:
    """x wants nothing: the routing weights' gradient comes without the sum to tokens, and is the same."""
    given = layer()
    run = whole(Activation(), Layout(), True, True, False, False)
    alone, beside = (outcome(run, given, names, wide=False) for names in (("weights",), ("x", "weights")))
    assert torch.equal(alone["weights"], beside["weights"]) and alone["weights"].abs().sum() > 0


@inside
def test_traced_calls_give_the_same_bits() -> None:
    """Through torch.library, as torch.compile sees it: a layer of biases, adapters and learning stacks."""
    given, learning = layer(), ("x", "weights", *FACTORS, "gate_up", "down")
    run = whole(Activation(), Layout(), True, True, True, False)
    plain = outcome(run, given, learning, wide=False)
    traced = outcome(lambda **t: torch.compile(run, backend="aot_eager", fullgraph=True)(**t), given, learning, False)
    assert all(torch.equal(plain[name], traced[name]) for name in plain)


@inside
@pytest.mark.parametrize(
    ("counts", "cut"),
    [([3, 0, 100, 2], [3, 0, 6, 0]), ([-5, 4, 2, 1], [0, 4, 2, 1]), ([2**31, 1, 1, 1], [9, 0, 0, 0])],
)
def test_counts_past_the_rows_are_cut(counts: list[int], cut: list[int]) -> None:
    """Nothing is read or written past the rows, whatever the counts say: all tiles lie inside."""
    given = [tensor for name, tensor in layer().items() if name in ("x", "gate_up", "down")]
    x, *stacks = given
    with poisoned_memory():
        y = grouped_lora_mlp(x, torch.tensor(counts), *stacks)
    tiles = make_tiles(torch.tensor(counts), T)
    used = int(tiles.count)
    assert used <= tiles.most and all(int(t[:used].max()) <= T for t in tiles.lists()[1:])
    assert tiles.offsets.tolist() == [0, *torch.tensor(cut).cumsum(0).tolist()]
    assert torch.equal(y, grouped_lora_mlp(x, torch.tensor(cut), *stacks))


@inside
def test_what_is_refused() -> None:
    given = {name: tensor for name, tensor in layer().items() if name not in FACTORS}
    x, weights, gate_up, down, up_bias, down_bias = given.values()
    counts = torch.tensor([3, 0, 4, 1])
    bad: dict[str, tuple[str, Callable[[], object]]] = {
        "bias of another width": ("wrong-shape", lambda: grouped_lora_mlp(x, counts, gate_up, down, up_bias=down_bias)),
        "bias of another dtype": (
            "dtype-mixed", lambda: grouped_lora_mlp(x, counts, gate_up, down, down_bias=down_bias.bfloat16()),
        ),
        "bias with gaps": (
            "not-contiguous",
            lambda: grouped_lora_mlp(x, counts, gate_up, down, down_bias=down_bias.repeat(1, 2)[:, ::2]),
        ),
        "learning bias": (
            "trains-the-base",
            lambda: moe_layer(x, ids(), weights, gate_up, down, up_bias=up_bias.clone().requires_grad_()),
        ),
        "learning bias beside a learning base": (
            "trains-the-base",
            lambda: grouped_lora_mlp(
                x, counts, gate_up, down, up_bias=up_bias.clone().requires_grad_(), trains_base=True
            ),
        ),
        "multiple of nothing": ("bad-parameter", lambda: route(ids(), E, 0)),
        "multiple too large": ("bad-parameter", lambda: route(ids(), E, 4097)),
        "rows of another routing": ("wrong-shape", lambda: combine(draw(T * K, H), route(ids(), E, 8), weights)),
    }  # fmt: skip
    for what, (code, call) in bad.items():
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == f"kernel/{code}", what
