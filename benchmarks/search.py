"""Speed and regret of the strategy search: ``python benchmarks/search.py [k3|regret|elsewhere] [--seeds N]``.

``search/k3-128xh200``: the whole search for LoRA on Kimi K3 on 128 × H200, explored space. ``search/regret``:
the study without warm start on a joint space (mesh, schedule, recomputed layers of each kind) whose optimum is
known exactly, beside random search and TPE over plain categorical axes. ``search/regret-elsewhere``: the same study
on explored spaces that are too large for that, against the best of 20,000 legal draws. Needs no accelerator.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lines import append, line, versions
from models import deepseek_v3, glm_5, glm_46, kimi_k3, kimi_linear, qwen3_30b, recipe_for, targets_for

from shardwright.agents.strategy.complete import Completion, with_layers
from shardwright.agents.strategy.oracle import scan
from shardwright.agents.strategy.pareto import lost_because
from shardwright.agents.strategy.pricing import SAFETY_FRACTION, Pricer
from shardwright.agents.strategy.run import run_search
from shardwright.agents.strategy.study import run_study
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.axes.checkpointed_layers import layers_of
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.context import SearchContext, divisors
from shardwright.search_spaces.cost import workload
from shardwright.search_spaces.legality import violations_in
from shardwright.search_spaces.space import enumerate_plans

TRIALS = 300
DRAWS = 20_000
ADMITTED = (
    ("checkpointing", "full"),
    ("checkpointing", "layers"),
    ("prefetch_depth", 2),
    ("prefetch_depth", 4),
    ("overlap", "chunked"),
    ("overlap_chunks", 2),
    ("overlap_chunks", 4),
    ("dispatch", "hierarchical"),
    ("reshard_scope", "node"),
)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def k3() -> dict[str, Any]:
    """Time of the whole search, and what FSDP2 + EP64 costs beside the best within its memory."""
    model, cluster = kimi_k3("mxfp4"), load_cluster("h200-128")
    recipe, targets = recipe_for(batch=256, tokens=4096), targets_for(model, rank=16)
    with tempfile.TemporaryDirectory() as folder:
        began, worked = time.perf_counter(), time.process_time()
        result = run_search(model, recipe, cluster, targets, trials=64, journal=Path(folder) / "journal", explore=True)
        seconds, busy = time.perf_counter() - began, time.process_time() - worked
    context = SearchContext(model, recipe, cluster, explore=True)
    table, pricer = enumerate_plans(context), Pricer.of(workload(model, recipe, targets), cluster)
    began, worked = time.perf_counter(), time.process_time()
    found = scan(table, pricer)
    rate, own = len(table) / (time.perf_counter() - began), len(table) / (time.process_time() - worked)
    usual = ParallelStrategy(mesh=Mesh(shard=2, ep=64), accumulation_steps=2, checkpointing="full")
    assert violations_in(context, usual) == ()
    cost = pricer.report(usual)
    no_more = np.flatnonzero(found.columns.reserved <= cost.memory.reserved_bytes)
    better = found.priced(int(no_more[np.argmin(found.columns.step_ms[no_more])]))
    say(f"{len(table)} plans, {found.feasible} fit, {rate:,.0f} plans/s; whole search {seconds:.1f} s")
    say(f"FSDP2 + EP64: {usual.text()}: {cost.time.step_ms:,.0f} ms, {cost.memory.reserved_bytes / 2**30:.1f} GiB")
    for part in sorted(cost.memory.components, key=lambda c: -c.bytes):
        say(f"  {part.name:<24}{part.bytes / 2**30:8.2f} GiB  {', '.join(part.moments)}")
    say(f"best within its memory: {better.strategy.text()}: {better.cost.time.step_ms:,.0f} ms, "
        f"{better.cost.memory.reserved_bytes / 2**30:.1f} GiB")  # fmt: skip
    rival = type(better)(usual, cost)
    say(f"  EP64 lost: {lost_because(better, rival)}")
    say("best of the search: " + " ".join(result.explanation))
    metrics = {
        "seconds": round(seconds, 2),
        "plans_per_second": round(rate),
        "processor_seconds": round(busy, 2),
        "plans_per_processor_second": round(own),
        "load_average": round(os.getloadavg()[0], 1),
        "plans": float(len(table)),
        "ep64_step_ms": cost.time.step_ms,
        "ep64_reserved_gib": round(cost.memory.reserved_bytes / 2**30, 2),
        "best_within_step_ms": better.cost.time.step_ms,
        "best_step_ms": result.cost.time.step_ms,
    }
    return {"bench": "search", "case": "search/k3-128xh200", "unit": "s", "ours": round(seconds, 2), "metrics": metrics}


def joint_space() -> tuple[SearchContext, Pricer, Completion]:
    """Kimi-Linear-48B on 16 × H200 with 60 GiB each: recomputing some layers is worth it there.

    Linear attention is priced as a chunked kernel, as for a model without a class: unfused it fits nowhere here.
    """
    model, spec = kimi_linear().model_copy(update={"transformers_class": False}), load_cluster("h200-128")
    device = spec.device.model_dump() | {"usable_memory_bytes": 60 * 2**30}
    cluster = ClusterSpec.model_validate({**spec.model_dump(), "nodes": 2, "device": device})
    recipe, targets = recipe_for(batch=64, tokens=8192), targets_for(model, rank=16)
    context = SearchContext(model, recipe, cluster, admitted=ADMITTED)
    pricer = Pricer.of(workload(model, recipe, targets), cluster)
    return context, pricer, Completion(context, pricer)


def optimum(context: SearchContext, complete: Completion) -> tuple[float, int]:
    """Step time of the best plan of the joint space, every one priced, and how many there are."""
    table = enumerate_plans(context)
    bare = np.flatnonzero(table.plans.recomputed.sum(axis=0) == 0)
    best = float("inf")
    for position in bare:
        _, step_ms, fits = complete.best_counts(table.plans.take(slice(position, position + 1)))
        best = min(best, step_ms) if fits else best
    return best, len(bare) * len(complete.counts)


def ours(seed: int, context: SearchContext, pricer: Pricer, complete: Completion) -> float:
    found = run_study(context, pricer.report, key="regret", trials=TRIALS, seed=seed, journal=None, complete=complete)
    return found.best_step_ms or float("inf")


def plain(sampler: optuna.samplers.BaseSampler, context: SearchContext, pricer: Pricer) -> float:
    """The same space as plain categorical axes: an illegal combination is a violated constraint."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    world, kinds, best = context.world, context.profile.layer_kinds, float("inf")
    for _ in range(TRIALS):
        trial = study.ask()
        pick = trial.suggest_categorical
        mesh = {name: pick(name, list(divisors(world))) for name in ("ep", "shard")}
        counts = tuple(trial.suggest_int(kind.name, 0, len(kind.layer_indices)) for kind in kinds)
        chunks = pick("overlap_chunks", [1, 2, 4])
        strategy = ParallelStrategy(
            mesh=Mesh(**mesh),
            micro_batch_sequences=pick("micro", [1, 2, 4]),
            accumulation_steps=pick("accumulation", [1, 2, 4]),
            reshard_after_forward=pick("reshard", [True, False]),
            reshard_scope=pick("scope", ["all", "node"]),
            prefetch_depth=pick("prefetch", [1, 2, 4]),
            overlap="chunked" if chunks > 1 else "none",
            overlap_chunks=chunks,
            dispatch=pick("dispatch", ["all_to_all", "hierarchical"]),
        )
        strategy = with_layers(context, strategy, counts)
        assert strategy.checkpointing != "layers" or strategy.checkpointed_layers == layers_of(kinds, counts)
        if violations_in(context, strategy):
            trial.set_constraint("illegal", 1.0)
            study.tell(trial, 1e9)
            continue
        cost = pricer.report(strategy)
        excess = cost.memory.fraction - SAFETY_FRACTION
        trial.set_constraint("illegal", max(0.0, excess))
        study.tell(trial, cost.time.step_ms)
        best = min(best, cost.time.step_ms) if excess <= 0 else best
    return best


