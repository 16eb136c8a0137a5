"""After the first step: adapters moved where they should, the base did not, replicas agree, the gradient is right."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.runtime.checks.compare import NORM_TOLERANCE, equal_numbers
from shardwright.runtime.lora.separate import expert_of
from shardwright.runtime.mesh import Ranks
from shardwright.runtime.ownership import Owned, by_expert, by_place
from shardwright.schemas.run import CheckResult

PIECE = 1 << 22
"""Elements hashed at once."""


def digest(values: Tensor) -> tuple[int, int]:
    """Two 64-bit sums over a tensor's bits: plain, and weighted by place. On any device, without a copy to the host."""
    flat = values.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return 0, 0
    flat = flat.to(torch.int8) if flat.dtype is torch.bool else flat
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    plain = weighted = 0
    for start in range(0, bits.numel(), PIECE):
        piece = bits[start : start + PIECE].long()
        weights = torch.arange(start + 1, start + 1 + piece.numel(), device=piece.device)
        plain += int(piece.sum())
        weighted += int((piece * weights).sum())
    return plain % 2**64, weighted % 2**64


def digests(parameters: dict[str, Owned], *, adapters: bool) -> dict[str, tuple[int, int]]:
    """Name → digest of this rank's part, of adapters or of the frozen base."""
    return {name: digest(owned.local()) for name, owned in parameters.items() if owned.adapter == adapters}


