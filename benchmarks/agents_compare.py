"""Endpoints side by side: what each adds to the rules, on the same families under the same budgets.

    python benchmarks/agents.py compare [--endpoint NAME=MODEL@URL ...] [--families F ...]

A region counts as fusible where the gates accept it when it is proposed whole; recall is the share of those of which an
endpoint got anything accepted. Regret is that of its first plan: modelled step time over the best of the exhaustive
scan, less one; the rules' own first plan is the first habit that fits. ``scripted`` plays a model that proposes every
region and the widest plans. Nothing but the loopback is needed unless a named endpoint lies elsewhere.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agents_model import Opened, opened
from lines import line

from shardwright.schemas.bench import BenchLine

CLUSTER = "h200-8"
BATCH, TOKENS = 16, 256
RULES = "rules"


@dataclass(frozen=True)
class Family:
    """One family's graphs and search space, and what there is to find in them."""

    model: Opened
    folder: Path

    @cached_property
    def fusible(self) -> frozenset[frozenset[str]]:
        """Nodes of each open region that the gates accept whole."""
        from shardwright.agents.llm.structure_advisor import ProposeArguments

        advisor = self.model.advisor()
        for name in advisor.regions:
            advisor.propose(ProposeArguments(region=name, nodes=[], reason="all"))
        return frozenset(frozenset(region.nodes) for _, region in advisor.advice.matches.values())

    @cached_property
    def space(self) -> tuple[Any, Any]:
        """Search context and pricer on one node."""
        from shardwright.agents.strategy.pricing import Pricer
        from shardwright.checkpoints.targets import parameter_shapes, resolve_targets
        from shardwright.schemas.recipe import BatchSpec, DataSpec, LoraSpec, PrecisionSpec, Recipe
        from shardwright.search_spaces.catalogue import load_cluster
        from shardwright.search_spaces.context import SearchContext
        from shardwright.search_spaces.cost import workload

        lora = LoraSpec(targets=("attention",), rank=8)
        recipe = Recipe(
            data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
            lora=lora,
            precision=PrecisionSpec(base="bfloat16"),
            batch=BatchSpec(sequence_tokens=TOKENS, global_batch_sequences=BATCH),
        )
        profile, cluster = self.model.profile, load_cluster(CLUSTER)
        targets = resolve_targets(parameter_shapes(self.folder), lora, model_type=profile.model_type)
        pricer = Pricer.of(workload(profile, recipe, targets, ()), cluster)
        return SearchContext(profile, recipe, cluster, False, ()), pricer

    @cached_property
    def best_ms(self) -> float:
        """Of the exhaustive scan."""
        from shardwright.agents.strategy.oracle import scan
        from shardwright.search_spaces.space import enumerate_plans

        context, pricer = self.space
        return float(scan(enumerate_plans(context), pricer).best.cost.time.step_ms)

    def regret(self, plans: Sequence[Any]) -> float | None:
        """Of the first plan; ``None`` where there is none."""
        if not plans:
            return None
        return float(self.space[1].report(plans[0]).time.step_ms) / self.best_ms - 1

    def habit(self) -> Sequence[Any]:
        """The rules' own first plan."""
        from shardwright.agents.strategy.heuristics import habits

        context, pricer = self.space
        return [plan for plan in habits(context) if pricer.report(plan).feasible][:1]


@dataclass
class Score:
    """One endpoint over all families."""

    name: str
    found: int = 0
    fusible: int = 0
    illegal: int = 0
    refused: int = 0
    regrets: list[float] = field(default_factory=list)
    families: int = 0
    calls: int = 0
    tokens: int = 0
    failed: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """As they stand in a result line; a missing regret is left out."""
        regret = {"first_plan_regret": sum(self.regrets) / len(self.regrets)} if self.regrets else {}
        return {
            "region_recall": self.found / self.fusible if self.fusible else 0.0,
            "fusible": self.fusible,
            "illegal_after_gates": self.illegal,
            "refused": self.refused,
            **regret,
            "first_plans": len(self.regrets),
            "families": self.families,
            "calls": self.calls,
            "tokens": self.tokens,
            "failed": self.failed,
            "seconds": round(self.seconds, 2),
        }


def score_family(score: Score, family: Family, url: str, model: str, limits: Any) -> None:
    """Let one endpoint look at one family."""
    from agents_fuzz import examined

    from shardwright.agents.llm.advise import Session
    from shardwright.agents.llm.endpoint import endpoint_from, key_of
    from shardwright.agents.llm.strategy_advisor import StrategyAdvisor
    from shardwright.agents.llm.wire import OpenAIWire

    named = endpoint_from({}, url=url, model=model, limits=limits)
    structure, strategy = family.model.advisor(), StrategyAdvisor(*family.space)
    begun = time.monotonic()
    session = Session("advise", named, OpenAIWire(named, key_of(named, os.environ)))
    if session.open():
        session.consult("fusions", structure)
        session.consult("plans", strategy)
    score.seconds += time.monotonic() - begun
    suggestions = [*structure.advice.suggestions, *strategy.advice.suggestions]
    record = session.record(suggestions)
    taken = [frozenset(region.nodes) for _, region in structure.advice.matches.values()]
    score.found += sum(any(nodes <= region for nodes in taken) for region in family.fusible)
    score.fusible += len(family.fusible)
    score.illegal += sum(not examined(match) for match, _ in structure.advice.matches.values())
    score.refused += sum(not one.accepted for one in suggestions)
    regret = family.regret(strategy.advice.starts)
    score.regrets += [] if regret is None else [regret]
    score.families += 1
    score.calls += record.calls
    score.tokens += record.prompt_tokens + record.completion_tokens
    score.failed += record.end != "complete"


