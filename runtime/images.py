"""Images of a data file: read once into patches, named by number in the rows of data, handed to the model by number.

A record keeps its images under ``recipe.data.images_field``, in the order in which the placeholder token stands in its
text. ``{"base64": …}`` holds a file's bytes; ``{"path": …, "sha256": …}`` names a file beside the data file and what it
holds. So the data file's own hash, which the plan pins, covers the pixels. Rows have a fourth plane: an image's number
where its first token stands, else −1. Records stay whole; the loss counts no token of an image.
Legend: N rows, S tokens a row, M images, P patches of all images.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.checkpoints.config import ModelConfig
from shardwright.runtime.chat import Document
from shardwright.runtime.documents import rows_of_samples
from shardwright.runtime.image_files import DEVIATION, MEAN, Cutting, patches_of
from shardwright.schemas.errors import LegalityError, RecipeError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.recipe import Recipe

STORE = "shardwright_images"
"""Where a model keeps the images that its rows name."""
NONE = -1


@dataclass(frozen=True)
class Images:
    """Patches of the images of one or more data files, numbered through.

    Attributes:
        patches: a file's [P, 3, side, side] uint8.
        grids: a file's [M, 2] rows and columns of each image's patches.
    """

    patches: tuple[np.ndarray, ...]
    grids: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(len(grids) for grids in self.grids)

    def __add__(self, later: Images) -> Images:
        return Images(self.patches + later.patches, self.grids + later.grids)

    def take(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Patches [p, 3, side, side] fp32 in [−1, 1] and grids [m, 3] of the named images, one after another."""
        found = [self._one(number) for number in numbers]
        pixels = torch.from_numpy(np.concatenate([patches for patches, _ in found]).astype(np.float32) / 255)
        grids = torch.tensor([[1, *grid] for _, grid in found], dtype=torch.int64)
        return (pixels - MEAN) / DEVIATION, grids

    def _one(self, number: int) -> tuple[np.ndarray, list[int]]:
        for patches, grids in zip(self.patches, self.grids, strict=True):
            if number < len(grids):
                sizes = grids.prod(1)
                start = int(sizes[:number].sum())
                return patches[start : start + int(sizes[number])], grids[number].tolist()
            number -= len(grids)
        raise IndexError(number)


def cutting_of(config: ModelConfig) -> tuple[Cutting, int]:
    """How the checkpoint cuts images, and its placeholder's id.

    Raises:
        RecipeError: ``images-without-vision-tower``, ``no-placeholder``.
    """
    vision, placeholder = config.raw.get("vision_config"), config.raw.get("media_placeholder_token_id")
    if not isinstance(vision, dict):
        raise RecipeError(
            "images-without-vision-tower",
            "recipe.data.images_field is set, and the checkpoint has no vision_config",
            where=str(config.folder / "config.json"),
            next_action="clear recipe.data.images_field, or use a checkpoint with a vision tower",
        )
    if not isinstance(placeholder, int):
        raise RecipeError(
            "no-placeholder",
            f"media_placeholder_token_id is {placeholder!r}",
            where=str(config.folder / "config.json"),
            next_action="set media_placeholder_token_id; an image's features stand in its place",
        )
    down, across = vision.get("merge_kernel_size", (2, 2))
    return Cutting(int(vision.get("patch_size", 14)), (int(down), int(across))), placeholder


def image_rows(
    path: Path, recipe: Recipe, texts: Iterator[tuple[Document, list[Any], str]], config: ModelConfig, store: Path
) -> np.ndarray:
    """[N, 4, S] rows of records with images; the images go into ``store``.

    Args:
        texts: ids of each record with one placeholder an image, its images, and where it stands.

    Raises:
        RecipeError: ``image-tokens``, ``bad-record``, ``bad-image``, ``over-long-sample`` and those of
            :func:`cutting_of`.
    """
    cutting, placeholder = cutting_of(config)
    documents, numbers, grids = [], [], []
    with _StoreWriter(store) as writer:
        for document, images, where in texts:
            held = np.flatnonzero(document.ids == placeholder)
            if len(held) != len(images):
                raise RecipeError(
                    "image-tokens",
                    f"{len(held)} placeholders for {len(images)} images",
                    where=where,
                    next_action="write the placeholder token once where each image belongs",
                )
            sizes = []
            for image in images:
                patches = patches_of(image_bytes(image, path.parent, where), cutting, where)
                writer.write(patches)
                grids.append(patches.shape[:2])
                sizes.append(cutting.tokens(*patches.shape[:2]))
            whole, named = expanded(document, placeholder, sizes, len(grids) - len(sizes))
            documents.append(whole)
            numbers.append(named)
        length, packing = recipe.batch.sequence_tokens, recipe.data.packing
        rows = rows_of_samples(documents, length, int(documents[0].ids[-1]), str(path), packing=packing)
        named_rows = rows_of_samples(numbers, length, NONE, str(path), packing=packing)
        writer.finish(np.asarray(grids, np.int64).reshape(-1, 2))
    return np.concatenate([rows, named_rows[:, :1]], axis=1)


