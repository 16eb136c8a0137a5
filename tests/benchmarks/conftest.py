"""The benchmark scripts open their process's group and end with it; a test that calls them gives it back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def own_group(no_process_group_is_left: None) -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
