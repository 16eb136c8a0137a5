"""Sequences cut over ranks: ``context.py JOBS.json`` holds (name, plan, checkpoint) triples.

Eight rows of 24 tokens, two a micro-batch; whole rows, then rows of documents of uneven lengths that cross every cut,
with labels that do not count and a padded tail. Loss, gradient norm and the gradient of every adapter against plain
transformers with plain LoRA in one process, each document by itself, fp32; then the held-out loss.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from families import values_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.kernels.kda.reference import kda_recurrent_reference
from shardwright.kernels.short_conv.reference import short_conv_reference
from shardwright.runtime.batch import as_batch, counted_tokens
from shardwright.runtime.checks.step import replicas_agree
from shardwright.runtime.context import Place, cut_batch
from shardwright.runtime.context_delta import convolution, delta_rule
from shardwright.runtime.device import open_device
from shardwright.runtime.documents import planes
from shardwright.runtime.evaluate import evaluate
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import as_saved, sum_copies
from shardwright.runtime.reference import add_plain_lora, load_plain, reference_step
from shardwright.runtime.session import Live, build
from shardwright.schemas.plan import AdaptationPlan, load_plan

ROWS, TOKENS, MICRO, HELD_OUT = 8, 24, 2, 3
LENGTHS = ((24,), (5, 2, 11, 6), (7, 17), (1, 1, 1, 20), (13, 8), (12, 12), (3, 10, 11), (22, 2))
"""Documents of each row; cuts are at 6, 12 and 18 of two ranks, at every third token of four."""
TOLERANCE = 1e-5
"""Of a loss, of a gradient's value, and of the norm's first digit: fp32 against fp32."""
ROUNDING = {"kimi_k3": 2e-4}
"""Plain fp32 in one process is 2.2e-4 from fp64 in this family's adapters: its delta rule amplifies rounding. The same
mathematics is held to 1e-11 in fp64 below."""
KINDS = ("whole", "documents")
NAMED = ("qwen3_moe", "deepseek_v3", "kimi_linear", "deepseek_v32")
"""Families of which both kinds of rows run; the others run documents."""
WHOLE = ("deepseek_v32-ties",)
"""Models of which rows of one document run alone: which of equal scores torch takes depends on how many there are, and
the reference runs each document by itself."""
REFERENCES: dict[str, Any] = {}


def rows_of(kind: str) -> np.ndarray:
    """[8, 24] ids, or [8, 3, 24] planes."""
    generator = np.random.default_rng(11)
    ids = generator.integers(3, 90, (ROWS, TOKENS))
    if kind == "whole":
        return ids
    number = np.full((ROWS, TOKENS), -1)
    for row, lengths in enumerate(LENGTHS[:ROWS]):
        number[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    counted = (generator.random((ROWS, TOKENS)) < 0.8) & (number >= 0)
    counted[:, 6] = counted[:, 12] = counted[:, 18] = True
    return planes(ids, number, counted & (number >= 0))


def reference(name: str, kind: str, plan: AdaptationPlan, folder: Path, shapes: dict[str, Any]) -> Any:
    """Loss and gradients of the whole batch, and the loss of held-out rows."""
    key = f"{name} {kind}"
    if key not in REFERENCES:
        model, files = load_plain(folder, torch.float32, torch.device("cpu"))
        whole = {adapter: values_of(adapter, shape) for adapter, shape in shapes.items()}
        leaves = add_plain_lora(model, plan.decision.lora_targets, whole, files.config.text_model_type)
        rows = torch.from_numpy(rows_of(kind))
        step = reference_step(model, leaves, rows, torch.device("cpu"))
        gradients = {adapter: leaf.grad for adapter, leaf in leaves.items()}
        held_out = reference_step(model, {}, rows[:HELD_OUT], torch.device("cpu")).loss
        REFERENCES[key] = step.loss, gradients, held_out
    return REFERENCES[key]


def trained(live: Live, kind: str, ranks: Ranks) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss over all ranks of the batch, with accumulation; gradients stay on the adapters."""
    rows = rows_of(kind)
    tokens, share = counted_tokens(rows), ROWS // ranks.sizes.data_ranks
    mine = torch.from_numpy(rows[ranks.data_rank * share : (ranks.data_rank + 1) * share])
    total = torch.zeros((), dtype=torch.float64)
    with live.meter.record():
        for part in mine.split(MICRO):
            loss = summed_loss(live.model, part) / tokens
            loss.backward()
            total += loss.detach()
    dist.all_reduce(total)
    sum_copies(live.adapters, ranks)
    return float(total), live.meter.finish_step()


def compared(live: Live, name: str, plain: dict[str, Any], ranks: Ranks) -> tuple[float, float]:
    """Every adapter's gradient beside that of one process: the largest difference, and the sum of squares of these."""
    worst = squares = 0.0
    for adapter, owned in live.adapters.items():
        mine = owned.local_grad()
        assert mine is not None, (name, adapter)
        placed = as_saved(owned, mine, ranks)
        ours = placed.full_tensor() if isinstance(placed, DTensor) else placed
        theirs = torch.zeros(owned.shape) if plain[adapter] is None else plain[adapter]
        error = float((ours - theirs).abs().max())
        assert error < ROUNDING.get(name, TOLERANCE), (name, adapter, error)
        assert float(theirs.abs().max()) > 1e-6, (name, adapter)
        worst = max(worst, error)
        squares += float(theirs.double().square().sum())
    return worst, squares


