"""The packed experts against fp64, both ways; storage, workspace and refusals.

What needs kernels runs again under TRITON_INTERPRET=1 (``interpreted/checks_packed_experts.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from shardwright.checkpoints.packing import fp8_block, mxfp4_codec
from shardwright.kernels.grouped_lora_mlp.op import Adapter
from shardwright.kernels.grouped_lora_mlp.reference import activate_reference
from shardwright.kernels.launched import meta, recorded
from shardwright.kernels.packed_experts import biased_cases, configs, contract, rivals, workspace
from shardwright.kernels.packed_experts.cases import SITU, SMALL, counts, stack
from shardwright.kernels.packed_experts.cost import STORED, cost
from shardwright.kernels.packed_experts.op import packed_experts
from shardwright.kernels.packed_experts.reference import dequantise_reference
from shardwright.kernels.packed_experts.storage import PackedStack, fp8_stack, mxfp4_bytes, mxfp4_stack
from shardwright.schemas.errors import KernelError


def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("checks_packed_experts.py")


def drawn(E: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=generator)
    return packed, torch.randint(0, 256, (E, N, K // 32), dtype=torch.uint8, generator=generator)


def test_storage_is_reversible_and_as_large_as_the_checkpoint() -> None:
    """Every scale code, NaN's included, and every byte comes back."""
    packed, scale = drawn(3, 40, 192)
    found = mxfp4_stack(packed, scale)
    back = mxfp4_bytes(found)
    assert torch.equal(back[0], packed) and torch.equal(back[1], scale)
    assert found.shape == (3, 40, 192) and found.stored_bytes == packed.numel() + scale.numel()
    assert found.stored_bytes == int(3 * 40 * 192 * STORED["mxfp4"])


def test_a_stack_decodes_as_the_checkpoint_codec_does() -> None:
    packed, scale = drawn(2, 24, 128)
    ours, theirs = dequantise_reference(mxfp4_stack(packed, scale)), mxfp4_codec.decode(packed, scale)
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)) and torch.isnan(theirs).any()
    values, scales = fp8_block.encode(torch.randn((2, 256, 128), generator=torch.Generator().manual_seed(1)))
    assert torch.equal(dequantise_reference(fp8_stack(values, scales)), fp8_block.decode(values, scales))


