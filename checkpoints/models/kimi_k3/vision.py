"""Images to embeddings: a vision transformer over patches of any grid, 2 × 2 patches merged, and the projector.

Patches of an image attend to the patches of the same image alone. Their places enter twice: a learned table, resampled
to the image's grid, is added; queries and keys are rotated by column and row in turn. Frames of a clip get a fixed
sinusoid each and are averaged when patches merge.
Legend: N patches of all images, M images, t × h × w grid of one image, D width, G heads, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.checkpoints.models.kimi_k3.norms import RMSNorm, wide
from shardwright.schemas.errors import RecipeError

THETA = 10_000.0


class PositionTable(nn.Module):
    """A learned table ``[rows, columns, D]``, resampled to each image's grid, and a sinusoid for each frame."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        sides = config.init_pos_emb_height, config.init_pos_emb_width
        self.weight = nn.Parameter(torch.zeros(*sides, config.vt_hidden_size))
        self.frames = config.init_pos_emb_time

    def forward(self, grids: list[tuple[int, int, int]]) -> Tensor:
        """``[N, D]`` in the order of the patches."""
        return torch.cat([self._one(*grid) for grid in grids])

    def _one(self, t: int, h: int, w: int) -> Tensor:
        if t > self.frames:
            raise RecipeError(
                "too-many-frames",
                f"a clip of {t} frames; the vision tower knows {self.frames}",
                where="images",
                next_action="cut the clip",
            )
        table: Tensor = self.weight
        if (h, w) != table.shape[:2]:
            image = table.permute(2, 0, 1).unsqueeze(0)
            table = F.interpolate(image, size=(h, w), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
        flat = table.reshape(h * w, -1)
        if t == 1:
            return flat
        return (flat + sinusoids(t, flat.shape[-1], flat).unsqueeze(1)).reshape(t * h * w, -1)


def sinusoids(frames: int, width: int, like: Tensor) -> Tensor:
    """``[frames, width]``: sines, then cosines, of frame × θ^(−2i/width)."""
    kind = torch.promote_types(like.dtype, torch.float32)
    rates = THETA ** (-torch.arange(width // 2, dtype=kind, device=like.device) * 2 / width)
    angles = torch.outer(torch.arange(frames, dtype=kind, device=like.device), rates)
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class PatchEmbedding(nn.Module):
    """Each patch by one linear map, and its place."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        side = config.patch_size
        self.proj = nn.Conv2d(3, config.vt_hidden_size, kernel_size=side, stride=side, bias=False)
        self.pos_emb = PositionTable(config)

    def forward(self, patches: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        """``[N, 3, side, side]`` → ``[N, D]``."""
        return self.proj(patches.to(self.proj.weight.dtype)).flatten(1) + self.pos_emb(grids)


class PatchMlp(nn.Module):
    """Two linear maps around a tanh-GELU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size, bias=False)
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class PatchBlock(nn.Module):
    """Attention inside each image, then the MLP, both behind their norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.heads = config.vt_num_attention_heads
        self.norm0, self.norm1 = (RMSNorm(width, config.vision_norm_eps) for _ in range(2))
        self.wqkv = nn.Linear(width, 3 * inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)
        self.mlp = PatchMlp(config)

    def forward(self, x: Tensor, sizes: list[int], angles: Tensor) -> Tensor:
        """``[N, D]`` → the same; ``sizes``: patches of each image; ``angles [N, d/2]``."""
        q, k, v = self.wqkv(self.norm0(x)).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = rotated(q, angles), rotated(k, angles)
        parts = [
            F.scaled_dot_product_attention(*(part.transpose(0, 1).unsqueeze(0) for part in one))[0].transpose(0, 1)
            for one in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        ]
        x = x + self.wo(torch.cat(parts).flatten(1))
        return x + self.mlp(self.norm1(x))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Neighbouring pairs of ``x [N, G, d]`` turned by ``angles [N, d/2]``, in fp32."""
    even, odd = wide(x).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def axial_angles(grids: list[tuple[int, int, int]], width: int, like: Tensor) -> Tensor:
    """``[N, width/2]``: pair 2i turns by column × θ^(−4i/width), pair 2i + 1 by row × the same."""
    kind = torch.promote_types(like.dtype, torch.float32)
    rates = THETA ** (-torch.arange(0, width, 4, dtype=kind, device=like.device) / width)
    found = []
    for t, h, w in grids:
        rows = torch.arange(h, dtype=kind, device=like.device).view(h, 1, 1).expand(h, w, 1)
        columns = torch.arange(w, dtype=kind, device=like.device).view(1, w, 1).expand(h, w, 1)
        both = torch.stack([columns * rates, rows * rates], dim=-1)
        found.append(both.reshape(h * w, -1).repeat(t, 1))
    return torch.cat(found)


class PatchEncoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width = config.qkv_hidden_size // config.vt_num_attention_heads
        self.blocks = nn.ModuleList(PatchBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = RMSNorm(config.vt_hidden_size, config.vision_norm_eps)

    def forward(self, x: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        sizes, angles = [t * h * w for t, h, w in grids], axial_angles(grids, self.width, x)
        for block in self.blocks:
            x = block(x, sizes, angles)
        return self.final_layernorm(x)


class VisionTower(nn.Module):
    """Patches to merged features: one row for 2 × 2 patches, averaged over frames."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch_embed, self.encoder = PatchEmbedding(config), PatchEncoder(config)
        self.merge: tuple[int, int] = tuple(config.merge_kernel_size)

    def forward(self, patches: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        """``[N, 3, side, side]`` → ``[rows, merge · merge · D]``.

        Raises:
            RecipeError: ``image-grid`` where a grid does not hold its patches or does not merge.
        """
        down, across = self.merge
        held = sum(t * h * w for t, h, w in grids)
        if held != len(patches) or any(h % down or w % across for _, h, w in grids):
            raise RecipeError(
                "image-grid",
                f"{len(patches)} patches for grids {grids}, merged {down} × {across}",
                where="images",
                next_action="give sides that are whole merged patches",
            )
        x = self.encoder(self.patch_embed(patches, grids), grids)
        parts = []
        for part, (t, h, w) in zip(x.split([t * h * w for t, h, w in grids]), grids, strict=True):
            tiles = part.view(t, h // down, down, w // across, across, -1).transpose(2, 3)
            parts.append(tiles.mean(0).reshape((h // down) * (w // across), -1))
        return torch.cat(parts)


class Projector(nn.Module):
    """Merged features to the language model's width: two linear maps around a GELU, then a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = (config.mm_hidden_size or config.vt_hidden_size) * config.merge_kernel_size[0] ** 2
        self.proj = nn.Sequential(
            nn.Linear(inner, inner, bias=False), nn.GELU(), nn.Linear(inner, config.text_hidden_size, bias=False)
        )
        self.post_norm = RMSNorm(config.text_hidden_size, config.projector_ln_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.post_norm(self.proj(x))
