"""Write a Hugging Face checkpoint's tensors: safetensors shards of bounded size and their index.

The bytes depend on the tensors alone, not on a library's version, so a manifest can pin them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "U8": np.dtype("u1")}
"""safetensors name → storage; numpy has no bfloat16, its bits are kept as 16-bit integers."""


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round finite float32 values to the nearest bfloat16, ties to even.

    Args:
        values: float32, any shape.

    Returns:
        uint16 of the same shape: the upper half of each rounded float32.
    """
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + lowest_kept) >> np.uint32(16)).astype("<u2")


def write_shard(path: Path, tensors: list[tuple[str, str, np.ndarray]]) -> None:
    """Write one safetensors file: 8-byte header length, JSON header, then the data in header order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, array in tensors:
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for _, dtype, array in tensors:
            stream.write(np.ascontiguousarray(array, dtype=DTYPES[dtype]).data)


def write_sharded(folder: Path, tensors: Iterable[tuple[str, str, np.ndarray]], max_shard_bytes: int) -> None:
    """Write ``model-0000i-of-0000n.safetensors`` and ``model.safetensors.index.json``.

    Tensors are consumed one at a time; at most one shard is held in memory.

    Args:
        folder: an existing folder without shards.
        tensors: (hub name, safetensors dtype, values) in file order.
        max_shard_bytes: data bytes of a shard; a larger tensor gets a shard of its own.
    """
    shards: list[list[str]] = []
    pending: list[tuple[str, str, np.ndarray]] = []
    total_bytes = total_parameters = 0

    def flush() -> None:
        if pending:
            shards.append([name for name, _, _ in pending])
            write_shard(folder / f"part-{len(shards)}", pending)
            pending.clear()

    for name, dtype, array in tensors:
        if sum(held.nbytes for _, _, held in pending) + array.nbytes > max_shard_bytes:
            flush()
        pending.append((name, dtype, array))
        total_bytes += array.nbytes
        total_parameters += array.size
    flush()

    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    write_json(
        folder / "model.safetensors.index.json",
        {
            "metadata": {"total_parameters": total_parameters, "total_size": total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        },
    )


def write_json(path: Path, value: object) -> None:
    """JSON in reading form: two spaces, keys as given, UTF-8, one final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
