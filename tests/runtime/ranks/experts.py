"""Two ranks, ep 2: experts where they belong, idle experts, gradient scale, one global norm. ``experts.py PLAN CKPT``.

Every assertion runs on both ranks; a failing rank ends the job with a non-zero code.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.runtime.device import open_device
from shardwright.runtime.experts import dispatch, overlap
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import as_saved
from shardwright.runtime.reference import add_plain_lora, load_plain
from shardwright.runtime.session import Live, build
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.recipe import OptimizerSpec

IDS = torch.arange(2 * 24).reshape(2, 24) * 7 % 250 + 8


def expert_e_is_the_files_e(live: Live, ranks: Ranks, folder: Path) -> None:
    """G1: the owner of expert e holds the file's e, read here by safetensors itself."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stream:
            files.update({name: stream.get_tensor(name) for name in stream.keys()})  # noqa: SIM118
    checked = 0
    for layer in range(2):
        experts: Any = live.model.get_submodule(f"model.layers.{layer}.mlp.experts")
        assert experts.first == 2 * ranks.rank
        for place in range(2):
            stem = f"model.layers.{layer}.block_sparse_moe.experts.{experts.first + place}"
            gate_up = torch.cat([files[f"{stem}.w1.weight"], files[f"{stem}.w3.weight"]])
            assert torch.equal(experts.gate_up_proj[place], gate_up)
            assert torch.equal(experts.down_proj[place], files[f"{stem}.w2.weight"])
            checked += 1
    assert checked == 4


def gradients_equal_one_process(live: Live, plan: AdaptationPlan, ranks: Ranks, folder: Path) -> None:
    """D3: with random B, every adapter's summed gradient is the single-process one: ratio 1, not ep."""
    whole = {}
    for name, owned in live.adapters.items():
        generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
        whole[name] = torch.randn(owned.shape, generator=generator) * 0.1
        owned.local().copy_(whole[name][tuple(slice(a, b) for a, b in owned.box)])
    summed_loss(live.model, IDS[ranks.rank : ranks.rank + 1]).backward()
    model, _ = load_plain(folder, torch.float32, torch.device("cpu"))
    leaves = add_plain_lora(model, plan.decision.lora_targets, whole, "mixtral")
    summed_loss(model, IDS).backward()
    for name, owned in live.adapters.items():
        gradient = owned.local_grad()
        assert gradient is not None, name
        placed = as_saved(owned, gradient, ranks)
        ours = placed.full_tensor() if isinstance(placed, DTensor) else placed
        theirs = leaves[name].grad
        assert theirs is not None and float(theirs.abs().max()) > 1e-4, name
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
        ratio = float(ours.norm() / theirs.norm())
        assert abs(ratio - 1) < 1e-4, (name, ratio)


def idle_experts(live: Live, ranks: Ranks) -> None:
    """D1: all tokens go to experts 0 and 1, so rank 1 is idle. The step ends, and its gradients are zero, not None."""
    calls = [0]
    original = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    dispatch.dist.all_to_all_single = counted
    forwards = {}
    for layer in range(2):
        gate: Any = live.model.get_submodule(f"model.layers.{layer}.mlp.gate")
        forwards[layer] = gate.forward

        def forced(hidden: torch.Tensor, forward: Any = gate.forward) -> tuple[torch.Tensor, ...]:
            logits, scores, index = forward(hidden)
            return logits, scores, torch.arange(2).expand_as(index).contiguous()

        gate.forward = forced
    for owned in live.adapters.values():
        owned.parameter.grad = None
    summed_loss(live.model, IDS[ranks.rank : ranks.rank + 1]).backward()
    for layer, forward in forwards.items():
        gate = live.model.get_submodule(f"model.layers.{layer}.mlp.gate")
        gate.forward = forward
    dispatch.dist.all_to_all_single = original
    for name, owned in live.adapters.items():
        gradient = owned.local_grad()
        assert gradient is not None, name
        if owned.expert:
            assert bool((gradient == 0).all()) == (ranks.rank == 1), name
    seen: list[int] = [0, 0]
    dist.all_gather_object(seen, calls[0])
    assert seen[0] == seen[1] > 0, seen


def one_norm_over_two_meshes(ranks: Ranks) -> None:
    """D5: eight dense gradients of 2 and eight expert gradients of 3, each value on one rank: √(8·4 + 8·9)."""
    adapters = {}
    for index in range(16):
        mine = index % 2 == ranks.rank
        value = nn.Parameter(torch.zeros(1 if mine else 0))
        value.grad = torch.full_like(value, 2.0 if index < 8 else 3.0)
        adapters[f"{index}.lora_b"] = SimpleNamespace(
            local=value.detach, local_grad=lambda value=value: value.grad, parameter=value, slots=None
        )
    optimizer = AdapterOptimizer(adapters, OptimizerSpec(), ranks)  # type: ignore[arg-type]
    norm = optimizer.global_norm(optimizer.gradients())
    assert abs(norm - math.sqrt(8 * 4 + 8 * 9)) < 1e-9, norm


