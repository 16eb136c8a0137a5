"""What KDA demands of its inputs, and what a fusion that uses it must prove. No torch.

Legend: B batch, T tokens, H key heads, HV value heads, K key width, V value width, N documents.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.guards import TensorLike, dtype_name, refuse
from shardwright.kernels.rms_norm.contract import OBLIGATIONS as NORM_OBLIGATIONS

NAME = "kda"
DTYPES = ("bfloat16", "float32")
"""fp16 is refused: factors inside a chunk span 2 ** 58 to both sides."""
WIDTHS = (64, 128, 256)
GATES = ("bounded", "softplus", "given")
LOWEST = -5.0
"""Lowest bound of a bounded gate: a block of 16 tokens then spans 2 ** 115, which fp32 and bf16 hold."""
MAX_TOKENS = 1 << 30

ROLES = {
    "q": "activation [B, T, H, K]",
    "k": "activation [B, T, H, K]",
    "v": "activation [B, T, HV, V]",
    "g": "activation [B, T, HV, K]",
    "beta": "activation [B, T, HV]",
    "A_log": "parameter [HV]",
    "dt_bias": "parameter [HV, K]",
    "o": "activation [B, T, HV, V]",
}
OBLIGATIONS = NORM_OBLIGATIONS
"""As RMSNorm. Normalised q and k, activated gates and the state inside are read by nothing else."""


def check_static(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    g: TensorLike,
    beta: TensorLike,
    A_log: TensorLike | None,
    dt_bias: TensorLike | None,
    initial_state: TensorLike | None,
    *,
    gate: str,
    lower_bound: float,
    count: int,
    channels: bool = True,
) -> None:
    """What can be refused from shapes, dtypes and settings alone (fake tensors too).

    Args:
        count: number of documents.
        channels: whether each key channel has a gate; else g is ``[B, T, HV]`` and dt_bias ``[HV]``.

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``head-ratio``, ``width-unsupported``,
            ``unknown-gate``, ``bad-bound``, ``no-tokens`` or ``too-many-tokens``.
    """
    guards.one_dtype(NAME, {"q": q, "k": k, "v": v}, DTYPES)
    small = {"g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state}
    for role, tensor in small.items():
        if tensor is not None and dtype_name(tensor) not in DTYPES:
            what = f"{role} is {dtype_name(tensor)}"
            raise refuse(NAME, "dtype-unsupported", what, f"use one of {', '.join(DTYPES)}")
    gate_dims = 4 if channels else 3
    if len(q.shape) != 4 or len(v.shape) != 4 or len(g.shape) != gate_dims or len(beta.shape) != 3:
        found = ", ".join(f"{role} is {list(t.shape)}" for role, t in (("q", q), ("v", v), ("g", g), ("beta", beta)))
        of_gate = "[B, T, HV, K]" if channels else "[B, T, HV]"
        next_action = f"pass q, k [B, T, H, K], v [B, T, HV, V], g {of_gate} and beta [B, T, HV]"
        raise refuse(NAME, "wrong-shape", found, next_action)
    guards.same_shape(NAME, {"q": q, "k": k})
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    expected: dict[str, tuple[TensorLike | None, tuple[int, ...]]] = {
        "v": (v, (B, T, HV, V)),
        "g": (g, (B, T, HV, K) if channels else (B, T, HV)),
        "beta": (beta, (B, T, HV)),
        "A_log": (A_log, (HV,)),
        "dt_bias": (dt_bias, (HV, K) if channels else (HV,)),
        "initial_state": (initial_state, (count, HV, K, V)),
    }
    if H < 1 or HV < 1 or HV % H:
        raise refuse(NAME, "head-ratio", f"{HV} value heads for {H} key heads", "use a multiple of the key heads")
    for role, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        found_shape = tuple(tensor.shape)
        if len(found_shape) != len(shape) or any(a != b for a, b in zip(found_shape, shape, strict=True)):
            what = f"{role} is {list(found_shape)}, expected {list(shape)}"
            raise refuse(NAME, "wrong-shape", what, "see the roles of this operator")
    if K not in WIDTHS or V not in WIDTHS:
        raise refuse(NAME, "width-unsupported", f"K is {K}, V is {V}", f"use widths out of {WIDTHS}")
    if T < 1 or B < 1:
        raise refuse(NAME, "no-tokens", f"B is {B}, T is {T}", "skip the layer for an empty batch")
    if B * T > MAX_TOKENS:
        raise refuse(NAME, "too-many-tokens", f"{B * T} tokens, at most {MAX_TOKENS}", "split the batch")
    check_gate(A_log, dt_bias, gate, lower_bound)


def check_gate(A_log: TensorLike | None, dt_bias: TensorLike | None, gate: str, lower_bound: float) -> None:
    """The gate's name, bound and parameters fit together.

    Raises:
        KernelError: ``unknown-gate``, ``bad-bound`` or ``gate-incomplete``.
    """
    if gate not in GATES:
        raise refuse(NAME, "unknown-gate", f"gate is {gate!r}", f"use one of {', '.join(GATES)}")
    if gate == "bounded" and not LOWEST <= lower_bound < 0:
        what = f"lower_bound is {lower_bound!r}"
        raise refuse(NAME, "bad-bound", what, f"use {LOWEST} <= lower_bound < 0")
    if gate != "given" and (A_log is None or dt_bias is None):
        raise refuse(NAME, "gate-incomplete", f"gate {gate!r} without A_log or dt_bias", "pass both")
    if gate == "given" and (A_log is not None or dt_bias is not None):
        what = "A_log or dt_bias beside a log-decay that is given"
        raise refuse(NAME, "gate-incomplete", what, "pass neither, or pass the raw gate")
