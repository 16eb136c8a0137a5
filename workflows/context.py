"""What every node can reach, and the state that passes between nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from shardwright.schemas.plan import AdaptationPlan, parse_plan
from shardwright.schemas.recipe import Recipe
from shardwright.workflows.artifacts import ArtifactStore
from shardwright.workflows.cache import NodeCache
from shardwright.workflows.events import Event, EventKind, EventLog
from shardwright.workflows.limits import Failure
from shardwright.workflows.request import Request
from shardwright.workflows.stages import Stages


class AdaptState(TypedDict, total=False):
    """The workflow's state: hashes of artifacts and plain text, nothing else."""

    request: str
    recipe: str
    cluster: str
    profile: str
    targets: str
    data: str
    weights: str
    """What the weights' values are."""
    evidence: str
    """The user's files of measured times, judged for the cluster; absent where none was named."""
    graph: str
    captured: str
    """Proposals as structure parsing found them."""
    proposals: str
    """Proposals that passed the gate."""
    search: str
    advice: str
    """What a language model suggested and the gates let through; absent where none was asked."""
    plan: str
    approval: str
    run: str
    """The run record as the workers left it."""
    checked: str
    adapter: str
    record: str
    """The complete run record."""
    report: str


Output = dict[str, str]


@dataclass(frozen=True)
class Context:
    """A run folder, its request, its artifacts, and the stages to use."""

    run_dir: Path
    request: Request
    stages: Stages = field(default_factory=Stages)
    log: Callable[[Event], None] | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    """Node → seconds that it may take."""
    failure: Failure = field(default_factory=Failure)
    """Whether a node of this drive has failed."""
    cache: NodeCache | None = None
    """What other runs on this machine have worked out."""

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.run_dir)

    @property
    def checkpoint(self) -> Path:
        return Path(self.request.checkpoint)

    @property
    def data_root(self) -> Path:
        return Path(self.request.data_root)

    @property
    def plan_file(self) -> Path:
        """The plan under review, or the approved one."""
        return self.run_dir / "plan.json"

    @property
    def approvals(self) -> Path:
        return self.run_dir / "approvals.jsonl"

    def plan_copy(self, plan: AdaptationPlan) -> Path:
        """Where a plan is kept for good, under its own hashes."""
        return self.run_dir / "plans" / f"{plan.hashes.decision[:16]}-{plan.hashes.evidence[:16]}.json"

    def tell(self, node: str, kind: EventKind, detail: str = "") -> None:
        event = Event(node, kind, detail)
        if self.log is not None:
            self.log(event)
        else:
            EventLog(self.run_dir)(event)

    def once(self, node: str, inputs: dict[str, str], compute: Callable[[], Output]) -> Output:
        """``ArtifactStore.once`` with this run's progress events."""
        return self.store.once(node, inputs, compute, lambda kind: self.tell(node, _kind(kind)))

    def once_here(self, node: str, inputs: dict[str, str], compute: Callable[[], Output]) -> Output:
        """As ``once``, and not again in any run on this machine: every output must name an artifact."""

        def look_first() -> Output:
            if self.cache is None:
                return compute()
            if (outputs := self.cache.take(node, inputs, self.store)) is not None:
                self.tell(node, "cached")
                return outputs
            outputs = compute()
            self.cache.keep(node, inputs, outputs, self.store)
            return outputs

        return self.once(node, inputs, look_first)

    def plan(self, sha256: str) -> AdaptationPlan:
        """A stored plan, hashes verified."""
        return parse_plan(self.store.get_bytes(sha256), where=str(self.store.path(sha256)))

    def keep_plan(self, plan: AdaptationPlan) -> str:
        """Store a plan as an artifact and under its hashes; return the artifact's hash."""
        plan.save(self.plan_copy(plan))
        return self.store.put_bytes(plan.to_bytes())

    def recipe(self, state: AdaptState) -> Recipe:
        return self.store.get(state["recipe"], Recipe)


def _kind(kind: str) -> EventKind:
    return "cached" if kind == "cached" else "computed"