def expanded(document: Document, placeholder: int, sizes: list[int], first: int) -> tuple[Document, Document]:
    """A document whose placeholders are repeated for each merged patch, and where its images begin.

    Args:
        sizes: places of each image.
        first: number of the document's first image.
    """
    repeats = np.ones(len(document.ids), np.int64)
    held = document.ids == placeholder
    repeats[held] = sizes
    ids, image = np.repeat(document.ids, repeats), np.repeat(held, repeats)
    named = np.full(len(ids), NONE, np.int64)
    named[(np.cumsum(repeats) - repeats)[held]] = first + np.arange(len(sizes))
    counted = np.repeat(document.counted, repeats) & ~image
    return Document(ids, counted, document.where), Document(named, counted, document.where)


def image_bytes(image: Any, folder: Path, where: str) -> bytes:
    """The bytes of one image of a record.

    Raises:
        RecipeError: ``bad-record``, ``bad-image`` where a file is missing or is not what the record names.
    """
    if isinstance(image, dict) and set(image) == {"base64"}:
        try:
            return base64.b64decode(image["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise _bad_image(f"not base64: {error}", where) from error
    if isinstance(image, dict) and set(image) == {"path", "sha256"} and isinstance(image["path"], str):
        try:
            target = (folder / image["path"]).resolve()
            if not target.is_relative_to(folder.resolve()) or not target.is_file():
                raise _bad_image(f"no file {image['path']!r} beside the data", where)
            data = target.read_bytes()
        except (OSError, ValueError) as error:
            raise _bad_image(f"{image['path']!r}: {error}"[:200], where) from error
        if hashlib.sha256(data).hexdigest() != image["sha256"]:
            raise _bad_image(f"{image['path']!r} is not the file whose sha256 the record names", where)
        return data
    raise RecipeError(
        "bad-record",
        'an image is neither {"base64"} nor {"path", "sha256"}',
        where=where,
        next_action="correct this line",
    )


def _bad_image(what: str, where: str) -> RecipeError:
    return RecipeError("bad-image", what, where=where, next_action="correct or remove this image")


def images_of(line: str, field: str, where: str) -> list[Any]:
    """The images of one JSON record; none where it has no such field.

    Raises:
        RecipeError: ``bad-record``.
    """
    found = json.loads(line).get(field)
    if found is None:
        return []
    if not isinstance(found, list):
        raise RecipeError(
            "bad-record", f"{field!r} is {type(found).__name__}", where=where, next_action="give a list of images"
        )
    return found


class _StoreWriter:
    """Writes patches as they come; the files appear whole under their names at the end."""

    def __init__(self, store: Path) -> None:
        self.store = store
        store.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=store.parent, suffix=".tmp")
        self.temporary, self.stream = Path(name), os.fdopen(handle, "wb")

    def __enter__(self) -> _StoreWriter:
        return self

    def write(self, patches: np.ndarray) -> None:
        self.stream.write(np.ascontiguousarray(patches).tobytes())

    def finish(self, grids: np.ndarray) -> None:
        self.stream.close()
        write_atomic(self.store.with_suffix(".grids"), grids.tobytes())
        os.replace(self.temporary, self.store)

    def __exit__(self, *error: object) -> None:
        self.stream.close()
        self.temporary.unlink(missing_ok=True)


def open_images(store: Path, side: int) -> Images:
    """The images that :func:`image_rows` stored."""
    grids = np.frombuffer(store.with_suffix(".grids").read_bytes(), np.int64).reshape(-1, 2)
    patches = np.memmap(store, np.uint8, "r") if store.stat().st_size else np.zeros(0, np.uint8)
    return Images((patches.reshape(-1, 3, side, side),), (grids,))


def behind(rows: np.ndarray, images: Images) -> np.ndarray:
    """Rows [N, 4, S] of a further file, whose images are numbered after the given ones."""
    shifted = np.array(rows)
    shifted[:, 3] = np.where(shifted[:, 3] == NONE, NONE, shifted[:, 3] + len(images))
    return shifted


def attach_images(model: nn.Module, images: Images) -> None:
    """Let a model see the images that its rows name.

    Raises:
        LegalityError: ``images-model`` where the model does not take patches and grids.
    """
    if "image_grids" not in inspect.signature(model.forward).parameters:
        raise LegalityError(
            "images-model",
            f"{type(model).__name__} takes images in another form than this runtime gives",
            where="recipe.data.images_field",
            next_action="train this family on text alone",
        )
    setattr(model, STORE, images)


def share_images(source: nn.Module, model: nn.Module) -> None:
    """Another model sees the same images."""
    images = getattr(source, STORE, None)
    if images is not None:
        attach_images(model, images)


def seen_images(model: nn.Module, numbers: Tensor | None) -> dict[str, Tensor]:
    """What a forward of rows with these images takes besides; nothing where they name none.

    Args:
        numbers: [B, S] plane of image numbers.
    """
    images: Images | None = getattr(model, STORE, None)
    if images is None or numbers is None:
        return {}
    named = numbers[numbers != NONE].tolist()
    if not named:
        return {}
    pixels, grids = images.take(named)
    return {"pixel_values": pixels.to(numbers.device), "image_grids": grids.to(numbers.device)}
