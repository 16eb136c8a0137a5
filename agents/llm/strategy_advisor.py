"""The strategy agent's language model: it has plans priced, asks what bounds them, and enqueues trials for the study.

It never sets a number: costs come from the model of the cluster, legality from the rules, and what it enqueues is one
more start of a study that the exhaustive scan beside it does not depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwright.agents.llm.chat import Chat
from shardwright.agents.llm.loop import Ended, run_loop
from shardwright.agents.llm.redact import facts_only, printable
from shardwright.agents.llm.tools import Arguments, Choices, NoArguments, Tool, Toolbox
from shardwright.agents.strategy.heuristics import habits
from shardwright.agents.strategy.pricing import Pricer
from shardwright.schemas.cost import CostReport
from shardwright.schemas.llm import Suggestion
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.legality import violations_in

MOST_STARTS = 8
ILLEGAL = "illegal"
AxisName = Literal["replicate", "shard", "ep", "tp", "cp", "pp", "micro_batch", "checkpointing", "reshard", "prefetch"]
Degree = Annotated[int, Field(ge=1, le=1_000_000)]
"""Bounded: rules count through divisors of what they are given."""

TASK = (
    "Find parallel plans for this cluster that a search should start from. Ask for the space, evaluate plans, see what "
    "bounds them, enqueue the best, and end with finish and an explanation for a reviewer."
)


class PlanArguments(Arguments):
    """One plan: mesh degrees, and how a step runs. Degrees multiply to the world size."""

    replicate: Degree
    shard: Degree
    ep: Degree
    tp: Degree
    cp: Degree
    pp: Degree
    micro_batch: Degree
    accumulation: Degree
    checkpointing: Literal["none", "full"]
    reshard: bool
    prefetch: Annotated[int, Field(ge=0, le=8)]


class PlanName(Arguments):
    """A plan, as evaluate_plan named it."""

    plan: str


class NarrowArguments(Arguments):
    """An axis and the values that look best; the search still sees all others."""

    axis: AxisName
    values: list[str]
    reason: str = Field(max_length=400)


class EndArguments(Arguments):
    """Why the enqueued plans should be good, for a reviewer."""

    explanation: str = Field(max_length=600)


@dataclass
class StrategyAdvice:
    """What came of it."""

    starts: list[ParallelStrategy] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)


class StrategyAdvisor:
    """Tools over one search's space.

    Args:
        context: checkpoint, recipe and cluster of the search.
        pricer: the cost model of the search.
    """

    def __init__(self, context: SearchContext, pricer: Pricer) -> None:
        self.context, self.pricer = context, pricer
        self.advice = StrategyAdvice()
        self.plans: dict[str, tuple[ParallelStrategy, CostReport]] = {}
        self.narrowed: dict[str, frozenset[str]] = {}
        self.asked: set[tuple[str, str]] = set()
        """Tool and plan of calls that would tell or change nothing if they were made again."""

    def run(self, chat: Chat) -> Ended:
        """Let a model work; the advice holds what it got through, even where the wire fails."""
        return run_loop(chat, self.toolbox(), TASK)

    def toolbox(self) -> Toolbox:
        def fresh(tool: str) -> Callable[[], tuple[Choices, ...]]:
            return lambda: ({"plan": tuple(name for name in self.plans if (tool, name) not in self.asked)},)

        return Toolbox(
            (
                Tool("show_space", "World, model and budget.", NoArguments, self.space),
                Tool(
                    "evaluate_plan",
                    "Legality and cost of a plan.",
                    PlanArguments,
                    self.evaluate,
                    choices=self.degrees,
                ),
                Tool(
                    "explain_bound",
                    "Time and memory of a plan by component.",
                    PlanName,
                    self.bound,
                    choices=fresh("bound"),
                ),
                Tool("narrow_axis", "Keep plans on some values of an axis.", NarrowArguments, self.narrow),
                Tool(
                    "enqueue_trial",
                    "Let the study start from a plan.",
                    PlanName,
                    self.enqueue,
                    choices=fresh("enqueue"),
                ),
                Tool(
                    "finish",
                    "End, with an explanation.",
                    EndArguments,
                    self.finish,
                    ends=True,
                    choices=lambda: ({},) if self.advice.starts or not self.degrees() else (),
                ),
            )
        )

    def degrees(self) -> tuple[Choices, ...]:
        """The usual plans that were not evaluated; and any degrees, until a combination of them was illegal."""
        known = {strategy for strategy, _ in self.plans.values()}
        usual = (arguments_of(one) for one in habits(self.context) if one not in known)
        offered = [{name: (value,) for name, value in one.items()} for one in usual]
        if not any(s.because.startswith(ILLEGAL) for s in self.advice.suggestions):
            world = divisors(self.context.cluster.world_size)
            batch = divisors(self.context.recipe.batch.global_batch_sequences)
            axes: Choices = dict.fromkeys(("replicate", "shard", "ep", "tp", "cp", "pp"), world)
            offered.append(axes | {"micro_batch": batch, "accumulation": batch, "prefetch": (0, 1, 2)})
        return tuple(offered)

    def space(self, arguments: NoArguments) -> dict[str, Any]:
        shape, recipe = self.context.profile.shape, self.context.recipe
        facts = {
            "world": self.context.cluster.world_size,
            "budget_bytes": self.context.cluster.device.usable_memory_bytes,
            "layers": shape.num_layers,
            "experts": shape.num_experts,
            "base_bytes": self.context.profile.stored_bytes,
            "sequence_tokens": recipe.batch.sequence_tokens,
            "batch_sequences": recipe.batch.global_batch_sequences,
        }
        result: dict[str, Any] = facts_only(facts)
        return result

    def evaluate(self, arguments: PlanArguments) -> dict[str, Any]:
        strategy = strategy_of(arguments)
        text = strategy.text()
        for axis, values in self.narrowed.items():
            if str(getattr(arguments, axis)).lower() not in values:
                return {"result": "refused", "narrowed": axis}
        broken = violations_in(self.context, strategy)
        if broken:
            self._note("try-plan", text, "", False, f"{ILLEGAL}: {broken[0].rule}")
            return {"result": "illegal", "rules": sorted({one.rule for one in broken})}
        cost = self.pricer.report(strategy)
        name = next((n for n, (known, _) in self.plans.items() if known == strategy), f"plan-{len(self.plans) + 1}")
        self.plans[name] = (strategy, cost)
        facts = {
            "plan": name,
            "result": "feasible" if cost.feasible else "infeasible",
            "step_ms": round(cost.time.step_ms, 2),
            "reserved_bytes": cost.memory.reserved_bytes,
            "bound": cost.time.bound_by,
        }
        result: dict[str, Any] = facts_only(facts, (cost.time.bound_by,))
        return result

    def bound(self, arguments: PlanName) -> dict[str, Any]:
        if arguments.plan not in self.plans:
            return {"error": "no such plan"}
        self.asked.add(("bound", arguments.plan))
        _, cost = self.plans[arguments.plan]
        times = sorted(cost.time.components, key=lambda c: -c.milliseconds)[:8]
        memory = sorted(cost.memory.components, key=lambda c: -c.bytes)[:8]
        names = {c.name for c in times} | {c.name for c in memory}
        facts = {
            "time": [{"part": c.name, "ms": round(c.milliseconds, 2)} for c in times],
            "memory": [{"part": c.name, "bytes": c.bytes} for c in memory],
        }
        result: dict[str, Any] = facts_only(facts, names)
        return result

    def narrow(self, arguments: NarrowArguments) -> dict[str, Any]:
        values = frozenset(value.lower() for value in arguments.values)
        if values:
            self.narrowed[arguments.axis] = values
        because = "holds for its own further plans; the scan still sees every value" if values else "no value given"
        self._note("narrow-axis", arguments.axis, arguments.reason, bool(values), because)
        return {"result": "accepted" if values else "refused"}

    def enqueue(self, arguments: PlanName) -> dict[str, Any]:
        if arguments.plan not in self.plans:
            return {"error": "no such plan"}
        self.asked.add(("enqueue", arguments.plan))
        strategy, cost = self.plans[arguments.plan]
        because = ""
        if not cost.feasible:
            because = "does not fit"
        elif strategy in self.advice.starts:
            because = "enqueued already"
        elif len(self.advice.starts) >= MOST_STARTS:
            because = f"{MOST_STARTS} are enqueued"
        else:
            self.advice.starts.append(strategy)
        self._note(
            "try-plan", strategy.text(), "", not because, because or f"legal, {cost.time.step_ms:.6g} ms modelled"
        )
        return {"result": "refused" if because else "accepted"}

    def finish(self, arguments: EndArguments) -> dict[str, Any]:
        self._note("explain", "parallel plan", arguments.explanation, True, "kept as the model's words")
        return {"result": "accepted"}

    def _note(self, kind: Any, subject: str, words: str, accepted: bool, because: str) -> None:
        self.advice.suggestions.append(
            Suggestion(kind=kind, subject=subject, words=printable(words), accepted=accepted, because=because)
        )


def divisors(number: int) -> tuple[int, ...]:
    """All of them, in order."""
    return tuple(at for at in range(1, number + 1) if number % at == 0)


def arguments_of(strategy: ParallelStrategy) -> dict[str, Any]:
    """A plan in the words of ``PlanArguments``, which is all that a model can say of one."""
    mesh = strategy.mesh
    return {
        **{axis: getattr(mesh, axis) for axis in ("replicate", "shard", "ep", "tp", "cp", "pp")},
        "micro_batch": strategy.micro_batch_sequences,
        "accumulation": strategy.accumulation_steps,
        "checkpointing": "none" if strategy.checkpointing == "none" else "full",
        "reshard": strategy.reshard_after_forward,
        "prefetch": strategy.prefetch_depth,
    }


def strategy_of(arguments: PlanArguments) -> ParallelStrategy:
    """The plan that a model wrote."""
    degrees = {axis: getattr(arguments, axis) for axis in ("replicate", "shard", "ep", "tp", "cp", "pp")}
    return ParallelStrategy(
        mesh=Mesh(**degrees),
        micro_batch_sequences=arguments.micro_batch,
        accumulation_steps=arguments.accumulation,
        checkpointing=arguments.checkpointing,
        reshard_after_forward=arguments.reshard,
        prefetch_depth=arguments.prefetch,
    )
