# mypy: disable-error-code="no-untyped-def"
"""Activations between the two products, as compile-time choices of the kernels, in fp32.

With g the gate and u the up half (for the kinds without a gate, g is the whole first product):

- ``swiglu``: silu(g) · u
- ``clamped_swiglu``: min(g, limit) · σ(alpha · min(g, limit)) · (clamp(u, ±limit) + offset)
- ``situ``: β₁ tanh(g/β₁) · σ(g) · β₂ tanh(u/β₂)
- ``relu2``: max(g, 0)²
- ``silu``: silu(g)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(g, u, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr):
    """The activation of fp32 ``g`` and ``u``. Parameters: limit, alpha, offset; or β₁, β₂."""
    if KIND == "swiglu":
        h = g * tl.sigmoid(g) * u
    elif KIND == "clamped_swiglu":
        low = tl.minimum(g, P0)
        h = low * tl.sigmoid(P1 * low) * (tl.minimum(tl.maximum(u, -P0), P0) + P2)
    elif KIND == "situ":
        h = P0 * _tanh(g / P0) * tl.sigmoid(g) * (P1 * _tanh(u / P1))
    elif KIND == "relu2":
        positive = tl.maximum(g, 0.0)
        h = positive * positive
    else:
        tl.static_assert(KIND == "silu")
        h = g * tl.sigmoid(g)
    return h


@triton.jit
def activate_bwd(dh, g, u, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr):
    """``dg`` and ``du`` for the gradient ``dh`` of ``activate``; ``du`` has no meaning without a gate."""
    if KIND == "swiglu":
        s = tl.sigmoid(g)
        dg = dh * u * s * (1.0 + g * (1.0 - s))
        du = dh * g * s
    elif KIND == "clamped_swiglu":
        low = tl.minimum(g, P0)
        s = tl.sigmoid(P1 * low)
        up = tl.minimum(tl.maximum(u, -P0), P0) + P2
        dg = tl.where(g <= P0, dh * up * (s + P1 * low * s * (1.0 - s)), 0.0)
        du = tl.where((u >= -P0) & (u <= P0), dh * low * s, 0.0)
    elif KIND == "situ":
        s, t, v = tl.sigmoid(g), _tanh(g / P0), _tanh(u / P1)
        dg = dh * P1 * v * (s * (1.0 - t * t) + P0 * t * s * (1.0 - s))
        du = dh * P0 * t * s * (1.0 - v * v)
    elif KIND == "relu2":
        dg = dh * 2.0 * tl.maximum(g, 0.0)
        du = dg
    else:
        s = tl.sigmoid(g)
        dg = dh * s * (1.0 + g * (1.0 - s))
        du = dg
    return dg, du
