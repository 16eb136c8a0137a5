"""Sparse attention's Hopper kernels on a device: every switch against fp64 and the portable kernels; memory.

Legend: T queries, S keys, H heads, K entries, B keys of an entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

from shardwright.kernels.dsa.attention import cases, hopper_launch, inputs  # noqa: E402
from shardwright.kernels.dsa.attention.op import dsa_attention  # noqa: E402
from shardwright.kernels.dsa.attention.reference import dsa_attention_reference  # noqa: E402
from shardwright.kernels.dsa.attention.visibility import bounds_of  # noqa: E402
from shardwright.kernels.timing import peak_bytes  # noqa: E402
from shardwright.kernels.verify import poisoned_memory, relative_error  # noqa: E402

T, H, S, K = 150, 64, 230, 140


@pytest.fixture(params=[True, False], ids=["hopper", "portable"])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if not request.param:
        monkeypatch.setattr(hopper_launch, "serves", lambda p: False)
    yield request.param


@pytest.mark.parametrize("gate", ["", "head", "value"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", [inputs.CAUSAL, inputs.SHARED, inputs.HOLES])
@pytest.mark.parametrize("documents", [False, True])
def test_values_and_gradients(hopper: bool, gate: str, sinks: bool, kind: int, documents: bool) -> None:
    shape = {"T": T, "H": H, "S": S, "K": K, "V": 512, "R": 64, "kind": kind}
    *parts, index = inputs.latent_inputs(shape, torch.bfloat16, "cuda", 3)
    more: dict[str, Any] = {}
    if documents:
        more["bounds"] = bounds_of(T, "cuda", [0, 100, S], first_query=S - T)
    leaves = [part.requires_grad_() for part in parts]
    if gate:
        gates = inputs.draw((T, H, 512) if gate == "value" else (T, H), torch.bfloat16, "cuda", 9)
        leaves.append(gates.requires_grad_())
    if sinks:
        leaves.append(inputs.draw((H,), torch.float32, "cuda", 10).requires_grad_())
    dy = inputs.draw((T, H, 512), torch.bfloat16, "cuda", 11)

    def run(call: Any, given: list[Tensor], **settings: Any) -> list[Tensor]:
        own = [x.detach().clone().requires_grad_() for x in given]
        gated = own[4] if gate else None
        o, lse = call(*own[:4], index, gated, own[-1] if sinks else None, scale=0.04, **settings, **more)
        found = torch.autograd.grad(o, own, dy.to(o))
        return [o.detach(), torch.where(lse == float("-inf"), 0.0, lse), *found]

    with poisoned_memory():
        found = run(dsa_attention, leaves, check_indices=False, deterministic=False)
    eager = run(dsa_attention_reference, leaves)
    exact = run(dsa_attention_reference, [leaf.double() for leaf in leaves])
    for value, plain, truth in zip(found, eager, exact, strict=True):
        assert relative_error(value, truth) <= 1.25 * relative_error(plain, truth) + 1e-6


@pytest.mark.parametrize(("heads", "deterministic"), [(64, False), (64, True), (96, False)])
def test_a_layer_that_rotates_nothing(heads: int, deterministic: bool) -> None:
    """Hopper's kernels read zeros in place of rotated parts; 96 heads go to the portable ones, 512 columns wide."""
    shape = {"T": T, "H": heads, "S": S, "K": 48, "V": 512, "R": 64}
    q, _, latent, _, index = inputs.latent_inputs(shape, torch.bfloat16, "cuda", 3)

    def run(call: Any, given: list[Tensor], **more: Any) -> list[Tensor]:
        own = [x.detach().clone().requires_grad_() for x in given]
        o, _ = call(own[0], None, own[1], None, index, scale=0.04, **more)
        return [o.detach(), *torch.autograd.grad(o, own, inputs.draw((T, heads, 512), torch.bfloat16, "cuda", 4).to(o))]

    with poisoned_memory():
        found = run(dsa_attention, [q, latent], deterministic=deterministic)
    eager = run(dsa_attention_reference, [q, latent])
    exact = run(dsa_attention_reference, [q.double(), latent.double()])
    for value, plain, truth in zip(found, eager, exact, strict=True):
        assert relative_error(value, truth) <= 1.25 * relative_error(plain, truth) + 1e-6


@pytest.mark.parametrize("B", [8, 16, 32, 64])
def test_blocks_of_keys(B: int) -> None:
    shape = {"T": T, "H": H, "S": S, "K": 2, "V": 512, "R": 64}
    *parts, _ = inputs.latent_inputs(shape, torch.bfloat16, "cuda", 3)
    at = torch.arange(S - T, S, device="cuda") // B
    index = inputs.selection(at, -(-S // B), 3, inputs.CAUSAL, 5)
    settings: dict[str, Any] = {"scale": 0.04, "block_size": B, "bounds": bounds_of(T, "cuda", first_query=S - T)}

    def run(call: Any, given: list[Tensor]) -> list[Tensor]:
        own = [x.detach().clone().requires_grad_() for x in given]
        o, _ = call(*own, index, **settings)
        return [o.detach(), *torch.autograd.grad(o, own, inputs.draw((T, H, 512), torch.bfloat16, "cuda", 4).to(o))]

    found, eager = run(dsa_attention, parts), run(dsa_attention_reference, parts)
    exact = run(dsa_attention_reference, [part.double() for part in parts])
    for value, plain, truth in zip(found, eager, exact, strict=True):
        assert relative_error(value, truth) <= 1.25 * relative_error(plain, truth) + 1e-6


def test_memory_grows_no_faster_than_tokens() -> None:
    """Nothing of [T, S] and nothing of [T, K, width]: twice the tokens need at most twice the memory."""
    peaks = []
    for tokens in (4096, 8192):
        *parts, index = inputs.latent_inputs(cases.full(tokens, H), torch.bfloat16, "cuda", 3)
        leaves = [part.requires_grad_() for part in parts]

        def run(leaves: list[Tensor] = leaves, index: Tensor = index) -> None:
            o, _ = dsa_attention(*leaves, index, scale=0.04, deterministic=False)
            torch.autograd.grad(o, leaves, torch.ones_like(o))

        peaks.append(peak_bytes(run))
    assert peaks[1] <= 2.05 * peaks[0]
    assert peaks[1] < 8192 * H * 576 * 2 * 10


def test_queries_past_two_to_the_31() -> None:
    """32,768 queries of 128 heads hold 2³¹ values: the last ones give the bits that they give alone."""
    tokens, heads, few = 32_768, 128, 8
    sizes = ((tokens, heads, 512), (tokens, heads, 64), (tokens, 512), (tokens, 64))
    torch.manual_seed(0)
    parts = [torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.3 for size in sizes]
    index = torch.arange(64, device="cuda", dtype=torch.int32).expand(tokens, 64).contiguous()
    dy = torch.randn((tokens, heads, 512), device="cuda", dtype=torch.bfloat16)

    def run(first: int) -> list[Tensor]:
        own = [part[first:] if at < 2 else part for at, part in enumerate(parts)]
        own = [part.detach().requires_grad_() for part in own]
        bounds = bounds_of(tokens - first, "cuda", first_query=first)
        o, _ = dsa_attention(*own, index[first:], scale=0.04, bounds=bounds, check_indices=False, deterministic=False)
        dqn, dqr = torch.autograd.grad(o, own[:2], dy[first:])
        return [o.detach()[-few:], dqn[-few:], dqr[-few:]]

    assert all(torch.equal(whole, alone) for whole, alone in zip(run(0), run(tokens - few), strict=True))
