"""Packed weights opened, changed and packed again in the base's own format: MXFP4, block-scaled FP8, 4-bit groups.

A group of values that the change leaves alone keeps its bytes. Layouts: ``checkpoints.packing``. MXFP4 has two E2M1
values a byte, the low nibble first, and an E8M0 scale 2^(s - 127) for 32 values (OCP Microscaling 1.0).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwright.checkpoints.headers import Headers, TensorHeader
from shardwright.checkpoints.packing import int4_group
from shardwright.checkpoints.packing.int4 import VALUES_PER_WORD
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.schemas.errors import CheckpointError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP, BIAS = 32, 127
FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class PackedWeight(Protocol):
    """One packed weight of a checkpoint."""

    def values(self) -> Tensor:
        """fp32, of the logical shape."""
        ...

    def with_values(self, wanted: Tensor) -> tuple[Tensor, dict[str, bytes]]:
        """(what the new bytes mean, file tensor → bytes) for the nearest values that the format has."""
        ...


def open_packed(folder: Path, headers: Headers, logical: LogicalTensor) -> PackedWeight:
    """Read one packed weight.

    Raises:
        CheckpointError: ``packed-weights`` for a format or scale type that is not written here.
    """
    stored = {name: headers.tensors[name] for name in (logical.values, *logical.companions)}
    raw = {name: _read(folder, header) for name, header in stored.items()}
    scale = stored[logical.companions[0]] if logical.companions else None
    if scale is not None and logical.format in ("mxfp4", "gpt-oss-mxfp4") and scale.dtype in ("U8", "F8_E8M0"):
        return Mxfp4(logical, raw)
    values = stored[logical.values]
    if scale is not None and logical.format == "fp8-block" and values.dtype in FP8 and scale.dtype in SCALES:
        return Fp8Block(logical, raw, FP8[values.dtype], SCALES[scale.dtype], scale.shape)
    symmetric = all(name.endswith(("_scale", "_shape")) for name in logical.companions)
    if scale is not None and logical.format == "int4-group" and symmetric and scale.dtype in SCALES:
        return Int4Group(logical, raw, SCALES[scale.dtype], values.shape, scale.shape)
    raise CheckpointError(
        "packed-weights",
        f"{logical.format}, values {values.dtype}, scales {scale.dtype if scale else 'absent'}: cannot be written",
        where=logical.name,
        next_action="export the adapter as peft or per_expert, or dequantise the base to bf16 first",
    )


def _read(folder: Path, header: TensorHeader) -> bytearray:
    with open(folder / header.file, "rb") as stream:
        stream.seek(header.start)
        return bytearray(stream.read(header.end - header.start))


class Mxfp4:
    """E2M1 values with a power-of-two scale for 32 of them along the last dim."""

    def __init__(self, logical: LogicalTensor, raw: dict[str, bytearray]) -> None:
        self.logical, self.raw, self.scale_name = logical, raw, logical.companions[0]
        self.packed = torch.frombuffer(raw[logical.values], dtype=torch.uint8).reshape(-1, GROUP // 2)
        self.scales = torch.frombuffer(raw[self.scale_name], dtype=torch.uint8).reshape(-1, 1)

    def values(self) -> Tensor:
        """[…, in]."""
        return _e2m1_values(self.packed, self.scales).reshape(self.logical.shape)

    def with_values(self, wanted: Tensor) -> tuple[Tensor, dict[str, bytes]]:
        """Each group takes the better of its old scale and the two that its largest value suggests."""
        groups = wanted.reshape(-1, GROUP)
        top = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        natural = (torch.floor(torch.log2(top)) - 2 + BIAS).clamp(0, 254).to(torch.uint8)
        best, packed, scales = None, self.packed, self.scales
        for trial in (self.scales, natural, (natural + 1).clamp_max(254)):
            codes = _e2m1_codes(groups, trial)
            error = (_e2m1_values(codes, trial) - groups).square().sum(-1, keepdim=True)
            better = error < best if best is not None else torch.ones_like(error, dtype=torch.bool)
            packed, scales = torch.where(better, codes, packed), torch.where(better, trial, scales)
            best = error if best is None else torch.minimum(best, error)
        same = (groups == _e2m1_values(self.packed, self.scales)).all(-1, keepdim=True)
        packed, scales = torch.where(same, self.packed, packed), torch.where(same, self.scales, scales)
        data = {name: bytes(value) for name, value in self.raw.items()}
        data[self.logical.values] = packed.contiguous().numpy().tobytes()
        data[self.scale_name] = scales.contiguous().numpy().tobytes()
        return _e2m1_values(packed, scales).reshape(self.logical.shape), data


def _e2m1_values(packed: Tensor, scales: Tensor) -> Tensor:
    """[G, 16] bytes and [G, 1] scales → [G, 32] fp32."""
    grid = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(len(packed), GROUP)
    return grid[codes.long()] * torch.exp2(scales.float() - BIAS)


def _e2m1_codes(groups: Tensor, scales: Tensor) -> Tensor:
    """Nearest codes [G, 16] of [G, 32] values under given scales; halves go to the even code."""
    scaled = groups / torch.exp2(scales.float() - BIAS)
    size = scaled.abs().clamp_max(E2M1[-1])
    between = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)])
    up, down = torch.bucketize(size, between, right=True), torch.bucketize(size, between)
    code = torch.where(up % 2 == 0, up, down) + 8 * (scaled < 0)
    pairs = code.reshape(len(groups), GROUP // 2, 2).to(torch.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4)


class Fp8Block:
    """FP8 values with one scale for a block; a block's scale is its largest value over the format's largest."""

    def __init__(
        self,
        logical: LogicalTensor,
        raw: dict[str, bytearray],
        dtype: torch.dtype,
        scale_dtype: torch.dtype,
        scale_shape: tuple[int, ...],
    ) -> None:
        self.logical, self.raw, self.dtype, self.scale_name = logical, raw, dtype, logical.companions[0]
        self.codes = torch.frombuffer(raw[logical.values], dtype=torch.uint8).view(dtype).reshape(logical.shape)
        self.scales = torch.frombuffer(raw[self.scale_name], dtype=scale_dtype).reshape(scale_shape or (1,))

    def values(self) -> Tensor:
        """[…, out, in]."""
        return self.codes.float() * self._spread(self.scales.float())

    def with_values(self, wanted: Tensor) -> tuple[Tensor, dict[str, bytes]]:
        """Blocks that change get a new scale."""
        largest = torch.finfo(self.dtype).max
        fresh = (self._block_max(wanted) / largest).to(self.scales.dtype)
        touched = self._block_max(wanted - self.values()) > 0
        scales = torch.where(touched & (fresh > 0), fresh, self.scales)
        wide = self._spread(scales.float())
        new = (wanted / wide).clamp(-largest, largest).to(self.dtype)
        keep = self._spread(touched.float()) == 0
        codes = torch.where(keep, self.codes.view(torch.uint8), new.view(torch.uint8))
        data = {name: bytes(value) for name, value in self.raw.items()}
        data[self.logical.values] = codes.contiguous().numpy().tobytes()
        data[self.scale_name] = scales.contiguous().view(torch.uint8).numpy().tobytes()
        return codes.view(self.dtype).float() * wide, data

    def _spread(self, scales: Tensor) -> Tensor:
        """One scale for each value."""
        if scales.numel() == 1:
            return scales.reshape([1] * len(self.logical.shape)).expand(self.logical.shape)
        for dim, (size, step) in enumerate(zip(self.logical.shape, self.logical.block, strict=True)):
            scales = scales.repeat_interleave(step, dim).narrow(dim, 0, size)
        return scales

    def _block_max(self, values: Tensor) -> Tensor:
        """Largest absolute value of each block, in the scales' shape."""
        if self.scales.numel() == 1:
            return values.abs().amax().reshape(self.scales.shape)
        found = values.abs()
        for dim, step in enumerate(self.logical.block):
            missing = -found.shape[dim] % step
            if missing:
                pad = [missing if place == dim else size for place, size in enumerate(found.shape)]
                found = torch.cat([found, found.new_zeros(pad)], dim)
            found = found.unflatten(dim, (-1, step)).amax(dim + 1)
        return found


