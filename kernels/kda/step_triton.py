# mypy: disable-error-code="no-untyped-def"
"""The delta rule token by token: what evaluation and generation run, a few tokens after a state.

Legend: B sequences, T tokens, H key heads, HV value heads, G = HV / H, K key width, V value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.kda.triton import GIVEN, NORM_EPS, log2_decay


@triton.jit
def kda_step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, a_log_ptr, bias_ptr, state_ptr, o_ptr, next_ptr, lower, scale, T, HV, G,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, CHANNELS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and block of value columns: ``o [B, T, HV, V]`` and the state after, in fp32."""
    vb = tl.program_id(0)
    hv = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    H = HV // G
    keys = tl.arange(0, K)
    cols = vb * BV + tl.arange(0, BV)
    corner = (batch * HV + hv) * K * V + keys[:, None] * V + cols[None, :]
    state = tl.load(state_ptr + corner).to(tl.float32)
    bias = 0.0
    speed = 1.0
    if GATE != GIVEN:
        speed = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
        if CHANNELS:
            bias = tl.load(bias_ptr + hv * K + keys).to(tl.float32)
        else:
            bias = tl.load(bias_ptr + hv).to(tl.float32)
    for t in range(T):
        token = batch * T + t
        at = (token * H + hv // G) * K + keys
        q = tl.load(q_ptr + at).to(tl.float32)
        k = tl.load(k_ptr + at).to(tl.float32)
        q = q * (scale / tl.sqrt(tl.sum(q * q) + NORM_EPS))
        k = k / tl.sqrt(tl.sum(k * k) + NORM_EPS)
        beta = tl.load(beta_ptr + token * HV + hv).to(tl.float32)
        if SIGMOID:
            beta = tl.sigmoid(beta)
        if CHANNELS:
            raw = tl.load(g_ptr + (token * HV + hv) * K + keys).to(tl.float32)
            state = state * tl.exp2(log2_decay(raw, bias, speed, lower, GATE))[:, None]
        else:
            raw = tl.load(g_ptr + token * HV + hv).to(tl.float32)
            state = state * tl.exp2(log2_decay(raw, bias, speed, lower, GATE))
        to = (token * HV + hv) * V + cols
        missing = tl.load(v_ptr + to).to(tl.float32) - tl.sum(k[:, None] * state, 0)
        state = state + (beta * k)[:, None] * missing[None, :]
        tl.store(o_ptr + to, tl.sum(q[:, None] * state, 0).to(o_ptr.dtype.element_ty))
    tl.store(next_ptr + corner, state)