def compare(endpoints: Mapping[str, tuple[str, str]], families: Sequence[str], limits: Any = None) -> list[Score]:
    """Rules, the scripted model, and every endpoint given.

    Args:
        endpoints: name → model and address.
    """
    with ExitStack() as stack:
        asked = {"scripted": ("scripted", stack.enter_context(scripted_model())), **endpoints}
        scores = {name: Score(name) for name in (RULES, *asked)}
        for name in families:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            family = Family(opened(name, folder), folder)
            rules = scores[RULES]
            rules.families, rules.fusible = rules.families + 1, rules.fusible + len(family.fusible)
            regret = family.regret(family.habit())
            rules.regrets += [] if regret is None else [regret]
            for endpoint, (model, url) in asked.items():
                score_family(scores[endpoint], family, url, model, limits)
    return list(scores.values())


def endpoints_of(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """``NAME=MODEL@URL`` words as name → model and address.

    Raises:
        SystemExit: a word is none.
    """
    found = {}
    for word in words:
        name, _, rest = word.partition("=")
        model, _, url = rest.rpartition("@")
        if not (name and model and url.startswith(("http://", "https://"))):
            raise SystemExit(f"{word!r} is not NAME=MODEL@URL")
        found[name] = (model, url)
    return found


@contextmanager
def scripted_model() -> Iterator[str]:
    """A server that proposes all that it is shown."""
    from shardwright.agents.llm.scripted import serve

    with serve(proposes_all()) as served:
        yield served.base_url


def proposes_all() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A script that answers from the facts it was given: every region, then expert parallelism as wide as it goes."""
    from shardwright.agents.llm.scripted import message, ready

    def script(request: dict[str, Any]) -> dict[str, Any]:
        if (probe := ready(request)) is not None:
            return probe
        tools = {tool["function"]["name"] for tool in request["tools"]}
        results = [json.loads(one["content"]) for one in request["messages"] if one["role"] == "tool"]
        return message(calls=fusions(results) if "propose_region" in tools else plans(results))

    return script


def fusions(results: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """List, propose every region in one reply, end."""
    if not results:
        return [("list_regions", {})]
    names = [row["region"] for row in results[0]["regions"]]
    if len(results) == 1 and names:
        return [("propose_region", {"region": name, "nodes": [], "reason": "all of it"}) for name in names]
    return [("finish", {"order": names, "reason": "the largest first"})]


def plans(results: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Ask for the space, evaluate EP as wide as the world, then FSDP alone; enqueue what is feasible; end."""
    if not results:
        return [("show_space", {})]
    if len(results) == 1:
        world, batch = results[0]["world"], results[0]["batch_sequences"]
        steps = {"micro_batch": 1, "accumulation": max(1, batch // world), "checkpointing": "none"}
        plain = {axis: 1 for axis in ("replicate", "shard", "ep", "tp", "cp", "pp")} | steps
        plain |= {"reshard": True, "prefetch": 1}
        return [("evaluate_plan", plain | {axis: world}) for axis in ("ep", "shard")]
    known = [one["plan"] for one in results if one.get("result") == "feasible"]
    if known and len(results) == 3:
        return [("enqueue_trial", {"plan": name}) for name in known]
    return [("finish", {"explanation": "experts stay where they are"})]


def table(scores: Sequence[Score]) -> str:
    """The report, as Markdown."""
    rows = [
        "| endpoint | open regions found | illegal after gates | first plan's regret | calls | tokens | s | ended |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|")
    for one in scores:
        found = one.metrics()
        share = f"{one.found} of {one.fusible}"
        regret = f"{100 * found['first_plan_regret']:.1f} %" if "first_plan_regret" in found else "no plan"
        regret += f" ({len(one.regrets)} of {one.families})"
        ended = "–" if one.name == RULES else f"{one.families - one.failed} of {one.families} complete"
        cells = [one.name, share, str(one.illegal), regret, f"{one.calls:,}", f"{one.tokens:,}", f"{one.seconds:.1f}"]
        rows.append(f"| {' | '.join([*cells, ended])} |")
    return "\n".join(rows)


def lines(scores: Sequence[Score]) -> list[BenchLine]:
    """One line an endpoint."""
    return [
        line(
            {
                "bench": "agents",
                "case": f"agents/compare/{one.name}",
                "passes": "-",
                "unit": "share",
                "ours": one.metrics()["region_recall"],
                "metrics": one.metrics(),
            }
        )
        for one in scores
    ]
