"""Run the fake workflow in this process and die by SIGKILL at one moment of one node: RUN_DIR INPUTS NODE KIND."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import workflow_fakes as fakes

from shardwright.schemas.policy import Policy
from shardwright.workflows.drive import drive
from shardwright.workflows.events import Event
from shardwright.workflows.prepare import fresh_request


def main(run_dir: Path, inputs: Path, moments: set[str]) -> None:
    def die(event: Event) -> None:
        if f"{event.node}:{event.kind}" in moments:
            os.kill(os.getpid(), signal.SIGKILL)

    stages = fakes.fake_stages()
    request = fresh_request("adapt", inputs / "checkpoint", "fake-2", inputs / "recipe.yaml", 4, stages)
    policy = Policy(max_memory_fraction=0.9, approve=True)
    outcome = drive(request, run_dir, stages=stages, listener=die, policy=policy)
    sys.stdout.write(outcome.status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:]))
