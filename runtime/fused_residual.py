"""A module that mixes residual rows, as one operator that reads each row where it lies.

Legend: B batch, T tokens, R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from shardwright.kernels.registry import OPERATORS
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision


def fused_residual(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Tensor]:
    """The forward of a mix: R rows ``[B, T, H]``, the running sum last, and a projection ``[1, H]`` → ``[B, T, H]``.

    The decision names the role ``norm``, the module's own weight, and the constants ``eps`` and ``form``.

    Raises:
        LegalityError: ``fusion-residual`` where the plan does not say what the operator needs.
    """
    role, form = decision.roles.get("norm"), decision.constants.get("form")
    if role is None or not isinstance(getattr(module, role, None), Tensor) or form != "scored":
        raise LegalityError(
            "fusion-residual",
            f"the plan names the norm {role!r} and the form {form!r}",
            where=name,
            next_action="reject this attention_residual proposal",
        )
    op = OPERATORS["attention_residual"].load_op()
    weight, eps = role, float(decision.constants["eps"])

    def forward(rows: Sequence[Tensor], projection: Tensor) -> Tensor:
        mixed: Tensor = op(tuple(row.contiguous() for row in rows), getattr(module, weight), projection, eps)
        return mixed

    return forward