def test_the_rival_decodes_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rival that computed something else would be no rival. Its scale codes are 1 … 254."""
    packed, scale = drawn(2, 24, 128)
    scale = scale.clamp(1, 254)
    assert torch.equal(rivals.decode_bytes(packed, scale), mxfp4_codec.decode(packed, scale))
    gu = (4 * torch.randn((5, 12), dtype=torch.float32, generator=torch.Generator().manual_seed(2))).requires_grad_()
    dh = torch.randn((5, 6), generator=torch.Generator().manual_seed(4))
    (exact,) = torch.autograd.grad(rivals.situ(gu), gu, dh)
    assert torch.allclose(rivals.situ_backward(gu, dh), exact, atol=1e-5)
    bias, expert = torch.randn((2, 12), generator=torch.Generator().manual_seed(5)), torch.tensor([0, 0, 1, 1, 1])
    h = rivals.biased_clamped(gu, bias, expert)
    pre = (gu + bias[expert]).detach()
    assert bool((pre.abs() > rivals.LIMIT).any()), "some values reach past the clamp"
    right = activate_reference(pre[:, 0::2], pre[:, 1::2], biased_cases.CLAMPED)
    (exact,) = torch.autograd.grad(h, gu, dh)
    assert torch.allclose(h, right, atol=1e-5)
    assert torch.allclose(rivals.biased_clamped_backward(gu, bias, expert, dh), exact, atol=1e-5)
    monkeypatch.setattr(rivals, "_compiled", lambda function: function)
    between = rivals.gpt_oss(bias, bias, torch.tensor([2, 4], dtype=torch.int32), 5)
    assert torch.equal(between.inner(gu), h) and between.outer is not None
    assert torch.equal(between.outer(torch.zeros(5, 12)), bias[expert]), "rows of nobody get the last expert's"
    assert torch.equal(between.inner_backward(gu, dh), rivals.biased_clamped_backward(gu, bias, expert, dh))


@pytest.mark.parametrize("rows", [1, 60, 64, 65, 97, 129, 150, 293, 1000])
def test_tiles_leave_few_empty_rows(rows: int) -> None:
    chosen = configs.pieces(14 * rows, 14)
    padded = -(-rows // chosen.rows) * chosen.rows
    assert padded == min(-(-rows // p.rows) * p.rows for p in configs.PIECES)
    assert chosen.BA in (64, 128) and chosen.BB in (0, 32)


def test_few_rows_are_decoded_in_the_loop_and_many_from_a_copy() -> None:
    assert not configs.dequantises(0, 4, trains=True) and not configs.dequantises(100, 4, trains=True)
    assert configs.dequantises(4096, 14, trains=True) and not configs.dequantises(4096, 14, trains=False)
    assert configs.dequantises(65536, 14, trains=False)


def test_costs_count_packed_weights_and_one_copy() -> None:
    few, many = cost(2048, 14, 3584, 3072), cost(4096, 14, 3584, 3072)
    weights = 14 * 3 * 3584 * 3072
    assert few.forward.workspace_bytes == 2048 * (3072 + 3584) * 2
    assert many.forward.workspace_bytes == weights * 2 + 4096 * (3072 + 3584) * 2
    assert few.forward.floor_bytes == weights * 17 // 32 + 2 * 2048 * 3584 * 2
    assert many.forward.floor_flops == 2 * 4096 * weights // 14
    assert cost(0, 14, 3584, 3072).forward.floor_bytes == 0
    wide = cost(2048, 14, 3584, 3072, bits=8)
    assert wide.forward.floor_bytes == weights + weights // 4096 + 2 * 2048 * 3584 * 2


@pytest.mark.parametrize("r", [0, 16])
@pytest.mark.parametrize("R", [2048, 4096])
def test_counted_launches_are_those_that_happen(R: int, r: int) -> None:
    """Decoded in the loop, and from a copy that forward and backward share."""
    E, H, I = 14, 3584, 3072
    up = low = None
    if r:
        a, b, c, d = (meta(s, learns=True) for s in ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r)))
        up, low = Adapter(a, b, 0.5), Adapter(c, d, 0.5)
    sizes = contract.shapes("mxfp4", E, 2 * I, H), contract.shapes("mxfp4", E, H, I)
    stacks = [PackedStack(meta(v, torch.uint8), meta(s, torch.int16), "mxfp4") for v, s in sizes]
    forward: list[str] = []
    backward: list[str] = []
    workspace.release()
    with recorded(log=forward):
        x, n = meta((R, H), learns=True), meta((E,), torch.int32)
        y = packed_experts(x, n, stacks[0], stacks[1], up=up, low=low, activation=SITU)
    with recorded(log=backward):
        y.backward(torch.empty_like(y))
    workspace.release()
    assert ("dequantise_kernel" in forward) == (R == 4096) and "dequantise_kernel" not in backward
    found = cost(R, E, H, I, r=r)
    assert found.backward is not None
    assert (found.forward.launches, found.backward.launches) == (len(forward), len(backward)), (forward, backward)


@pytest.mark.parametrize("size", list(biased_cases.SIZES))
def test_biases_cost_no_launch(size: str) -> None:
    """Those of gpt-oss: as many launches as the same layer without them."""
    shape = biased_cases.SIZES[size]
    workspace.release()
    log: list[str] = []
    with recorded(log=log):
        x, n = meta((shape["R"], shape["H"]), learns=True), meta((shape["E"],), torch.int32)
        sizes = (contract.shapes("mxfp4", shape["E"], N, 2880) for N in (5760, 2880))
        up, low = (PackedStack(meta(v, torch.uint8), meta(s, torch.int16), "mxfp4") for v, s in sizes)
        biases = [meta((shape["E"], width)) for width in (5760, 2880)]
        y = packed_experts(
            x, n, up, low, up_bias=biases[0], down_bias=biases[1], activation=biased_cases.CLAMPED, interleaved=True
        )
        y.backward(torch.empty_like(y))
    workspace.release()
    found = cost(**shape)
    assert found.backward is not None and len(log) == found.forward.launches + found.backward.launches, log


def test_bad_storage_is_refused() -> None:
    packed, scale = drawn(1, 8, 64)
    bad: dict[str, Callable[[], object]] = {
        "dtype-unsupported": lambda: mxfp4_stack(packed.int(), scale),
        "wrong-shape": lambda: mxfp4_stack(packed, scale[..., :1]),
        "misaligned-width": lambda: mxfp4_stack(packed[..., :16], scale[..., :1]),
    }
    for code, call in bad.items():
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.code == f"kernel/{code}"
    with pytest.raises(KernelError) as caught:
        fp8_stack(torch.zeros((1, 100, 128)).to(torch.float8_e4m3fn), torch.ones((1, 1, 1)))
    assert caught.value.code == "kernel/misaligned-width"


def test_cases_cover_empty_experts_and_rows_of_nobody() -> None:
    for (R, E), sizes in SMALL.items():
        assert counts(R, E, "cpu").tolist() == list(sizes) and sum(sizes) <= R
    assert stack(2, 64, 64, "cpu", 1).shape == (2, 64, 64)
