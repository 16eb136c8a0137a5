"""Fused against eager on live models, in Triton's CPU interpreter: ``fused.py CKPT PLAN [PLAN ...]``.

For each plan: one micro-batch with random adapters, fused and by the plan's switch unfused; loss, every adapter's
gradient and the rows per expert must be the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist

from shardwright.runtime.device import open_device
from shardwright.runtime.fuse import fusions_off
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import open_mesh
from shardwright.runtime.session import Live, build
from shardwright.schemas.plan import load_plan

IDS = torch.arange(2 * 8).reshape(2, 8) * 7 % 250 + 8


def randomise(live: Live) -> None:
    """B is zero at first, which would leave A without a gradient."""
    for name, owned in live.adapters.items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(owned.shape, generator=generator) * 0.1
        owned.local().copy_(whole[tuple(slice(start, stop) for start, stop in owned.box)])


def run(live: Live, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    for owned in live.adapters.values():
        owned.parameter.grad = None
    with live.meter.record():
        loss = summed_loss(live.model, ids)
        loss.backward()
    gradients = {}
    for name, owned in live.adapters.items():
        gradient = owned.local_grad()
        assert gradient is not None, name
        gradients[name] = gradient.clone()
    return float(loss.detach()), gradients, live.meter.finish_step()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checkpoint, paths = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    for path in paths:
        plan = load_plan(path)
        device = open_device("cpu", 0)
        ranks = open_mesh(plan.decision.strategy.mesh, device)
        live = build(plan, checkpoint, ranks, device, None)
        randomise(live)
        ids = IDS[ranks.data_rank : ranks.data_rank + 1]
        fused = run(live, ids)
        with fusions_off(live.switches):
            plain = run(live, ids)
        assert live.switches and abs(fused[0] - plain[0]) <= 1e-5 * plain[0], (fused[0], plain[0])
        for name, gradient in plain[1].items():
            scale = float(gradient.abs().max())
            error = float((fused[1][name] - gradient).abs().max()) if gradient.numel() else 0.0
            assert error <= 2e-5 * max(scale, 1e-3), (name, error, scale)
        norm = sum(float(gradient.square().sum()) for gradient in plain[1].values())
        assert norm > 1e-4, norm
        assert all(torch.equal(fused[2][layer], rows) for layer, rows in plain[2].items()) and plain[2]
        sys.stdout.write(f"{path.parent.name} rank {ranks.rank}: loss {fused[0]:.6f} against {plain[0]:.6f}\n")
    dist.barrier()
    sys.stdout.write(f"rank {dist.get_rank()} done\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
