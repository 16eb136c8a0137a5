"""One approved plan to be started: what every engine needs to know, taken from the plan.

The contract between engines and workers is torchrun's environment: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
``MASTER_ADDR``, ``MASTER_PORT``. Whoever sets it may run ``python -m shardwright.runtime.worker``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shardwright.schemas.errors import ClusterError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.words import plural

STATE = "launch.json"
"""In the run directory: which engine runs it, under which job id."""


@dataclass(frozen=True)
class Job:
    """A plan, its inputs, and how many processes it takes."""

    plan_path: Path
    checkpoint: Path
    data_root: Path
    approvals: Path
    run_dir: Path
    plan: AdaptationPlan

    @classmethod
    def of(cls, plan_path: Path, checkpoint: Path, data_root: Path, approvals: Path, run_dir: Path) -> Job:
        """A job with absolute paths.

        Raises:
            PlanError: the plan's bytes are not what they claim to be.
        """
        plan_path, checkpoint, data_root = plan_path.resolve(), checkpoint.resolve(), data_root.resolve()
        return cls(plan_path, checkpoint, data_root, approvals.resolve(), run_dir.resolve(), load_plan(plan_path))

    @property
    def ranks(self) -> int:
        return self.plan.decision.strategy.mesh.world_size

    @property
    def ranks_per_node(self) -> int:
        return min(self.ranks, self.plan.decision.cluster.devices_per_node)

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def cuda(self) -> bool:
        return self.plan.decision.cluster.device_type == "cuda"

    @property
    def name(self) -> str:
        """For schedulers: letters, digits and hyphens."""
        kept = "".join(letter if letter.isalnum() else "-" for letter in self.plan.decision.recipe.name.lower())
        return f"shardwright-{kept.strip('-') or 'run'}-{self.plan.hashes.decision[:8]}"

    @property
    def worker_arguments(self) -> list[str]:
        """Flags of ``shardwright.runtime.worker``."""
        flags = {
            "--plan": self.plan_path,
            "--approvals": self.approvals,
            "--checkpoint": self.checkpoint,
            "--recipe-root": self.data_root,
            "--run-dir": self.run_dir,
        }
        return [word for flag, path in flags.items() for word in (flag, str(path))]

    def require(self, found_nodes: int, found_per_node: int, where: str) -> None:
        """Refuse a cluster that is smaller than the plan.

        Raises:
            ClusterError: ``too-small``.
        """
        if found_nodes < self.nodes or found_per_node < self.ranks_per_node:
            raise ClusterError(
                "too-small",
                f"the plan takes {plural(self.nodes, 'node')} with {plural(self.ranks_per_node, 'rank')} each, "
                f"found {found_nodes} with "
                f"{found_per_node}",
                where=where,
                next_action="name a larger partition or cluster, or plan for this one",
            )


def write_state(run_dir: Path, engine: str, job_id: str, where: str) -> None:
    """Note which job runs this directory."""
    body = {"engine": engine, "job_id": job_id, "where": where}
    write_atomic(run_dir / STATE, json.dumps(body, indent=2, sort_keys=True).encode() + b"\n")


def read_state(run_dir: Path) -> dict[str, str] | None:
    """``engine``, ``job_id`` and ``where`` of the run's newest job; ``None`` where there was none."""
    path = run_dir / STATE
    if not path.is_file():
        return None
    found: dict[str, str] = json.loads(path.read_bytes())
    return found
