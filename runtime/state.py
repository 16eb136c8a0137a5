"""Saves of adapters, optimizer, step, data position and random states; whole or absent, tied to their plan.

A save is copied to host memory at once and written while training goes on (``Saver``); it gets its name when all ranks
have written their part. Parameters are saved by their whole shape, so another mesh can read them. Which sequences come
next follows from the step alone (``runtime.batches.Batches``).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from shardwright.runtime.agree import on_first_rank, together
from shardwright.runtime.device import Device
from shardwright.runtime.mesh import Ranks
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import Owned, as_saved, by_place, local_values
from shardwright.runtime.state_folder import (
    FOLDER,
    LATEST,
    MANIFEST,
    commit,
    disk_full,
    final,
    find,
    fresh,
    latest,
    point,
    read_manifest,
    require_room,
    saves,
    set_aside,
    training_sha256,
)
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import AdaptationPlan

__all__ = [
    "FOLDER",
    "LATEST",
    "MANIFEST",
    "Saver",
    "base_of",
    "draw_seed",
    "expert_tokens",
    "final",
    "find",
    "latest",
    "load",
    "read_adapters",
    "read_biases",
    "read_manifest",
    "saves",
    "set_aside",
]


BIAS = "router_bias."
"""Before the name of a router's bias in a save."""