def disjoint_norms_add_as_squares(ranks: Ranks) -> None:
    """D7: expert gradients of norm 3 on one rank and 4 on the other: 5 on both, not their mean of 3.5."""
    value = nn.Parameter(torch.zeros(1))
    value.grad = torch.full_like(value, 3.0 + ranks.rank)
    owned = SimpleNamespace(local=value.detach, local_grad=lambda: value.grad, parameter=value, slots=None)
    optimizer = AdapterOptimizer({"experts.lora_b": owned}, OptimizerSpec(), ranks)  # type: ignore[dict-item]
    norm = optimizer.global_norm(optimizer.gradients())
    assert abs(norm - 5.0) < 1e-9, norm


def uneven_splits(ranks: Ranks) -> None:
    """C10: identity experts: what is dispatched comes back, whatever the split, empty and odd ones included."""
    generator = torch.Generator().manual_seed(ranks.rank)
    for case in ("random", "all-to-0", "all-to-3", "nothing"):
        tokens = 0 if case == "nothing" and ranks.rank == 0 else 7 + ranks.rank
        index = torch.randint(0, 4, (tokens, 2), generator=generator)
        if case.startswith("all-to"):
            index = torch.full_like(index, int(case[-1]))
        hidden = torch.randn(tokens, 8, generator=generator, requires_grad=True)
        weights = torch.rand(tokens, 2, generator=generator)
        route = dispatch.plan_route(index, 4, 2, ranks.ep_group)
        rows = dispatch.dispatch(hidden, route, ranks.ep_group)
        assert rows.shape[0] == sum(route.sizes) == sum(route.receive)
        out = dispatch.combine(rows, route, weights, ranks.ep_group)
        expected = hidden * weights.sum(1, keepdim=True)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        torch.testing.assert_close(hidden.grad, weights.sum(1, keepdim=True).expand_as(hidden))


def padded_splits(ranks: Ranks) -> None:
    """Experts that double their rows, in padded groups: sizes are multiples, what is between is zero and stays out."""
    generator = torch.Generator().manual_seed(20 + ranks.rank)
    for case, multiple in (("random", 4), ("all-to-0", 3), ("all-to-3", 8), ("nothing", 16)):
        tokens = 0 if case == "nothing" and ranks.rank == 0 else 5 + 3 * ranks.rank
        index = torch.randint(0, 4, (tokens, 2), generator=generator)
        if case.startswith("all-to"):
            index = torch.full_like(index, int(case[-1]))
        hidden = torch.randn(tokens, 8, generator=generator, requires_grad=True)
        weights = torch.rand(tokens, 2, generator=generator)
        bare = dispatch.plan_route(index, 4, 2, ranks.ep_group)
        route = dispatch.padded(bare, multiple)
        assert route.sizes == [-(-size // multiple) * multiple for size in bare.sizes] == route.local_counts.tolist()
        rows = dispatch.dispatch(hidden, route, ranks.ep_group)
        assert rows.shape[0] == sum(route.sizes)
        for part, size in zip(rows.detach().split(route.sizes), bare.sizes, strict=True):
            assert bool(part[:size].any(1).all()) and not bool(part[size:].any())
        biased = rows * 2 + torch.full_like(rows, 5.0).requires_grad_()
        out = dispatch.combine(biased, route, weights, ranks.ep_group)
        total = weights.sum(1, keepdim=True)
        torch.testing.assert_close(out, hidden * 2 * total + 5 * total)
        out.sum().backward()
        torch.testing.assert_close(hidden.grad, 2 * total.expand_as(hidden))


def chunks_with_nothing(ranks: Ranks) -> None:
    """Identity experts in pieces: more pieces than tokens, a rank without tokens, weights before and after."""
    generator = torch.Generator().manual_seed(7 + ranks.rank)
    for tokens, chunks in ((5 + 3 * ranks.rank, 2), (2 * ranks.rank, 4), (9, 3)):
        index = torch.randint(0, 4, (tokens, 2), generator=generator)
        weights = torch.rand(tokens, 2, generator=generator)
        for weigh_inputs in (False, True):
            hidden = torch.randn(tokens, 8, generator=generator, requires_grad=True)
            out, counts = overlap.in_chunks(
                hidden,
                index,
                weights,
                lambda rows, route: rows * 3,
                chunks=chunks,
                num_experts=4,
                ep=2,
                group=ranks.ep_group,
                weigh_inputs=weigh_inputs,
            )
            expected = 3 * weights.sum(1, keepdim=True)
            torch.testing.assert_close(out, hidden * expected)
            assert torch.equal(counts, torch.bincount(index.flatten(), minlength=4))
            out.sum().backward()
            torch.testing.assert_close(hidden.grad, expected.expand_as(hidden))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan, folder = load_plan(Path(sys.argv[1])), Path(sys.argv[2])
    device = open_device("cpu", 0)
    ranks = open_mesh(plan.decision.strategy.mesh, device)
    live = build(plan, folder, ranks, device, None)
    expert_e_is_the_files_e(live, ranks, folder)
    gradients_equal_one_process(live, plan, ranks, folder)
    idle_experts(live, ranks)
    one_norm_over_two_meshes(ranks)
    disjoint_norms_add_as_squares(ranks)
    uneven_splits(ranks)
    padded_splits(ranks)
    chunks_with_nothing(ranks)
    assert isinstance(live.meter, LoadMeter) and not live.meter.step
    dist.barrier()
    sys.stdout.write(f"rank {ranks.rank} done\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
