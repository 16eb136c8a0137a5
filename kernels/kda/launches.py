"""Launches of KDA's kernels, and the tensors that pass between them.

Legend: B batch, T tokens, C tokens of a chunk, NT chunks, N documents, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.kda import configs
from shardwright.kernels.kda.configs import CHUNK, SMALL
from shardwright.kernels.kda.contract import GATES
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.gradients_triton import kda_keys_kernel, kda_reverse_kernel, kda_values_kernel
from shardwright.kernels.kda.triton import kda_gate_kernel, kda_prepare_kernel, kda_scan_kernel

GATE_CODES = {"given": 0, "bounded": 1, "softplus": 2}
assert set(GATE_CODES) == set(GATES)


@dataclass(frozen=True)
class Settings:
    """What is not a tensor."""

    gate: str
    lower_bound: float
    beta_sigmoid: bool


@dataclass(frozen=True)
class Inputs:
    """Checked inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None

    @property
    def H(self) -> int:
        return int(self.q.shape[2])

    @property
    def K(self) -> int:
        return int(self.q.shape[3])

    @property
    def HV(self) -> int:
        return int(self.v.shape[2])

    @property
    def V(self) -> int:
        return int(self.v.shape[3])

    @property
    def value_bytes(self) -> int:
        return self.q.element_size()


@dataclass
class Prepared:
    """Tiles of the gate and prepare kernels; ``inverse`` and ``norms`` only for a backward."""

    w: Tensor
    u: Tensor
    qe: Tensor
    ke: Tensor
    p: Tensor
    total: Tensor
    inverse: Tensor
    norms: Tensor


def precision(inputs: Inputs) -> dict[str, str]:
    """How products of fp32 factors are computed; 16-bit factors need no choice."""
    return {"PREC": "tf32x3" if inputs.value_bytes == 4 else "tf32"}


def blocks(settings: Settings) -> dict[str, Any]:
    """Constants of the kernels that walk over pairs. Only a bounded gate allows blocks on the diagonal."""
    return {"BLOCKED": settings.gate == "bounded", "SIGMOID": settings.beta_sigmoid, "C": CHUNK}


def levels(settings: Settings) -> int:
    """Halvings of a chunk: down to single tokens, or to ``SMALL`` and one more for the blocks of the diagonal."""
    halvings = CHUNK.bit_length() - 1
    return halvings - SMALL.bit_length() + 2 if settings.gate == "bounded" else halvings


