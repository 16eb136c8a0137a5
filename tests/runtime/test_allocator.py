"""Workers get an allocator whose segments grow, unless the environment says otherwise, and the run says which."""

from __future__ import annotations

import pytest

from shardwright.runtime.launch.allocator import EXPANDABLE, allocator_setting, choose_allocator
from shardwright.runtime.launch.local import environment


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_workers_are_told(device: str) -> None:
    assert allocator_setting(environment(device, 1)) == "expandable_segments:True" == EXPANDABLE


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_the_environment_says_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:256")
    env = environment("cuda", 1)
    assert allocator_setting(env) == env[name] == "max_split_size_mb:256"
    assert EXPANDABLE not in env.values()


def test_torch_reads_the_names_that_are_set() -> None:
    """Both names, in that order: torch's own description of the machine lists them."""
    from pathlib import Path

    import torch

    header = Path(torch.__file__).parent / "include/c10/cuda/CUDAAllocatorConfig.h"
    text = header.read_text()
    assert text.index('get_env("PYTORCH_CUDA_ALLOC_CONF")') < text.index('get_env("PYTORCH_ALLOC_CONF")')


def test_an_empty_setting_is_none() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": ""}
    choose_allocator(env)
    assert env == {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