def check(name: str, plan: AdaptationPlan, folder: Path, ranks: Ranks) -> str:
    live = build(plan, folder, ranks, open_device("cpu", 0), None)
    for adapter, owned in live.adapters.items():
        owned.local().copy_(owned.part(values_of(adapter, owned.shape)))
    optimizer = AdapterOptimizer(live.adapters, plan.decision.recipe.optimizer, ranks)
    shapes = {adapter: owned.shape for adapter, owned in live.adapters.items()}
    worst = 0.0
    for kind in KINDS if name in NAMED else KINDS[:1] if name in WHOLE else KINDS[-1:]:
        optimizer.clear()
        loss, loads = trained(live, kind, ranks)
        plain_loss, plain, plain_held_out = reference(name, kind, plan, folder, shapes)
        assert abs(loss - plain_loss) < TOLERANCE, (name, kind, loss, plain_loss)
        assert replicas_agree(live.parameters, ranks).passed, name
        error, squares = compared(live, name, plain, ranks)
        worst = max(worst, error)
        norm, plain_norm = optimizer.global_norm(optimizer.gradients()), squares**0.5
        allowed = ROUNDING.get(name, TOLERANCE) * max(1.0, plain_norm)
        assert abs(norm - plain_norm) < allowed, (name, kind, norm, plain_norm)
        chosen = {int(rows.sum()) for rows in loads.values()}
        assert len(chosen) == 1 and chosen.pop() % (ROWS * TOKENS) == 0, (name, "every token is counted once", loads)
        held_out = evaluate(live.model, rows_of(kind)[:HELD_OUT], 0, 1, ranks, open_device("cpu", 0)).loss
        assert abs(held_out - plain_held_out) < TOLERANCE, (name, kind, held_out, plain_held_out)
    return f"{name}: worst {worst:.1e}"


def delta_rule_is_exact(place: Place) -> None:
    """Recurrence and convolution of cut rows in fp64, with every gradient, against whole documents to 1e-11."""
    generator = torch.Generator().manual_seed(3)
    rows = as_batch(torch.from_numpy(rows_of("documents")))
    mine, cut = cut_batch(rows, place)
    shapes = {"q": (2, 6), "k": (2, 6), "v": (4, 5), "g": (4, 6), "beta": (4,), "x": (7,)}
    whole = {
        name: torch.randn(ROWS, TOKENS, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    taps = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    upstream = torch.randn(ROWS, TOKENS, 4, 5, generator=generator, dtype=torch.float64)
    assert rows.positions is not None
    ends = [place for place in range(ROWS * TOKENS) if rows.positions.flatten()[place] == 0] + [ROWS * TOKENS]
    settings: dict[str, Any] = {"gate": "given", "beta_sigmoid": False}

    def run(parts: list[Tensor], bounds: tuple[int, ...], states: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = parts
        decay = -torch.nn.functional.softplus(g)
        given = (q, k, v, decay, beta.sigmoid(), None, None, states)
        return kda_recurrent_reference(*given, cu_seqlens=bounds, **settings)

    streams = [whole[name] for name in ("q", "k", "v", "g", "beta")]
    expected = run([stream.reshape(1, -1, *stream.shape[2:]) for stream in streams], tuple(ends), None)[0]
    expected = expected.view(upstream.shape)
    mixed, _ = short_conv_reference(whole["x"].reshape(1, -1, 7), taps, silu=False, cu_seqlens=ends)
    mixed = mixed.view(ROWS, TOKENS, 7)
    ((expected * upstream).sum() + mixed.square().sum()).backward()
    own = {name: place.own(value.detach()).requires_grad_() for name, value in whole.items()}
    found = delta_rule(run, tuple(own[name] for name in ("q", "k", "v", "g", "beta")), cut)
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(found, place.own(expected.detach()), **close)
    convolved = convolution(own["x"], taps, None, cut)
    torch.testing.assert_close(convolved, place.own(mixed.detach()), **close)
    ((found * place.own(upstream)).sum() + convolved.square().sum()).backward()
    for name, value in own.items():
        torch.testing.assert_close(value.grad, place.own(whole[name].grad), **close)
    assert mine.tokens < rows.tokens


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    delta_rule_is_exact(Place(dist.get_world_size(), dist.get_rank(), dist.group.WORLD))
    for name, plan_path, folder in json.loads(Path(sys.argv[1]).read_text()):
        plan = load_plan(Path(plan_path))
        ranks = open_mesh(plan.decision.strategy.mesh, open_device("cpu", 0))
        line = check(name, plan, Path(folder), ranks)
        if ranks.rank == 0:
            sys.stdout.write(f"{plan.decision.strategy.text()} {line}\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
