"""What holds for every test: none leaves a process group to the next one of its worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A group that a test leaves behind fails that test, not whichever one its worker runs next."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this test left a process group behind; end it in a fixture")