def totals(inputs: Inputs, docs: Documents, settings: Settings) -> Tensor:
    """Running sums of log2-decays inside each chunk, fp32 ``[NT, HV, C, K]``."""
    HV, K, NT = inputs.HV, inputs.K, docs.chunks
    total = torch.empty((NT, HV, CHUNK, K), dtype=torch.float32, device=inputs.q.device)
    tile = configs.gate(K, inputs.value_bytes)
    with device.current(total):
        kda_gate_kernel[(K // tile.BK, HV, NT)](
            inputs.g,
            total if inputs.A_log is None else inputs.A_log,
            total if inputs.dt_bias is None else inputs.dt_bias,
            docs.table,
            total,
            settings.lower_bound,
            HV,
            K=K,
            BK=tile.BK,
            C=CHUNK,
            GATE=GATE_CODES[settings.gate],
            **tile.options(),
        )
    return total


def prepare(inputs: Inputs, docs: Documents, settings: Settings, backward: bool) -> Prepared:
    """Everything inside a chunk that does not need the state."""
    q, HV, K, V, C, NT = inputs.q, inputs.HV, inputs.K, inputs.V, CHUNK, docs.chunks
    w, qe, ke = (q.new_empty((NT, HV, C, K)) for _ in range(3))
    u, p = q.new_empty((NT, HV, C, V)), q.new_empty((NT, HV, C, C))
    total = totals(inputs, docs, settings)
    inverse = q.new_empty((NT, HV, C, C)) if backward else p
    norms = torch.empty((NT, HV, 2, C), dtype=torch.float32, device=q.device) if backward else total
    tile = configs.prepare(K, V, inputs.value_bytes)
    with device.current(q):
        kda_prepare_kernel[(HV, NT)](
            q,
            inputs.k,
            inputs.v,
            inputs.beta,
            total,
            docs.table,
            w,
            u,
            qe,
            ke,
            p,
            inverse,
            norms,
            K**-0.5,
            HV,
            HV // inputs.H,
            levels(settings),
            CHUNK.bit_length() - 1,
            K=K,
            V=V,
            BK=min(K, tile.BK),
            BV=min(V, tile.BV),
            BACKWARD=backward,
            SOLVE="tf32x3" if inputs.value_bytes == 4 else configs.SOLVE,
            **precision(inputs),
            **blocks(settings),
            **tile.options(),
        )
    return Prepared(w, u, qe, ke, p, total, inverse, norms)


def scan(
    inputs: Inputs,
    docs: Documents,
    found: Prepared,
    *,
    o: Tensor | None = None,
    final_state: Tensor | None = None,
    states: Tensor | None = None,
) -> None:
    """The state from chunk to chunk: fills what is given; with ``states`` u becomes the new values."""
    HV, K, V, N = inputs.HV, inputs.K, inputs.V, docs.count
    tile = configs.scan(K, V, inputs.value_bytes, HV * N, device.multiprocessors(inputs.q))
    with device.current(inputs.q):
        kda_scan_kernel[(V // tile.BV, HV, N)](
            found.w,
            found.u,
            found.qe,
            found.ke,
            found.p,
            found.total,
            docs.table,
            docs.first,
            found.total if inputs.initial_state is None else inputs.initial_state,
            found.total if final_state is None else final_state,
            found.w if o is None else o,
            found.w if states is None else states,
            HV,
            K=K,
            V=V,
            BV=tile.BV,
            C=CHUNK,
            WITH_INITIAL=inputs.initial_state is not None,
            WITH_FINAL=final_state is not None,
            OUTPUT=o is not None,
            STATES=states is not None,
            STAGES=tile.stages,
            **precision(inputs),
            **tile.options(),
        )


def reverse(
    inputs: Inputs,
    docs: Documents,
    found: Prepared,
    do: Tensor,
    dfinal: Tensor | None,
    dinitial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the state after each chunk ``[NT, HV, K, V]`` and of the new values ``[NT, HV, C, V]``."""
    HV, K, V, N, NT = inputs.HV, inputs.K, inputs.V, docs.count, docs.chunks
    dstates, dnew = do.new_empty((NT, HV, K, V)), do.new_empty((NT, HV, CHUNK, V))
    tile = configs.reverse(K, V, inputs.value_bytes, HV * N, device.multiprocessors(do))
    with device.current(do):
        kda_reverse_kernel[(V // tile.BV, HV, N)](
            do,
            found.w,
            found.qe,
            found.ke,
            found.p,
            found.total,
            docs.table,
            docs.first,
            found.total if dfinal is None else dfinal,
            found.total if dinitial is None else dinitial,
            dstates,
            dnew,
            HV,
            K=K,
            V=V,
            BV=tile.BV,
            C=CHUNK,
            WITH_FINAL=dfinal is not None,
            WITH_INITIAL=dinitial is not None,
            STAGES=tile.stages,
            **precision(inputs),
            **tile.options(),
        )
    return dstates, dnew


@dataclass
class Gradients:
    """What a backward returns; dq and dk are per key head, those of A_log and dt_bias in their dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None


def gradient(
    inputs: Inputs,
    docs: Documents,
    settings: Settings,
    o: Tensor,
    do: Tensor,
    total: Tensor,
    inverse: Tensor,
    norms: Tensor,
    new: Tensor,
    dnew: Tensor,
    states: Tensor,
    dstates: Tensor,
) -> Gradients:
    """Gradients of all inputs inside their chunks, then the sums over chunks and grouped heads."""
    q, H, HV, K, V, NT = inputs.q, inputs.H, inputs.HV, inputs.K, inputs.V, docs.chunks
    B, T = q.shape[:2]
    groups = HV // H
    kept = q.dtype if groups == 1 else torch.float32
    dv, dbeta = torch.empty_like(inputs.v), torch.empty_like(inputs.beta)
    dp, da = (torch.empty_like(inverse) for _ in range(2))
    along = torch.empty_like(norms)
    tile = configs.values(K, V, inputs.value_bytes)
    with device.current(q):
        kda_values_kernel[(HV, NT)](
            inputs.v,
            inputs.beta,
            docs.table,
            o,
            do,
            inverse,
            new,
            dnew,
            dv,
            dbeta,
            dp,
            da,
            along,
            HV,
            V=V,
            BV=min(V, tile.BV),
            C=CHUNK,
            SIGMOID=settings.beta_sigmoid,
            **precision(inputs),
            **tile.options(),
        )
    tile = configs.keys(K, V, inputs.value_bytes)
    BK = min(K, tile.BK)
    dq, dk = (torch.empty((B, T, HV, K), dtype=kept, device=q.device) for _ in range(2))
    dg = torch.empty_like(inputs.g)
    learns = inputs.A_log is not None
    dspeed = torch.empty((NT, HV, K // BK) if learns else 1, dtype=torch.float32, device=q.device)
    dbias = torch.empty((NT, HV, K) if learns else 1, dtype=torch.float32, device=q.device)
    with device.current(q):
        kda_keys_kernel[(K // BK, HV, NT)](
            q,
            inputs.k,
            inputs.g,
            inputs.beta,
            dspeed if inputs.A_log is None else inputs.A_log,
            dbias if inputs.dt_bias is None else inputs.dt_bias,
            total,
            docs.table,
            do,
            inverse,
            norms,
            new,
            dnew,
            states,
            dstates,
            dp,
            da,
            along,
            dq,
            dk,
            dg,
            dspeed,
            dbias,
            settings.lower_bound,
            K**-0.5,
            HV,
            groups,
            levels(settings),
            0,
            K=K,
            V=V,
            BK=BK,
            BV=min(V, tile.BV),
            GATE=GATE_CODES[settings.gate],
            **precision(inputs),
            **blocks(settings),
            **tile.options(),
        )
    if groups > 1:
        dq, dk = (tensor.view(B, T, H, groups, K).sum(3).to(q.dtype) for tensor in (dq, dk))
    dA_log = dspeed.sum((0, 2)).to(inputs.A_log.dtype) if inputs.A_log is not None else None
    ddt_bias = dbias.sum(0).to(inputs.dt_bias.dtype) if inputs.dt_bias is not None else None
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias)
