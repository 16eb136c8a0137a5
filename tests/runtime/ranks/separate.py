"""Experts that are modules of their own, on one mesh after the other: ``separate.py MESHES.json``.

Two layers with few tokens: some experts get none, and other ones on other ranks. Loss, gradient norm and the gradient
of every adapter against the same model with plain LoRA in one process, fp32.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwright.checkpoints.targets import resolve_targets
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.checks.step import adapters_moved, gradients_present
from shardwright.runtime.device import open_device
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.lora.inject import inject
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import as_saved, owned_parameters
from shardwright.runtime.parallelize import decoder_layers, shard
from shardwright.runtime.reference import add_plain_lora
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.recipe import LoraSpec, OptimizerSpec, PrecisionSpec
from shardwright.schemas.strategy import Mesh, ParallelStrategy

V, H, I, E, K = 32, 16, 12, 8, 2
SEQUENCES, TOKENS = 4, 6
IDS = torch.randint(3, 5, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(4))
IDS[:2] = 3
COUNTED = SEQUENCES * (TOKENS - 1)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False)
        self.down_proj = nn.Linear(I, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden.reshape(-1, H)
        logits = self.gate(flat)
        weights, index = logits.softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            if token.numel():
                out = out.index_add(0, token, expert(flat[token]) * weights[token, choice, None])
        return out.view_as(hidden), logits


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(H, H, bias=False)})
        self.mlp = Block()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn["q_proj"](hidden)
        out: Tensor = hidden + self.mlp(hidden)[0]
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(H, V, bias=False)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(logits=self.lm_head(hidden))


def values_of(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))) * 0.3


def check(axes: dict[str, int]) -> str:
    spec = LoraSpec(targets=("attention", "experts"), rank=2, alpha="4")
    targets = resolve_targets({n: tuple(p.shape) for n, p in Model().named_parameters()}, spec, model_type="own")
    mesh = Mesh(**axes)
    ranks, meter, model = open_mesh(mesh, open_device("cpu", 0)), LoadMeter(), Model()
    more: dict[str, Any] = {"ranks": ranks, "meter": meter, "dropout": 0.0, "dtype": torch.float32}
    if mesh.ep > 1:
        try:
            inject(model, targets, model_type="own", **more)
        except LegalityError as error:
            return f"{mesh.text()} refused {error.code}"
        raise AssertionError("experts in modules of their own cannot be shared out")
    inject(model, targets, model_type="own", **more)
    checkpoint_layers(list(decoder_layers(model).values()), meter)
    strategy = ParallelStrategy(mesh=mesh, micro_batch_sequences=1, accumulation_steps=SEQUENCES // ranks.world)
    shard(model, strategy, PrecisionSpec(base="float32"), ranks)
    parameters = owned_parameters(model)
    adapters = {name: owned for name, owned in parameters.items() if owned.adapter}
    for name, owned in adapters.items():
        owned.local().copy_(owned.part(values_of(name, owned.shape)))
    share = SEQUENCES // ranks.world
    total = torch.zeros(())
    with meter.record():
        for row in IDS[ranks.rank * share : (ranks.rank + 1) * share].split(1):
            loss = summed_loss(model, row) / COUNTED
            loss.backward()
            total += loss.detach()
    dist.all_reduce(total)
    loads = meter.finish_step()
    plain = Model()
    leaves = add_plain_lora(plain, targets, {n: values_of(n, o.shape) for n, o in adapters.items()}, "own")
    expected = summed_loss(plain, IDS) / COUNTED
    expected.backward()
    assert abs(float(total) - float(expected.detach())) < 1e-5
    worst, squares = 0.0, 0.0
    for name, owned in adapters.items():
        mine, leaf = owned.local_grad(), leaves[name].grad
        assert mine is not None, name
        placed = as_saved(owned, mine, ranks)
        ours = placed.full_tensor() if isinstance(placed, DTensor) else placed
        theirs = torch.zeros(owned.shape) if leaf is None else leaf
        worst = max(worst, float((ours - theirs).abs().max()))
        squares += float(theirs.double().square().sum())
    assert worst < 1e-5, worst
    idle = sum(int((rows == 0).sum()) for rows in loads.values())
    assert idle > 0
    assert set(loads) == {"layers.0.mlp.experts", "layers.1.mlp.experts"}
    assert {int(rows.sum()) for rows in loads.values()} == {SEQUENCES * TOKENS * K}
    assert gradients_present(parameters, loads).passed
    wrong = {name: torch.full_like(rows, 1) for name, rows in loads.items()}
    assert gradients_present(parameters, wrong).passed is False, "an idle expert's zeros are looked for"
    before = {name: owned.local().clone() for name, owned in adapters.items() if name.endswith("lora_b")}
    optimizer = AdapterOptimizer(adapters, OptimizerSpec(), ranks)
    norm = optimizer.global_norm(optimizer.gradients())
    assert abs(norm - squares**0.5) < 1e-5, (norm, squares**0.5)
    optimizer.step(0.01, norm)
    assert adapters_moved(before, parameters, loads).passed
    return f"{mesh.text()} worst {worst:.1e} idle {idle}"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for axes in json.loads(sys.argv[1]):
        line = check(axes)
        if dist.get_rank() == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
