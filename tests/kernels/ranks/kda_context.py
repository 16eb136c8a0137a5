"""One sequence over several ranks (gloo) against the same sequence on one: outputs and every gradient of every rank.

Run by torchrun under TRITON_INTERPRET=1. Prints the largest relative error of this rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.gated_delta import cases as scalar_cases  # noqa: E402
from shardwright.kernels.gated_delta.op import gated_delta  # noqa: E402
from shardwright.kernels.kda import cases  # noqa: E402
from shardwright.kernels.kda.context import delta_rule_context  # noqa: E402
from shardwright.kernels.kda.op import kda  # noqa: E402
from shardwright.kernels.kda.operands import Settings  # noqa: E402
from shardwright.kernels.verify import relative_error  # noqa: E402
from shardwright.runtime.fused_delta_context import neighbours  # noqa: E402

T, H = 60, 2
NAMES = cases.INPUT_NAMES[:7]


def drawn(kind: str) -> list[Tensor]:
    """Decays so mild that the first token still weighs on the last rank's."""
    make = scalar_cases.inputs if kind == "scalar" else cases.inputs
    found = list(make({"T": T, "H": H, "K": 64, "V": 64}, torch.float32, "cpu", 3)[:7])
    found[3] = found[3] * 0.3 - 6.0
    return found


def passes(function: Any, given: list[Tensor], do: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    o = function(leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def worst(kind: str, bounds: tuple[int, ...], cuts: list[int]) -> float:
    """The largest relative error over outputs and gradients of this rank; parameters' gradients are summed."""
    given, rank = drawn(kind), dist.get_rank()
    do = torch.randn((1, T, H, 64), generator=torch.Generator().manual_seed(5))
    settings = Settings("softplus", -5.0, True)
    op: Any = gated_delta if kind == "scalar" else kda
    whole = passes(lambda leaves: op(*leaves, gate="softplus", cu_seqlens=bounds)[0], given, do)
    low, high = cuts[rank], cuts[rank + 1]
    own = (0, *(at - low for at in bounds if low < at < high), high - low)
    place = neighbours(None, continues=low not in bounds)
    part = [t[:, low:high].contiguous() if n < 5 else t for n, t in enumerate(given)]
    mine = passes(
        lambda leaves: delta_rule_context((*leaves, None), settings, place, own)[0], part, do[:, low:high].contiguous()
    )
    for gradient in mine[6:]:
        dist.all_reduce(gradient)
    wanted = [t[:, low:high] if n < 6 else t for n, t in enumerate(whole)]
    if kind == "channels" and len(bounds) == 2 and rank:
        alone = op(*part, gate="softplus")[0]
        assert relative_error(alone, wanted[0]) > 1e-2, "the state that arrives does not matter: this proves nothing"
    # relative to the whole sequence: the first token of a document has a gradient of g that is exactly zero
    return max(float((a - b).norm() / c.norm()) for a, b, c in zip(mine, wanted, whole, strict=True))


def main() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    cuts = [0, 17, 60] if size == 2 else [0, 20, 21, 60]
    found = {
        "one document": worst("channels", (0, T), cuts),
        "documents": worst("channels", (0, 9, 40, T), cuts),
        "one gate": worst("scalar", (0, T), cuts),
        "border between": worst("scalar", (0, cuts[1], T), cuts),
    }
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"{max(found.values()):.3e} {found}\n")
    sys.exit(0 if max(found.values()) < 1e-5 else 1)


if __name__ == "__main__":
    main()
