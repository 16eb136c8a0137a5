"""What kernels found on a device is raised at the end of its step, also by the last call of a run."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwright
from shardwright.runtime.late_faults import WATCHED, raise_late_faults
from shardwright.schemas.errors import KernelError

pytest.importorskip("triton", reason="kernels need triton")


def arrived() -> Any:
    """A copy that the device has not finished until somebody waits for it."""
    return SimpleNamespace(synchronize=lambda: None, query=lambda: False)


def test_nothing_pending_is_nothing_raised() -> None:
    raise_late_faults()


def test_a_selection_of_the_last_call_is_raised() -> None:
    selection: Any = importlib.import_module(WATCHED[0])
    nothing = selection.NOTHING
    found = torch.tensor([0, nothing, 3, 5, 0, nothing], dtype=torch.int32)
    selection._pending.append(selection.Pending(found, arrived(), 1))
    selection.raise_pending()
    with pytest.raises(KernelError, match="selection of query 5") as caught:
        raise_late_faults()
    assert caught.value.code == "kernel/index-duplicated" and not selection._pending


@pytest.mark.parametrize(("at", "code"), [(0, "nan-scores"), (1, "index-out-of-range"), (2, "bad-cu-seqlens")])
def test_a_fault_of_the_last_indexer_is_raised(at: int, code: str) -> None:
    alarms: Any = importlib.import_module(WATCHED[1])
    counts = torch.zeros(alarms.FAULTS, dtype=torch.int32)
    counts[at] = 2
    alarms._pending.append(alarms.Pending(counts, arrived(), "dsa_indexer"))
    with pytest.raises(KernelError) as caught:
        raise_late_faults()
    assert caught.value.code == f"kernel/{code}"
    raise_late_faults()


def test_every_module_that_finds_faults_late_is_asked() -> None:
    """The table names them all: whoever keeps findings for later has ``raise_pending``."""
    kernels = Path(shardwright.__file__).parent / "kernels"
    late = {path for path in kernels.rglob("*.py") if "\ndef raise_pending(" in path.read_text()}
    named = {kernels / (name.removeprefix("shardwright.kernels.").replace(".", "/") + ".py") for name in WATCHED}
    assert late == named