class Saver:
    """One rank's side of a run's saves; every rank makes one and calls the same methods in the same order.

    Args:
        run_dir: of the run.
        plan: whose hashes every save carries.
        adapters, optimizer: what is saved.
        ranks, device: this rank's place.
        biases: routers' biases that move, the same on every rank.
    """

    def __init__(
        self,
        run_dir: Path,
        plan: AdaptationPlan,
        adapters: dict[str, Owned],
        optimizer: AdapterOptimizer,
        ranks: Ranks,
        device: Device,
        biases: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.run_dir, self.plan, self.adapters, self.optimizer = run_dir, plan, adapters, optimizer
        self.ranks, self.device, self.biases = ranks, device, biases or {}
        # The thread's collectives are its own: they must not mix with training's.
        self.group = dist.new_group(backend="gloo") if ranks.world > 1 else None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.pending: tuple[int, Future[None]] | None = None
        self.base = ""
        """Hash of this rank's frozen weights as the run began with them; empty where they were not hashed."""

    def start(self, step: int, expert_tokens: dict[str, list[int]]) -> Path:
        """Copy the state and write it in the background, after the save before it is done.

        A save of the same step that is already there is kept.

        Raises:
            RunError: ``disk-full``, for this save or the one before.
        """
        self.finish()
        target = saves(self.run_dir) / f"step-{step}"
        if on_first_rank(lambda: (target / MANIFEST).is_file()):
            on_first_rank(lambda: point(self.run_dir, step))
            return target
        work = saves(self.run_dir) / f".step-{step}.tmp"
        on_first_rank(lambda: require_room(self.run_dir, step, self._bytes()))
        on_first_rank(lambda: self._guarded(step, lambda: fresh(work)))
        together(lambda: self._guarded(step, lambda: self._write_own(work)))
        staged = BlockingAsyncStager().stage(_tensors(self.adapters, self.optimizer, self.ranks, self.biases))
        batch = self.plan.decision.recipe.batch
        facts = {
            "hashes": self.plan.hashes.model_dump(),
            "training": training_sha256(self.plan),
            "data": {"next_sequence": step * batch.global_batch_sequences},
            "expert_tokens": expert_tokens,
            "mesh": self.ranks.sizes.model_dump(),
        }
        self.pending = (step, self.pool.submit(self._write, step, work, staged, facts))
        return target

    def finish(self) -> None:
        """Wait until the pending save has its name.

        Raises:
            RunError: ``disk-full`` on every rank when it failed on any.
        """
        if self.pending is None:
            return
        (step, written), self.pending = self.pending, None
        together(lambda: self._guarded(step, written.result))

    def _write(self, step: int, work: Path, staged: dict[str, Any], facts: dict[str, Any]) -> None:
        with _quiet():
            save_sharded(staged, checkpoint_id=work, process_group=self.group, no_dist=self.ranks.world == 1)
        if self.ranks.rank == 0:
            commit(self.run_dir, work, step, facts)

    def _write_own(self, work: Path) -> None:
        """What no other rank has: random states, and which frozen weights it trains beside."""
        buffer = io.BytesIO()
        torch.save(self.device.rng_state(), buffer)
        write_atomic(work / f"rng-{self.ranks.rank}.pt", buffer.getvalue())
        if self.base:
            write_atomic(work / f"base-{self.ranks.rank}.txt", self.base.encode())

    def _guarded(self, step: int, work: Any) -> None:
        try:
            work()
        except (OSError, CheckpointException) as error:
            raise disk_full(self.run_dir, step, _cause(error)) from error

    def _bytes(self) -> int:
        """Of one copy of all adapters and both moments."""
        sizes = (torch.Size(one.shape).numel() * one.parameter.element_size() for one in self.adapters.values())
        return 3 * sum(sizes)


def _cause(error: BaseException) -> str:
    """The first rank's own error inside a joint one."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {inner}"
    return str(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Saving on one rank is meant, not an accident."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _tensors(
    adapters: dict[str, Owned], optimizer: AdapterOptimizer, ranks: Ranks, biases: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Adapter values and moments, each knowing its place in the whole, and routers' biases, whole on every rank.

    Ranks that hold nothing of an adapter say so too.
    """
    moments = optimizer.moments()
    state: dict[str, Any] = {f"{BIAS}{name}": value for name, value in biases.items()}
    for name, owned in adapters.items():
        values = owned.local()
        state[f"adapter.{name}"] = as_saved(owned, values, ranks)
        for moment in ("exp_avg", "exp_avg_sq"):
            held = moments[name][moment] if name in moments else torch.zeros_like(values)
            state[f"{moment}.{name}"] = as_saved(owned, held.detach(), ranks)
    return state


def base_of(folder: Path, ranks: Ranks) -> str:
    """Hash of this rank's frozen weights when the save was made; empty where the save is of another plan or layout."""
    manifest = read_manifest(folder)
    path = folder / f"base-{ranks.rank}.txt"
    same = manifest["mesh"] == ranks.sizes.model_dump() and "carried_from" not in manifest
    return path.read_text() if same and path.is_file() else ""


def expert_tokens(folder: Path) -> dict[str, torch.Tensor]:
    """Layer → rows that each expert had got when the save was made."""
    return {layer: torch.tensor(count) for layer, count in read_manifest(folder)["expert_tokens"].items()}


def load(
    folder: Path,
    step: int,
    adapters: dict[str, Owned],
    optimizer: AdapterOptimizer,
    ranks: Ranks,
    device: Device,
    biases: dict[str, torch.Tensor] | None = None,
    seed: int = 0,
) -> None:
    """Fill adapters, optimizer and routers' biases in place, from a save made on any mesh.

    Random states are a rank's own: they are taken back on the mesh that made them; on another one the generators are
    seeded by :func:`draw_seed`.
    """
    state = _tensors(adapters, optimizer, ranks, biases or {})
    with _quiet():
        load_sharded(state, checkpoint_id=folder, no_dist=ranks.world == 1)
    _take_back(state, adapters, optimizer, ranks)
    optimizer.set_steps(step)
    same_mesh = read_manifest(folder)["mesh"] == ranks.sizes.model_dump()
    if same_mesh:
        device.set_rng_state(torch.load(folder / f"rng-{ranks.rank}.pt", weights_only=True))
    else:
        device.manual_seed(draw_seed(seed, step, ranks.rank))


def draw_seed(seed: int, step: int, rank: int) -> int:
    """What a rank's generators start from after a step (0: before the first): its dropout, which is no other rank's.

    Args:
        seed: ``recipe.seeds.lora``.
    """
    return int(sha256_of([seed, step, rank], floats=False)[:15], 16)


def _take_back(state: dict[str, Any], adapters: dict[str, Owned], optimizer: AdapterOptimizer, ranks: Ranks) -> None:
    """Copy what was loaded beside the model: placed experts, which come in their own order, and moments on the host."""
    moments = optimizer.moments()
    for name, owned in adapters.items():
        held = {"adapter": owned.local(), **moments.get(name, {})}
        for kind in ("adapter", "exp_avg", "exp_avg_sq"):
            values = by_place(owned, local_values(state[f"{kind}.{name}"]), ranks)
            if kind in held and values.data_ptr() != held[kind].data_ptr():
                held[kind].copy_(values)


def read_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Whole adapter tensors of a save, in one process without a process group."""
    return _read(folder, "adapter.")


def read_biases(folder: Path) -> dict[str, torch.Tensor]:
    """Routers' biases of a save by their full names; empty where the recipe froze them."""
    return _read(folder, BIAS)


def _read(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    metadata = FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    if not state:
        return {}
    with _quiet():
        load_sharded(state, checkpoint_id=folder, no_dist=True)
    return {key.removeprefix(prefix): value for key, value in state.items()}
