"""Images in data: read, cut, placed in rows, handed to the model by number; and every way to be wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.checkpoints.config import read_config
from shardwright.runtime.batch import IGNORE, as_batch
from shardwright.runtime.batches import Batches
from shardwright.runtime.data import load_images, load_sequences
from shardwright.runtime.image_files import Cutting, decoded, patches_of
from shardwright.runtime.images import attach_images, behind, seen_images
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.reference import load_plain, reference_step
from shardwright.runtime.segments import keep_apart
from shardwright.schemas.errors import LegalityError, RecipeError
from shardwright.schemas.recipe import BatchSpec, DataSpec, Recipe

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-k3"
PLACEHOLDER = 4
CUTTING = Cutting(4, (2, 2))


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("k3") / "built"
    subprocess.run([sys.executable, str(EXAMPLE / "build.py"), "--out", str(out)], check=True, capture_output=True)
    return out


def pixmap(height: int, width: int, seed: int = 0) -> tuple[bytes, np.ndarray]:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return f"P6\n# a comment\n{width} {height}\n255\n".encode() + pixels.tobytes(), pixels


def inline(data: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(data).decode()}


def recipe(**data: Any) -> Recipe:
    spec = DataSpec(train="t.jsonl", held_out="t.jsonl", images_field="images", **data)
    return Recipe(data=spec, batch=BatchSpec(sequence_tokens=32, global_batch_sequences=2))


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_patches_are_the_pixels_in_their_places() -> None:
    """Row by row of the grid; sides that are not whole merged patches are padded with black."""
    data, pixels = pixmap(13, 24)
    found = patches_of(data, CUTTING, "here")
    assert found.shape == (4, 6, 3, 4, 4) and CUTTING.tokens(4, 6) == 6
    for row in range(16):
        for column in range(24):
            expected = pixels[row, column] if row < 13 else np.zeros(3, np.uint8)
            assert (found[row // 4, column // 4, :, row % 4, column % 4] == expected).all()


def test_large_images_are_scaled_into_the_towers_limits() -> None:
    wide = np.full((40, 4 * 1024, 3), 77, np.uint8)
    data = f"P6 {wide.shape[1]} {wide.shape[0]} 255\n".encode() + wide.tobytes()
    found = patches_of(data, CUTTING, "here")
    assert found.shape[:2] == (6, 512)
    assert int(found[0].min()) == int(found[0].max()) == 77, "an even picture stays even"


def test_other_formats_are_read_by_pillow() -> None:
    pillow = pytest.importorskip("PIL.Image")
    import io

    _, pixels = pixmap(8, 8)
    stream = io.BytesIO()
    pillow.fromarray(pixels).save(stream, "PNG")
    assert np.array_equal(decoded(stream.getvalue(), "here"), pixels)
    with pytest.raises(RecipeError) as caught:
        decoded(b"no image", "here")
    assert caught.value.code == "recipe/bad-image"


def test_rows_hold_whole_records_and_name_their_images(k3: Path, tmp_path: Path) -> None:
    one, two = pixmap(16, 8, 1), pixmap(8, 16, 2)
    (tmp_path / "two.ppm").write_bytes(two[0])
    named = {"path": "two.ppm", "sha256": hashlib.sha256(two[0]).hexdigest()}
    path = write(
        tmp_path,
        [
            {"text": "ab<|media_pad|>cd<|media_pad|>", "images": [inline(one[0]), named]},
            {"text": "no picture here, and long enough"[:20]},
            {"text": "<|media_pad|>xyz", "images": [named]},
        ],
    )
    config = read_config(k3 / "checkpoint")
    rows = load_sequences(path, recipe(), k3 / "checkpoint", config, tmp_path / "cache", 1)
    assert rows.shape == (2, 4, 32)
    ids, labels, positions, images = rows[0]
    held = np.flatnonzero(ids == PLACEHOLDER)
    assert held.tolist() == [2, 3, 6, 7], "two merged patches each"
    assert images.tolist() == [-1, -1, 0, -1, -1, -1, 1, *[-1] * 25]
    assert all(labels[at - 1] == IGNORE for at in held), "no token of an image is predicted"
    assert labels[3] == ids[4] and positions[9] == 0, "what follows an image is; the next record starts anew"
    assert (rows[1, 3] >= 0).sum() == 1 and rows[1, 3].max() == 2
    store = load_images(path, recipe(), k3 / "checkpoint", config, tmp_path / "cache")
    pixels, grids = store.take([2, 0])
    assert grids.tolist() == [[1, 2, 4], [1, 4, 2]]
    expected = np.concatenate([patches_of(d, CUTTING, "").reshape(-1, 3, 4, 4) for d in (two[0], one[0])])
    torch.testing.assert_close(pixels, torch.from_numpy(expected).float() / 127.5 - 1)
    again = load_sequences(path, recipe(), k3 / "checkpoint", config, tmp_path / "cache", 1)
    assert np.array_equal(rows, again)
    next((tmp_path / "cache").glob("*.images")).unlink()
    again = load_sequences(path, recipe(), k3 / "checkpoint", config, tmp_path / "cache", 1)
    assert np.array_equal(rows, again)
    for suffix in ("images", "grids"):
        (held,) = (tmp_path / "cache").glob(f"*.{suffix}")
        before = held.read_bytes()
        held.write_bytes(bytes([before[0] ^ 1]) + before[1:])
        told: list[str] = []
        load_sequences(path, recipe(), k3 / "checkpoint", config, tmp_path / "cache", 1, told.append)
        assert held.read_bytes() == before and len(told) == 1 and f"its .{suffix} file" in told[0]
    store = load_images(path, recipe(), k3 / "checkpoint", config, tmp_path / "cache")
    later = behind(rows, store)
    assert sorted(later[:, 3][later[:, 3] >= 0].tolist()) == [3, 4, 5]
    assert torch.equal((store + store).take([5])[0], store.take([2])[0])


def test_a_batch_with_images_is_its_documents_alone(k3: Path, tmp_path: Path) -> None:
    """Loss and gradient-free reference agree, images reach the loss, and another image gives another loss."""
    path = k3 / "train.jsonl"
    config = read_config(k3 / "checkpoint")
    given = recipe().model_copy(update={"batch": BatchSpec(sequence_tokens=128, global_batch_sequences=2)})
    rows = load_sequences(path, given, k3 / "checkpoint", config, tmp_path / "cache", 1)
    batch = Batches(rows, 2, 1, 1, 0).global_batch(1)
    assert int((batch[:, 3] >= 0).sum()) >= 2
    model, _ = load_plain(k3 / "checkpoint", torch.float32, torch.device("cpu"))
    with pytest.raises(LegalityError) as caught:
        attach_images(model.language_model, load_images(path, given, k3 / "checkpoint", config, tmp_path / "cache"))
    assert caught.value.code == "legality/images-model"
    with torch.no_grad():
        attach_images(model, load_images(path, given, k3 / "checkpoint", config, tmp_path / "cache"))
        alone = reference_step(model, {}, batch, torch.device("cpu")).loss
        assert seen_images(model, as_batch(batch).images)["image_grids"].shape[1] == 3
        keep_apart(model)
        tokens = int((batch[:, 1] != IGNORE).sum())
        packed = float(summed_loss(model, batch)) / tokens
        assert packed == pytest.approx(alone, rel=1e-5)
        other = batch.clone()
        other[:, 3] = torch.where(other[:, 3] >= 0, -1, other[:, 3])
        assert abs(float(summed_loss(model, other)) / tokens - alone) > 1e-4


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"text": "<|media_pad|><|media_pad|>", "images": [inline(pixmap(8, 8)[0])]}, "image-tokens"),
        ({"text": "none named", "images": [inline(pixmap(8, 8)[0])]}, "image-tokens"),
        ({"text": "<|media_pad|>"}, "image-tokens"),
        ({"text": "<|media_pad|>", "images": [inline(pixmap(8, 8)[0][:-1])]}, "bad-image"),
        ({"text": "<|media_pad|>", "images": [{"base64": "###"}]}, "bad-image"),
        ({"text": "<|media_pad|>", "images": [{"path": "../x", "sha256": "0"}]}, "bad-image"),
        ({"text": "<|media_pad|>", "images": [{"path": "t.jsonl", "sha256": "0" * 64}]}, "bad-image"),
        ({"text": "<|media_pad|>", "images": ["x.ppm"]}, "bad-record"),
        ({"text": "<|media_pad|>", "images": "x.ppm"}, "bad-record"),
        ({"text": "", "images": []}, "bad-record"),
        ({"text": "<|media_pad|>", "images": [inline(pixmap(64, 64)[0])]}, "over-long-sample"),
    ],
)
def test_bad_images_are_refused(k3: Path, tmp_path: Path, record: dict[str, Any], code: str) -> None:
    path = write(tmp_path, [{"text": "fine"}, record])
    config = read_config(k3 / "checkpoint")
    with pytest.raises(RecipeError) as caught:
        load_sequences(path, recipe(), k3 / "checkpoint", config, tmp_path / "cache", 1)
    assert caught.value.code == f"recipe/{code}"
    assert not list((tmp_path / "cache").glob("*")), "nothing half-made is kept"


def test_conversations_keep_their_images(k3: Path, tmp_path: Path) -> None:
    """Only the answer counts; the picture's tokens stand in the question."""
    talker = tmp_path / "talker"
    talker.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (talker / name).write_bytes((k3 / "checkpoint" / name).read_bytes())
    turns = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    turn = turns + "{% if add_generation_prompt %}a:{% endif %}"
    (talker / "chat_template.jinja").write_text(turn)
    messages = [{"role": "user", "content": "<|media_pad|>?"}, {"role": "assistant", "content": "red"}]
    path = write(tmp_path, [{"messages": messages, "images": [inline(pixmap(16, 8)[0])]}])
    given = recipe(format="jsonl-messages")
    rows = load_sequences(path, given, talker, read_config(talker), tmp_path / "cache", 1)
    ids, labels, _, images = rows[0]
    held = np.flatnonzero(ids == PLACEHOLDER)
    assert held.tolist() == [2, 3] and images[2] == 0 and (images >= 0).sum() == 1
    answer = [bytes([byte]).decode() for byte in b"red\n"]
    assert (labels != IGNORE).sum() == len(answer)
    assert labels[labels != IGNORE].tolist() == ids[np.flatnonzero(labels != IGNORE) + 1].tolist()


def test_images_need_a_tower_and_json_lines(k3: Path, tmp_path: Path) -> None:
    path = write(tmp_path, [{"text": "<|media_pad|>", "images": [inline(pixmap(8, 8)[0])]}])
    blind = tmp_path / "blind"
    blind.mkdir()
    document = json.loads((k3 / "checkpoint" / "config.json").read_text())
    for field, code in (
        ("vision_config", "images-without-vision-tower"),
        ("media_placeholder_token_id", "no-placeholder"),
    ):
        (blind / "config.json").write_text(json.dumps({k: v for k, v in document.items() if k != field}))
        (blind / "tokenizer.json").write_bytes((k3 / "checkpoint" / "tokenizer.json").read_bytes())
        with pytest.raises(RecipeError) as caught:
            load_sequences(path, recipe(), blind, read_config(blind), tmp_path / "cache", 1)
        assert caught.value.code == f"recipe/{code}"
    with pytest.raises(RecipeError) as caught:
        config = read_config(k3 / "checkpoint")
        load_sequences(path, recipe(format="parquet-text"), k3 / "checkpoint", config, tmp_path / "cache", 1)
    assert caught.value.code == "recipe/data-format"
