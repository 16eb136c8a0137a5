# mypy: disable-error-code="no-untyped-def"
"""The activations of ``activation.py`` for Gluon kernels, which take no plain Triton functions. Same meaning."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@gluon.jit
def activate(g, u, KIND: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr):
    """The activation of fp32 ``g`` and ``u``; parameters as in ``activation.activate``. Gated kinds only."""
    if KIND == "swiglu":
        h = g * _sigmoid(g) * u
    elif KIND == "clamped_swiglu":
        low = gl.minimum(g, P0)
        h = low * _sigmoid(P1 * low) * (gl.minimum(gl.maximum(u, -P0), P0) + P2)
    else:
        gl.static_assert(KIND == "situ")
        h = P0 * _tanh(g / P0) * _sigmoid(g) * (P1 * _tanh(u / P1))
    return h