class Int4Group:
    """Symmetric 4-bit integers with one scale for a group along the last dim; the codec is the checkpoint room's."""

    def __init__(
        self,
        logical: LogicalTensor,
        raw: dict[str, bytearray],
        scale_dtype: torch.dtype,
        packed_shape: tuple[int, ...],
        scale_shape: tuple[int, ...],
    ) -> None:
        self.logical, self.raw, self.scale_name = logical, raw, logical.companions[0]
        self.packed = torch.frombuffer(raw[logical.values], dtype=torch.int32).reshape(packed_shape)
        self.scales = torch.frombuffer(raw[self.scale_name], dtype=scale_dtype).reshape(scale_shape)
        self.group = logical.block[-1]

    def values(self) -> Tensor:
        """[…, out, in]."""
        return int4_group.decode(self.packed, self.scales, torch.float32)

    def with_values(self, wanted: Tensor) -> tuple[Tensor, dict[str, bytes]]:
        """Groups that change get a new scale; the others keep their words."""
        if self.group % VALUES_PER_WORD:
            raise CheckpointError(
                "packed-weights",
                f"groups of {self.group} values end inside a word of {VALUES_PER_WORD}",
                where=self.logical.name,
                next_action="export the adapter as peft or per_expert instead",
            )
        fresh, scales = int4_group.encode(wanted.to(self.scales.dtype), self.group)
        touched = (wanted != self.values()).unflatten(-1, (-1, self.group)).any(-1)
        words = touched.repeat_interleave(self.group // VALUES_PER_WORD, -1)
        packed, scales = torch.where(words, fresh, self.packed), torch.where(touched, scales, self.scales)
        data = {name: bytes(value) for name, value in self.raw.items()}
        data[self.logical.values] = packed.contiguous().numpy().tobytes()
        data[self.scale_name] = scales.contiguous().view(torch.uint8).numpy().tobytes()
        return int4_group.decode(packed, scales, torch.float32), data