def median_regret(name: str, best: float, seeds: int, run: Callable[[int], float]) -> tuple[float, float]:
    """(median, worst) of how far each seed's best stands above ``best``, percent; no plan at all counts as 1e6."""
    values = []
    for seed in range(seeds):
        values.append(min(100 * (run(seed) / best - 1), 1e6))
        say(f"  {name}, seed {seed}: {values[-1]:.2f} %")
    say(f"{name}: median regret {statistics.median(values):.2f} %, worst {max(values):.2f} %")
    return round(statistics.median(values), 3), round(max(values), 3)


def of_all(best: float, seeds: int, space: tuple[SearchContext, Pricer, Completion]) -> dict[str, float]:
    """Regret of our study, of random draws and of TPE over plain axes."""
    context, pricer, complete = space
    middle, worst = median_regret("ours", best, seeds, lambda seed: ours(seed, context, pricer, complete))
    found = {"median_pct": middle, "worst_pct": worst}
    for name, sampler in (("random", optuna.samplers.RandomSampler), ("tpe", optuna.samplers.TPESampler)):

        def run(seed: int, sampler: Callable[..., optuna.samplers.BaseSampler] = sampler) -> float:
            return plain(sampler(seed=seed), context, pricer)

        found[f"{name}_plain_pct"], _ = median_regret(f"{name}, plain axes", best, seeds, run)
    return found


