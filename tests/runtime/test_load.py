"""Weights into a model: how much of them is on the host at once, and what is said on the way."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from shardwright.runtime.device import open_device
from shardwright.runtime.files import open_files
from shardwright.runtime.load import stream
from shardwright.runtime.load.stream import load_weights, materialize


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_one_part_is_on_the_host_at_a_time(kind: str, packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read for one parameter is gone when the next is read: a rank's peak is one part, not its share."""
    read, seen, alive = stream.read_base, [], []

    def watched(*arguments: Any) -> torch.Tensor:
        alive.append(sum(one() is not None for one in seen))
        part: torch.Tensor = read(*arguments)
        seen.append(weakref.ref(part))
        return part

    monkeypatch.setattr(stream, "read_base", watched)
    folder, device = packed(kind).checkpoint, open_device("cpu", 0)
    model, files = open_files(folder, torch.bfloat16)
    materialize(model, device)
    told: list[tuple[int, int, int, float]] = []
    facts = load_weights(
        model, folder, files.headers, files.names, device, lora_seed=0, progress=lambda *one: told.append(one)
    )
    names = [name for name, _ in model.named_parameters()]
    assert len(seen) == len(names) and set(alive) == {0}
    of = len(names) + len(stream._persistent_buffers(model))
    assert [(done, all_) for _, done, all_, _ in told] == [(done, of) for done in range(1, len(names) + 1)]
    assert told[-1][0] == facts.bytes_read and facts.peak_host_bytes > 0
    held = {name: header.stored_bytes for name, header in files.headers.tensors.items()}
    assert sum(held.values()) <= facts.bytes_read <= 1.1 * sum(held.values())
