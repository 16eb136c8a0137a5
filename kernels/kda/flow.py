"""What passes between the launches of a backward, with the arguments that both forms of the keys kernel take alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.operands import Inputs, Prepared, Settings


@dataclass
class Flow:
    """What passes from the chain of chunks to the gradients inside them; ``found.u`` are the new values."""

    found: Prepared
    o: Tensor
    do: Tensor
    dnew: Tensor
    dv: Tensor
    """What rounding took from dnew; the gradient of v once ``values`` has run."""
    states: Tensor
    dstates: Tensor


@dataclass
class Targets:
    """Tensors that the gradients inside chunks fill; dq and dk per value head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dspeed: Tensor
    dbias: Tensor


def key_operands(
    inputs: Inputs,
    docs: Documents,
    settings: Settings,
    flow: Flow,
    into: Targets,
    between: tuple[Tensor, ...],
    piece: slice,
) -> tuple[Any, ...]:
    """Arguments of a keys kernel for the chunks in ``piece``, in its order.

    Args:
        between: dp, da and the products along the rows, from the values kernel; where every channel has a gate also
            the parts of dbeta, of which the keys kernel adds its own.
    """
    learns = inputs.A_log is not None
    return (
        inputs.q,
        inputs.k,
        inputs.g,
        inputs.beta,
        into.dspeed if inputs.A_log is None else inputs.A_log,
        into.dbias if inputs.dt_bias is None else inputs.dt_bias,
        flow.found.total[piece],
        docs.table[piece],
        flow.do,
        flow.found.norms[piece],
        flow.found.u[piece],
        flow.dnew[piece],
        flow.states[piece],
        flow.dstates[piece],
        *between,
        into.dq,
        into.dk,
        into.dg,
        into.dspeed[piece] if learns else into.dspeed,
        into.dbias[piece] if learns else into.dbias,
        settings.lower_bound,
        inputs.K**-0.5,
        inputs.HV,
        inputs.HV // inputs.H,
    )
