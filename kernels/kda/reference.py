"""KDA in plain torch: the recurrence token by token, and the same in chunks. Both run in fp64.

For each document and value head, with a state ``S [K, V]`` that starts at ``initial_state`` or zero::

    g_t    = log-decay of the gate, in every key channel          (see ``log_decay``)
    S      = diag(exp(g_t)) S
    S      = S + beta_t k_t (v_t - k_tᵀ S)ᵀ
    o_t    = Sᵀ q_t

where q and k are divided by ``sqrt(Σ² + 1e-6)`` per head and q is scaled by ``K ** -0.5``.

Legend: B batch, T tokens, H key heads, HV value heads (a multiple of H), K key width, V value width, N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import softplus

NORM_EPS = 1e-6
CHUNK = 64


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, *, gate: str, lower_bound: float) -> Tensor:
    """Natural-log decay ``[B, T, HV, K]``, at most 0.

    Args:
        g: raw gate ``[B, T, HV, K]``; the log-decay itself where ``gate`` is ``given``.
        A_log: ``[HV]``.
        dt_bias: ``[HV, K]``.
        gate: ``bounded`` is ``lower_bound · σ(exp(A_log) (g + dt_bias))``, ``softplus`` is
            ``-exp(A_log) softplus(g + dt_bias)``.
    """
    if gate == "given":
        return g
    assert A_log is not None and dt_bias is not None
    speed = A_log.to(g.dtype).exp()[:, None]
    biased = g + dt_bias.to(g.dtype)
    if gate == "bounded":
        return lower_bound * torch.sigmoid(speed * biased)
    return -speed * softplus(biased)


def unit(x: Tensor) -> Tensor:
    """Each row divided by its root of squares; a zero row stays zero."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: str,
    lower_bound: float,
    beta_sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log-decay and beta in at least fp32, head by head alike: ``[B, T, HV, ...]``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (tensor.to(wide) for tensor in (q, k, v, g, beta))
    groups = v.shape[2] // q.shape[2]
    q = unit(q).repeat_interleave(groups, dim=2) * q.shape[-1] ** -0.5
    k = unit(k).repeat_interleave(groups, dim=2)
    decay = log_decay(g, A_log, dt_bias, gate=gate, lower_bound=lower_bound)
    return q, k, v, decay, beta.sigmoid() if beta_sigmoid else beta


def _spans(T: int, B: int, cu_seqlens: Sequence[int] | None) -> list[tuple[int, int, int]]:
    """``(batch, start, end)`` of every document."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    return [(0, start, end) for start, end in pairwise(cu_seqlens)]


def _start(initial_state: Tensor | None, at: int, like: Tensor, K: int) -> Tensor:
    if initial_state is not None:
        return initial_state[at].to(like.dtype)
    return like.new_zeros((like.shape[2], K, like.shape[3]))


def kda_recurrent_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    beta_sigmoid: bool = True,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, one token after another.

    Args:
        q, k: ``[B, T, H, K]``, before normalisation.
        v: ``[B, T, HV, V]``.
        g: raw gate ``[B, T, HV, K]`` (see ``log_decay``).
        beta: ``[B, T, HV]``, before the sigmoid unless ``beta_sigmoid`` is false.
        A_log, dt_bias: ``[HV]`` and ``[HV, K]``; not used where ``gate`` is ``given``.
        initial_state: ``[N, HV, K, V]``; zero where ``None``.
        cu_seqlens: N + 1 document bounds inside a batch of 1; each batch row is a document where ``None``.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype and the final states ``[N, HV, K, V]`` in at least fp32.
    """
    qn, kn, vn, decay, b = _operands(q, k, v, g, beta, A_log, dt_bias, gate, lower_bound, beta_sigmoid)
    rows: dict[int, list[Tensor]] = {at: [] for at in range(q.shape[0])}
    finals = []
    for at, (batch, start, end) in enumerate(_spans(q.shape[1], q.shape[0], cu_seqlens)):
        state = _start(initial_state, at, vn, q.shape[-1])
        for t in range(start, end):
            state = state * decay[batch, t].exp()[..., None]
            missing = vn[batch, t] - torch.einsum("hk,hkv->hv", kn[batch, t], state)
            state = state + torch.einsum("hk,hv->hkv", b[batch, t, :, None] * kn[batch, t], missing)
            rows[batch].append(torch.einsum("hk,hkv->hv", qn[batch, t], state))
        finals.append(state)
    o = torch.stack([torch.stack(found) for found in rows.values()])
    return o.to(v.dtype), torch.stack(finals)


def kda_chunk_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    beta_sigmoid: bool = True,
    cu_seqlens: Sequence[int] | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The same in chunks of ``chunk`` tokens: dense products inside a chunk, the state from chunk to chunk.

    Normalised q and k, and factors and results of matrix products, are rounded to v's dtype, as eager 16-bit code
    rounds them; decays, the triangular solve and the state are kept in at least fp32. In fp64 nothing is rounded.

    Arguments and results as ``kda_recurrent_reference``.
    """
    qn, kn, vn, decay, b = _operands(q, k, v, g, beta, A_log, dt_bias, gate, lower_bound, beta_sigmoid)
    narrow = v.dtype
    qn, kn = (tensor.to(narrow).to(vn.dtype) for tensor in (qn, kn))

    def product(left: Tensor, right: Tensor) -> Tensor:
        return (left.to(narrow).to(vn.dtype) @ right.to(narrow).to(vn.dtype)).to(narrow).to(vn.dtype)

    pieces: dict[int, list[Tensor]] = {at: [] for at in range(q.shape[0])}
    finals = []
    for at, (batch, start, end) in enumerate(_spans(q.shape[1], q.shape[0], cu_seqlens)):
        state = _start(initial_state, at, vn, q.shape[-1])
        for low in range(start, end, chunk):
            span = slice(low, min(low + chunk, end))
            qc, kc, vc, dc = (tensor[batch, span].transpose(0, 1) for tensor in (qn, kn, vn, decay))
            bc = b[batch, span].transpose(0, 1)[..., None]
            total = dc.cumsum(1)
            C = total.shape[1]
            lower = torch.ones((C, C), dtype=torch.bool, device=q.device).tril()
            spans = (total[:, :, None] - total[:, None]).masked_fill(~lower[None, :, :, None], float("-inf")).exp()
            between = torch.einsum("hid,hjd,hijd->hij", kc, kc, spans)
            reads = torch.einsum("hid,hjd,hijd->hij", qc, kc, spans)
            system = torch.eye(C, dtype=vn.dtype, device=q.device) + (bc * between).tril(-1)
            inverse = torch.linalg.solve_triangular(
                system, torch.eye(C, dtype=vn.dtype, device=q.device).expand_as(system), upper=False, unitriangular=True
            )
            w, u = product(inverse, bc * kc * total.exp()), product(inverse, bc * vc)
            new = u - product(w, state)
            pieces[batch].append((product(qc * total.exp(), state) + product(reads, new)).transpose(0, 1))
            last = total[:, -1:]
            state = state * last.exp().transpose(1, 2) + product((kc * (last - total).exp()).transpose(1, 2), new)
        finals.append(state)
    o = torch.stack([torch.cat(found) for found in pieces.values()])
    return o.to(v.dtype), torch.stack(finals)
