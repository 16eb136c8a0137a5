"""Comparisons before the first step beside a loaded model: where a plain layer goes, and that one is held at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.runtime.checks import layers, room
from shardwright.runtime.checks.memory import check_guard
from shardwright.runtime.checks.room import (
    HOST,
    LAYER_SHARE,
    WHOLE_MODEL_SHARE,
    place_of_layer,
    whole_model_fits,
)
from shardwright.runtime.device import Device
from shardwright.schemas.errors import RunError

Run = Callable[..., int]
CUDA = torch.device("cuda", 0)


def device(free: int, kind: torch.device = CUDA) -> Any:
    return SimpleNamespace(torch_device=kind, name="device", free_bytes=lambda: free, peak_memory_bytes=lambda: 3 << 30)


def test_the_whole_model_leaves_room_for_its_step() -> None:
    assert whole_model_fits(500, device(int(500 / WHOLE_MODEL_SHARE)))[0]
    fits, why = whole_model_fits(501, device(int(500 / WHOLE_MODEL_SHARE)))
    assert not fits and "free on device" in why


def test_a_layer_goes_to_the_host_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_host_bytes", lambda: 1000)
    most = int(1000 * LAYER_SHARE)
    assert place_of_layer("layer", most, device(1000)) == CUDA
    assert place_of_layer("layer", most, device(999)) == HOST
    with pytest.raises(RunError, match="check-no-room") as caught:
        place_of_layer("layer", most + 1, device(1000))
    assert "layer takes" in caught.value.text() and "next" in caught.value.as_dict()
    with pytest.raises(RunError, match="check-no-room"):
        place_of_layer("layer", most, device(999, HOST))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried 18 GiB"), MemoryError()])
def test_memory_that_runs_out_in_a_check_is_typed(error: Exception) -> None:
    with pytest.raises(RunError, match="check-out-of-memory") as caught, check_guard(device(1), "a layer ran"):
        raise error
    assert "a layer ran, 3 GiB in use" in caught.value.text()


def test_one_plain_layer_is_held_at_a_time_without_pythons_own_collections(
    qwen: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain layer's hooks and exchanged forwards refer to it: only a collection frees its weights."""
    monkeypatch.setattr(room, "WHOLE_MODEL_SHARE", 0.0)
    placed, alive = layers.place_of_layer, []
    held: list[weakref.ref[Any]] = []

    def built(*args: Any) -> Any:
        model = layers_build(*args)
        held.append(weakref.ref(model))
        return model

    def place(name: str, needed: int, on: Device) -> torch.device:
        found = placed(name, needed, on)
        alive.append(sum(one() is not None for one in held))
        return found

    layers_build = layers.build_from_config
    monkeypatch.setattr(layers, "build_from_config", built)
    monkeypatch.setattr(layers, "place_of_layer", place)
    gc.disable()
    try:
        assert single_rank(make_job(qwen, strategy(), recipe={"schedule": {"steps": 1}})) == 0
    finally:
        gc.enable()
    assert alive == [1, 1]


def test_a_plain_layer_gets_its_arguments_where_it_is(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nested ones too, and the upstream gradient; what is no tensor stays as it is."""
    monkeypatch.setattr(room, "WHOLE_MODEL_SHARE", 0.0)
    meta = torch.device("meta")
    given = (torch.zeros(2), [torch.zeros(3)]), {"mask": None, "cache": {"a": torch.zeros(1)}}, torch.zeros(4)
    args, kwargs, upstream = layers.tree_map_only(torch.Tensor, lambda value: value.to(meta), given)
    assert {args[0].device, args[1][0].device, kwargs["cache"]["a"].device, upstream.device} == {meta}
    assert kwargs["mask"] is None
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 1}})
    assert single_rank(job) == 0
    evidence = [check.evidence for check in job.record.checks if check.scope == "by_layer"]
    assert evidence and all("the plain layer's by" in one for one in evidence)


def test_memory_that_runs_out_anywhere_ends_the_run_once(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would meet it again, so the worker says what happened and ends with a run's error."""
    from shardwright.runtime import probe
    from shardwright.runtime.failure import read_failure

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(probe, "save_reference_logits", full)
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 1}})
    code = single_rank(job)
    failure = read_failure(job.run_dir)
    assert failure is not None and failure["code"] == "run/out-of-memory" and failure["exit_code"] == code