def regret(seeds: int) -> dict[str, Any]:
    space = joint_space()
    best, plans = optimum(space[0], space[2])
    say(f"joint space of {plans} plans; optimum {best:.6g} ms")
    counts = {"seeds": float(seeds), "trials": float(TRIALS), "plans": float(plans)}
    metrics = {**of_all(best, seeds, space), **counts}
    return {"bench": "search", "case": "search/regret", "unit": "%", "ours": metrics["median_pct"], "metrics": metrics}


def elsewhere_spaces() -> dict[str, tuple[SearchContext, Pricer, Completion]]:
    """Explored spaces of models and clusters that the exact joint space does not hold."""
    cases = {
        "glm-5-h200-128": (glm_5(), "h200-128", 256, 8192),
        "deepseek-v3-h100-128": (deepseek_v3(), "h100-128", 256, 4096),
        "qwen3-30b-h200-8": (qwen3_30b(), "h200-8", 64, 4096),
        "kimi-linear-h200-8": (kimi_linear(), "h200-8", 64, 4096),
        "glm-4.6-a100-128": (glm_46(), "a100-8", 256, 4096),
    }
    spaces = {}
    for name, (model, cluster_name, batch, tokens) in cases.items():
        cluster = load_cluster(cluster_name)
        if cluster_name == "a100-8":
            wide = load_cluster("h100-128").model_dump()
            cluster = ClusterSpec.model_validate({**wide, "device": cluster.device.model_dump()})
        recipe, targets = recipe_for(batch=batch, tokens=tokens), targets_for(model, rank=16)
        context = SearchContext(model, recipe, cluster, explore=True)
        pricer = Pricer.of(workload(model, recipe, targets), cluster)
        spaces[name] = context, pricer, Completion(context, pricer)
    return spaces


def best_of_draws(seed: int, context: SearchContext, complete: Completion, draws: int = DRAWS) -> float:
    """Least step time among ``draws`` plans drawn evenly from all legal ones, each with its best recomputation.

    A plan's time without any recomputation bounds it from below, so they are taken in that order until none can win.
    """
    table = enumerate_plans(context)
    bare = np.flatnonzero(table.plans.recomputed.sum(axis=0) == 0)
    drawn = np.unique(np.random.default_rng(seed).choice(bare, size=draws, replace=len(bare) < draws))
    bounds, best = complete.pricer.columns(table.plans.take(drawn)).step_ms, float("inf")
    for place in np.argsort(bounds, kind="stable"):
        if bounds[place] >= best:
            break
        position = int(drawn[place])
        _, step_ms, fits = complete.best_counts(table.plans.take(slice(position, position + 1)))
        best = min(best, step_ms) if fits else best
    return best


def elsewhere(seeds: int) -> dict[str, Any]:
    """Regret of 300 trials against the best of 20,000; a negative value: the study found a better plan.

    Beside it random draws and TPE over the plain axes of the joint space, fewer than ours has here.
    """
    metrics: dict[str, float] = {"seeds": float(seeds), "trials": float(TRIALS), "draws": float(DRAWS)}
    for name, space in elsewhere_spaces().items():
        best = best_of_draws(0, space[0], space[2])
        say(f"{name}: best of {DRAWS} draws {best:,.1f} ms")
        metrics |= {f"{name}_{key}": value for key, value in of_all(best, seeds, space).items()}
    worst = max(value for key, value in metrics.items() if key.endswith("_median_pct"))
    return {"bench": "search", "case": "search/regret-elsewhere", "unit": "%", "ours": worst, "metrics": metrics}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="?", choices=["k3", "regret", "elsewhere", "all"], default="all")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="print only; write no result lines")
    given = parser.parse_args(arguments)
    cases = []
    if given.case in ("k3", "all"):
        cases.append(k3())
    if given.case in ("regret", "all"):
        cases.append(regret(given.seeds))
    if given.case in ("elsewhere", "all"):
        cases.append(elsewhere(given.seeds))
    if not given.dry:
        facts = {"versions": versions(("numpy", "optuna"))}
        say(f"wrote {append([line({**facts, **case}) for case in cases])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