def buffer_digests(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Name → digest of each buffer: router biases and rotary tables must stay as they were loaded."""
    return {name: digest(buffer) for name, buffer in model.named_buffers()}


def base_digests(
    model: nn.Module, parameters: dict[str, Owned], moves: dict[str, Tensor]
) -> dict[str, tuple[int, int]]:
    """Digests of what must not change on this rank: all but adapters and the buffers in ``moves``."""
    buffers = {name: found for name, found in buffer_digests(model).items() if name not in moves}
    return {**digests(parameters, adapters=False), **buffers}


def base_unchanged(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> CheckResult:
    """Frozen weights and buffers are bit-identical."""
    changed = [name for name in before if before[name] != after.get(name)]
    return CheckResult(
        stage="step",
        name="base-unchanged",
        passed=not changed,
        evidence=f"{len(before)} frozen parameters and buffers hashed before and after; changed: "
        + (", ".join(changed[:5]) or "none"),
        scope="local",
    )


def _copies_agree(owned: Owned, ranks: Ranks) -> bool:
    """Whether a rank's places hold the bits of each expert's first copy; every rank of a replica takes part."""
    if not (owned.adapter and owned.copied):
        return True
    return torch.equal(by_place(owned, by_expert(owned, owned.local(), ranks), ranks), owned.local())


def replicas_agree(parameters: dict[str, Owned], ranks: Ranks) -> CheckResult:
    """Ranks that hold the same adapter values hold the same bits."""
    mine = digests(parameters, adapters=True)
    seen = [mine]
    if ranks.sizes.replicate > 1:
        seen = [{} for _ in range(ranks.sizes.replicate)]
        dist.all_gather_object(seen, mine, group=ranks.replicate_group)
    wrong = sorted({name for other in seen for name in mine if other.get(name) != mine[name]})
    wrong += [f"copies of experts in {name}" for name, owned in parameters.items() if not _copies_agree(owned, ranks)]
    copies = f"{ranks.sizes.replicate} copies" if ranks.sizes.replicate > 1 else "one copy: values are sharded"
    return CheckResult(
        stage="step",
        name="replicas-agree",
        passed=not wrong,
        evidence=f"{len(mine)} adapter parameters, {copies}; different: " + (", ".join(wrong[:5]) or "none"),
        scope="local",
    )


def biases_agree(biases: dict[str, Tensor], ranks: Ranks) -> tuple[CheckResult, ...]:
    """Routers' biases that move have the same finite bits on every rank; nothing where all are frozen."""
    if not biases:
        return ()
    mine = {name: digest(value) for name, value in biases.items()}
    seen = [mine]
    if ranks.world > 1:
        seen = [{} for _ in range(ranks.world)]
        dist.all_gather_object(seen, mine)
    wrong = sorted({name for other in seen for name in mine if other.get(name) != mine[name]})
    wrong += [f"{name} is not finite" for name, value in biases.items() if not bool(torch.isfinite(value).all())]
    result = CheckResult(
        stage="step",
        name="router-biases-agree",
        passed=not wrong,
        evidence=f"{len(mine)} biases on {len(seen)} ranks; different: " + (", ".join(wrong[:5]) or "none"),
        scope="local",
    )
    return (result,)


def _has_rows(name: str, loads: dict[str, Tensor]) -> bool:
    """Whether tokens met an adapter of a linear: every one did, but that of an expert's own module perhaps not."""
    place = expert_of(name)
    return place is None or place[0] not in loads or bool(loads[place[0]][place[1]] > 0)


def adapters_moved(before: dict[str, Tensor], parameters: dict[str, Owned], loads: dict[str, Tensor]) -> CheckResult:
    """After one step every B has moved, and an expert's B moved exactly if the expert got tokens.

    (A cannot move in the first step: its gradient is a multiple of B, which is zero.)

    Args:
        before: B values of this rank before the step.
        parameters: all parameters now.
        loads: layer → rows of each expert in the step, over all ranks.
    """
    wrong, matrices = [], 0
    for name, old in before.items():
        owned = parameters[name]
        moved = owned.local() != old
        if not owned.expert:
            matrices += 1
            if moved.numel() and bool(moved.any()) != _has_rows(name, loads):
                wrong.append(f"{name} {'moved without a token' if bool(moved.any()) else 'did not move'}")
            continue
        layer = name.rpartition(".")[0]
        busy = loads[layer][list(owned.numbers)] > 0
        per_expert = moved.flatten(1).any(1).cpu() if moved.numel() else busy
        matrices += int(busy.numel())
        for place in torch.nonzero(per_expert != busy).flatten().tolist():
            verb = "did not move though it got tokens" if busy[place] else "moved without a token"
            wrong.append(f"{name}, expert {owned.numbers[place]} {verb}")
    return CheckResult(
        stage="step",
        name="adapters-moved",
        passed=not wrong,
        evidence=f"{matrices} B matrices on this rank; wrong: " + ("; ".join(wrong[:5]) or "none"),
        scope="local",
    )


def gradients_present(parameters: dict[str, Owned], loads: dict[str, Tensor]) -> CheckResult:
    """Before the first step: every B has a gradient, an expert's exactly if it got tokens; idle ones have zeros.

    Args:
        parameters: all parameters, with the summed gradient of the first batch.
        loads: layer → rows of each expert in the step, over all ranks.
    """
    wrong, matrices = [], 0
    for name, owned in parameters.items():
        gradient = owned.local_grad() if owned.adapter and name.endswith("lora_b") else None
        if gradient is None or not gradient.numel():
            continue
        if not owned.expert:
            matrices += 1
            if bool(gradient.any()) != _has_rows(name, loads):
                wrong.append(f"{name} {'got a gradient without a token' if bool(gradient.any()) else 'has only zeros'}")
            continue
        busy = loads[name.rpartition(".")[0]][list(owned.numbers)] > 0
        matrices += int(busy.numel())
        reached = gradient.flatten(1).any(1).cpu()
        for place in torch.nonzero(reached != busy).flatten().tolist():
            what = "got tokens and no gradient" if busy[place] else "got a gradient without a token"
            wrong.append(f"{name}, expert {owned.numbers[place]} {what}")
    return CheckResult(
        stage="step",
        name="gradients-present",
        passed=not wrong,
        evidence=f"gradients of {matrices} B matrices on this rank; wrong: " + ("; ".join(wrong[:5]) or "none"),
        scope="local",
    )


def same_norm(ours: float, plain: float, base: str) -> CheckResult:
    """Global gradient norm against the single-process value on the same batch."""
    return equal_numbers(
        "step",
        "gradient-norm",
        ours,
        plain,
        NORM_TOLERANCE[base],
        "gradient norm of the first batch, sharded against plain LoRA in one process",
    )
