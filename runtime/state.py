"""Saves of adapters, optimizer, step, data position and random states; whole or absent, tied to their plan.

``checkpoints/step-N/`` holds the sharded values and ``save.json``; ``checkpoints/latest`` names the newest. Parameters
are saved by their whole shape, so another mesh can read them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from shardwright.runtime.agree import on_first_rank
from shardwright.runtime.device import Device
from shardwright.runtime.mesh import Ranks
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import Owned, as_saved
from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.errors import RunError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import PlanHashes

FOLDER, LATEST, MANIFEST = "checkpoints", "latest", "save.json"


def saves(run_dir: Path) -> Path:
    """Where a run keeps its saves."""
    return run_dir / FOLDER


def save(
    run_dir: Path,
    step: int,
    adapters: dict[str, Owned],
    optimizer: AdapterOptimizer,
    ranks: Ranks,
    device: Device,
    hashes: PlanHashes,
    expert_tokens: dict[str, list[int]],
) -> Path:
    """Write one save under a temporary name, then rename and point ``latest`` at it.

    Every rank calls this. A save of the same step that is already there is kept.
    """
    final = saves(run_dir) / f"step-{step}"
    if on_first_rank(lambda: (final / MANIFEST).is_file()):
        on_first_rank(lambda: _point(run_dir, step))
        return final
    work = saves(run_dir) / f".step-{step}.tmp"
    on_first_rank(lambda: _fresh(work))
    with _quiet():
        save_sharded(_tensors(adapters, optimizer, ranks), checkpoint_id=work, no_dist=ranks.world == 1)
    buffer = io.BytesIO()
    torch.save(device.rng_state(), buffer)
    write_atomic(work / f"rng-{ranks.rank}.pt", buffer.getvalue())
    if ranks.world > 1:
        dist.barrier()

    def finish() -> None:
        manifest = {
            "step": step,
            "hashes": hashes.model_dump(),
            "expert_tokens": expert_tokens,
            "mesh": ranks.sizes.model_dump(),
            "files": {entry.name: entry.stat().st_size for entry in sorted(work.iterdir())},
        }
        write_atomic(work / MANIFEST, pretty_bytes(manifest))
        if final.exists():
            shutil.rmtree(final)
        os.replace(work, final)
        _point(run_dir, step)

    on_first_rank(finish)
    return final


@contextmanager
def _quiet() -> Iterator[None]:
    """Saving on one rank is meant, not an accident."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _point(run_dir: Path, step: int) -> None:
    write_atomic(saves(run_dir) / LATEST, f"step-{step}\n".encode())


def _tensors(adapters: dict[str, Owned], optimizer: AdapterOptimizer, ranks: Ranks) -> dict[str, Any]:
    """Adapter values and moments, each knowing its place in the whole; ranks that hold nothing say so too."""
    moments = optimizer.moments()
    state: dict[str, Any] = {}
    for name, owned in adapters.items():
        values = owned.local()
        state[f"adapter.{name}"] = as_saved(owned, values, ranks)
        for moment in ("exp_avg", "exp_avg_sq"):
            held = moments[name][moment] if name in moments else torch.zeros_like(values)
            state[f"{moment}.{name}"] = as_saved(owned, held.detach(), ranks)
    return state


def latest(run_dir: Path, hashes: PlanHashes) -> tuple[int, Path] | None:
    """Step and folder of the newest save, verified; ``None`` for a run without one.

    Raises:
        RunError: ``other-plan`` when the save belongs to another plan, ``damaged-save`` when files are missing or have
            other sizes than when they were written.
    """
    pointer = saves(run_dir) / LATEST
    if not pointer.is_file():
        return None
    folder = saves(run_dir) / pointer.read_text().strip()
    manifest = read_manifest(folder)
    if manifest["hashes"]["decision"] != hashes.decision:
        raise RunError(
            "other-plan",
            f"the save belongs to decision {manifest['hashes']['decision'][:16]}…, this plan's is "
            f"{hashes.decision[:16]}…",
            where=str(folder),
            next_action="resume with the plan that made it, or give another --run-dir",
        )
    return int(manifest["step"]), folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """A save's manifest, its files checked against it."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        wrong = [
            f"{name}: {size} bytes expected, {_size(folder / name)} found"
            for name, size in manifest["files"].items()
            if _size(folder / name) != size
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"no readable {MANIFEST}: {error}") from error
    if wrong:
        raise _damaged(folder, "; ".join(wrong[:3]))
    return manifest


def expert_tokens(folder: Path) -> dict[str, torch.Tensor]:
    """Layer → rows that each expert had got when the save was made."""
    return {layer: torch.tensor(count) for layer, count in read_manifest(folder)["expert_tokens"].items()}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _damaged(folder: Path, what: str) -> RunError:
    others = sorted(entry.name for entry in folder.parent.glob("step-*") if entry != folder)
    return RunError(
        "damaged-save",
        what,
        where=str(folder),
        next_action=f"remove this save and write an older one's name into {LATEST}"
        + (f"; there are {', '.join(others)}" if others else "; there is none, start in a new --run-dir"),
    )


def load(
    folder: Path, step: int, adapters: dict[str, Owned], optimizer: AdapterOptimizer, ranks: Ranks, device: Device
) -> None:
    """Fill adapters and optimizer in place, from a save made on any mesh."""
    state = _tensors(adapters, optimizer, ranks)
    with _quiet():
        load_sharded(state, checkpoint_id=folder, no_dist=ranks.world == 1)
    optimizer.set_steps(step)
    rng = folder / f"rng-{ranks.rank}.pt"
    if rng.is_file():
        device.set_rng_state(torch.load(rng, weights_only=True))


def read_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Whole adapter tensors of a save, in one process without a process group."""
    metadata = FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("adapter.") and isinstance(entry, TensorStorageMetadata)
    }
    with _quiet():
        load_sharded(state, checkpoint_id=folder, no_dist=True)
    return {key.removeprefix("adapter."): value for key, value in state.items()}
