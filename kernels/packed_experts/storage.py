"""Packed stacks as the kernels read them: made once at load from a checkpoint's bytes, and turned back exactly.

MXFP4: in a checkpoint byte i of a group holds values 2i and 2i + 1. Here a block of two groups (64 values, 32 bytes)
holds value j and value j + 32 in byte j: low nibbles are one group, high nibbles the next, both in order. The two
groups' scales lie in one 16-bit word, and words of neighbouring weight rows lie side by side. Sizes do not change.

FP8 keeps its values and fp32 scales as they are.

Legend: E experts, N out, K in of a stack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels.guards import refuse
from shardwright.kernels.packed_experts import contract
from shardwright.kernels.packed_experts.contract import Kind

BLOCK_BYTES, GROUP = 32, 32


@dataclass(frozen=True)
class PackedStack:
    """A frozen weight [E, N, K], packed along K.

    ``mxfp4``: values uint8 [E, N, K/2], scales int16 [E, K/64, N]; ``fp8``: values E4M3 [E, N, K], scales fp32
    [E, N/128, K/128], by which values are multiplied.
    """

    values: Tensor
    scales: Tensor
    kind: Kind

    @property
    def shape(self) -> tuple[int, int, int]:
        E, N, K = self.values.shape
        return E, N, K * (2 if self.kind == "mxfp4" else 1)

    @property
    def stored_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.values, self.scales))


def mxfp4_stack(packed: Tensor, scale: Tensor) -> PackedStack:
    """From compressed-tensors' bytes: ``packed`` uint8 [E, N, K/2], ``scale`` uint8 [E, N, K/32].

    gpt-oss's blocks [E, N, K/32, 16] are the same bytes: pass ``blocks.flatten(-2)``.

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape`` or ``misaligned-width``.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        what = f"packed is {packed.dtype}, scale is {scale.dtype}"
        raise refuse(contract.NAME, "dtype-unsupported", what, "pass both as uint8")
    if packed.dim() != 3 or tuple(scale.shape) != (*packed.shape[:2], packed.shape[2] * 2 // GROUP):
        what = f"packed is {list(packed.shape)}, scale is {list(scale.shape)}"
        raise refuse(contract.NAME, "wrong-shape", what, "pass [E, N, K/2] and [E, N, K/32]")
    if packed.shape[2] % BLOCK_BYTES:
        what = f"K is {2 * packed.shape[2]}"
        raise refuse(contract.NAME, "misaligned-width", what, "K must be a multiple of 64; else dequantise")
    blocks = packed.unflatten(-1, (-1, BLOCK_BYTES))
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)
    values = (codes[..., :GROUP] | (codes[..., GROUP:] << 4)).flatten(-2)
    pairs = scale.unflatten(-1, (-1, 2)).to(torch.int32)
    words = pairs[..., 0] | (pairs[..., 1] << 8)
    words = torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
    return PackedStack(values.contiguous(), words.mT.contiguous(), "mxfp4")


def mxfp4_bytes(stack: PackedStack) -> tuple[Tensor, Tensor]:
    """The inverse of ``mxfp4_stack``: the checkpoint's ``packed`` and ``scale``, bit for bit."""
    blocks = stack.values.unflatten(-1, (-1, BLOCK_BYTES))
    codes = torch.cat((blocks & 0xF, blocks >> 4), -1)
    packed = (codes[..., 0::2] | (codes[..., 1::2] << 4)).flatten(-2)
    words = stack.scales.mT.to(torch.int32) & 0xFFFF
    return packed, torch.stack((words & 0xFF, words >> 8), -1).flatten(-2).to(torch.uint8)


def fp8_stack(values: Tensor, scale: Tensor) -> PackedStack:
    """From 128 × 128 blocks: ``values`` E4M3 [E, N, K] and ``scale`` (a multiplier) [E, N/128, K/128].

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape`` or ``misaligned-width``.
    """
    if values.dtype != torch.float8_e4m3fn or not scale.dtype.is_floating_point:
        what = f"values are {values.dtype}, scale is {scale.dtype}"
        raise refuse(contract.NAME, "dtype-unsupported", what, "pass E4M3 values and floating scales")
    whole = contract.WHOLE["fp8"]
    if values.dim() != 3 or values.shape[1] % whole or values.shape[2] % whole:
        what = f"values are {list(values.shape)}"
        raise refuse(contract.NAME, "misaligned-width", what, f"N and K must be multiples of {whole}; else dequantise")
    E, N, K = values.shape
    if tuple(scale.shape) != (E, N // whole, K // whole):
        what = f"values are {list(values.shape)}, scale is {list(scale.shape)}"
        raise refuse(contract.NAME, "wrong-shape", what, "pass one scale for a block of 128 × 128")
    return PackedStack(values.contiguous(), scale.float().contiguous(), "fp8")
