"""After the first step: adapters moved where they should, the base did not, replicas agree, the gradient is right."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.runtime.checks.compare import NORM_TOLERANCE, equal_numbers
from shardwright.runtime.lora.separate import expert_of
from shardwright.runtime.mesh import Ranks
from shardwright.runtime.ownership import Owned, by_expert, by_place
from shardwright.schemas.canonical import sha256_of
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


def digest_of_base(found: dict[str, tuple[int, int]]) -> str:
    """One hash of :func:`base_digests`."""
    return sha256_of({name: list(pair) for name, pair in found.items()}, floats=False)


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


def _rows(name: str, loads: dict[str, Tensor]) -> int | None:
    """Rows that met an adapter of a linear, where it is one of an expert's own module; ``None``: every token did."""
    place = expert_of(name)
    return None if place is None or place[0] not in loads else int(loads[place[0]][place[1]])


def _missed(reached: bool, rows: int | None, unlabelled: int) -> bool:
    """Whether an adapter should have been reached and was not.

    Tokens without a label may reach no loss, and a token goes to an expert once: an expert with no more rows than the
    step has such tokens need not have a gradient.
    """
    return not reached and (rows is None or rows > unlabelled)


def adapters_moved(
    before: dict[str, Tensor], parameters: dict[str, Owned], loads: dict[str, Tensor], unlabelled: int = 0
) -> CheckResult:
    """After one step every B has moved: an expert's where it got tokens that the loss sees, and only where it got any.

    (A cannot move in the first step: its gradient is a multiple of B, which is zero.)

    Args:
        before: B values of this rank before the step.
        parameters: all parameters now.
        loads: layer → rows of each expert in the step, over all ranks.
        unlabelled: tokens of the step that predict nothing, over all ranks.
    """
    moved = {name: parameters[name].local() != old for name, old in before.items()}
    words = "did not move", "did not move though it got tokens", "moved without a token"
    wrong, matrices = _compared(moved, parameters, loads, unlabelled, words)
    return CheckResult(
        stage="step",
        name="adapters-moved",
        passed=not wrong,
        evidence=f"{matrices} B matrices on this rank; wrong: " + ("; ".join(wrong[:5]) or "none"),
        scope="local",
    )


def gradients_present(parameters: dict[str, Owned], loads: dict[str, Tensor], unlabelled: int = 0) -> CheckResult:
    """Before the first step: every B has a gradient, an expert's where its tokens are seen by the loss; idle ones none.

    Args:
        parameters: all parameters, with the summed gradient of the first batch.
        loads: layer → rows of each expert in the step, over all ranks.
        unlabelled: tokens of the step that predict nothing, over all ranks.
    """
    held = {name: owned.local_grad() for name, owned in parameters.items() if owned.adapter and name.endswith("lora_b")}
    gradients = {name: gradient for name, gradient in held.items() if gradient is not None and gradient.numel()}
    words = "has only zeros", "got tokens and no gradient", "got a gradient without a token"
    wrong, matrices = _compared(gradients, parameters, loads, unlabelled, words)
    return CheckResult(
        stage="step",
        name="gradients-present",
        passed=not wrong,
        evidence=f"gradients of {matrices} B matrices on this rank; wrong: " + ("; ".join(wrong[:5]) or "none"),
        scope="local",
    )


def _compared(
    reached: dict[str, Tensor],
    parameters: dict[str, Owned],
    loads: dict[str, Tensor],
    unlabelled: int,
    words: tuple[str, str, str],
) -> tuple[list[str], int]:
    """What is wrong, and how many matrices were looked at.

    Args:
        reached: name of a B → local tensor, not zero where the step reached it.
        words: for a linear that was missed, an expert that was missed, and either that was reached without a token.
    """
    none, missed, uncalled = words
    wrong, matrices = [], 0
    for name, values in reached.items():
        owned = parameters[name]
        if not owned.expert:
            rows, here = _rows(name, loads), bool(values.any())
            matrices += 1
            if values.numel() and (_missed(here, rows, unlabelled) or (here and rows == 0)):
                wrong.append(f"{name} {uncalled if here else none}")
            continue
        matrices += len(owned.numbers)
        if not values.numel():
            continue
        by_expert = values.flatten(1).any(1).tolist()
        for number, here in zip(owned.numbers, by_expert, strict=True):
            rows = int(loads[name.rpartition(".")[0]][number])
            if _missed(here, rows, unlabelled) or (here and rows == 0):
                wrong.append(f"{name}, expert {number} {uncalled if here else missed}")
    return wrong, matrices


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
