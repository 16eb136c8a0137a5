"""Image files to patches: decoded, scaled into the tower's limits, padded to whole merged patches, cut.

Portable pixmaps are read here, other formats by Pillow where it is installed. Pixels stay bytes until a batch needs
them.
Legend: h × w rows and columns of patches, side: pixels of a patch's side.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import re
import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from shardwright.schemas.errors import RecipeError

MAX_PATCHES, MAX_SIDE_PATCHES = 16_384, 512
MAX_PIXELS = 1 << 28
"""A larger picture is refused before it is decoded."""
MEAN = DEVIATION = 0.5
WIDE_MODES = ("I", "F")
BROKEN = (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, OverflowError, struct.error)
"""What Pillow raises on files that are not what they say."""
_PIXMAP = re.compile(rb"^P6\s+(?:#[^\n]*\n\s*)*(\d{1,6})\s+(?:#[^\n]*\n\s*)*(\d{1,6})\s+255\s")


@dataclass(frozen=True)
class Cutting:
    """How a checkpoint's tower wants its patches."""

    side: int
    merge: tuple[int, int]

    def tokens(self, h: int, w: int) -> int:
        """Merged patches of a grid: places that the image takes in a sequence."""
        return (h // self.merge[0]) * (w // self.merge[1])


def patches_of(data: bytes, cutting: Cutting, where: str) -> np.ndarray:
    """An image file as ``[h, w, 3, side, side]`` uint8.

    Raises:
        RecipeError: ``bad-image``, ``no-pillow``.
    """
    pixels = _fitted(decoded(data, where), cutting)
    side = cutting.side
    down, across = (
        -(-size // (side * step)) * step for size, step in zip(pixels.shape[:2], cutting.merge, strict=True)
    )
    padded = np.zeros((down * side, across * side, 3), np.uint8)
    padded[: pixels.shape[0], : pixels.shape[1]] = pixels
    return padded.reshape(down, side, across, side, 3).transpose(0, 2, 4, 1, 3)


def decoded(data: bytes, where: str) -> np.ndarray:
    """``[height, width, 3]`` uint8, upright as the camera meant it.

    Raises:
        RecipeError: ``bad-image``, ``no-pillow``.
    """
    found = _PIXMAP.match(data)
    if found is not None:
        width, height = int(found[1]), int(found[2])
        body = data[found.end() :]
        if not 0 < width * height <= MAX_PIXELS or len(body) < 3 * width * height:
            raise _bad(f"a pixmap of {width} × {height} with {len(body)} bytes of pixels", where)
        return np.frombuffer(body, np.uint8, 3 * width * height).reshape(height, width, 3)
    if importlib.util.find_spec("PIL") is None:
        raise RecipeError(
            "no-pillow",
            "images other than P6 pixmaps are read by Pillow, which is not installed",
            where=where,
            next_action="install pillow, or convert the images to PPM",
        )
    pillow = importlib.import_module("PIL.Image")
    try:
        with pillow.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise _bad(f"{image.width} × {image.height} pixels", where)
            if getattr(image, "n_frames", 1) > 1:
                raise _bad(f"{image.n_frames} frames: which of them is meant is not said", where)
            if image.mode in WIDE_MODES or image.mode.startswith("I;"):
                raise _bad(f"pixels of mode {image.mode}, which eight bits do not hold", where)
            upright = importlib.import_module("PIL.ImageOps").exif_transpose(image)
            return np.asarray(upright.convert("RGB"), np.uint8)
    except (*BROKEN, pillow.DecompressionBombError) as error:
        raise _bad(f"{type(error).__name__}: {error}"[:200], where) from error


def _fitted(pixels: np.ndarray, cutting: Cutting) -> np.ndarray:
    """Scaled down, never up, where the grid would have more patches than the tower takes."""
    height, width = pixels.shape[:2]
    side = cutting.side
    scale = min(
        1.0,
        math.sqrt(MAX_PATCHES / max((height // side) * (width // side), 1)),
        MAX_SIDE_PATCHES * side / height,
        MAX_SIDE_PATCHES * side / width,
    )
    if scale == 1.0:
        return pixels
    size = (max(1, int(height * scale)), max(1, int(width * scale)))
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).unsqueeze(0).float()
    scaled = F.interpolate(image, size=size, mode="bicubic", antialias=True, align_corners=False)
    return scaled[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).numpy()


def _bad(what: str, where: str) -> RecipeError:
    return RecipeError("bad-image", what, where=where, next_action="replace or remove this image")
