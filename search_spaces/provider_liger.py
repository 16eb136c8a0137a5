"""What Liger's kernels cost, by the shapes that the operators take. Read in liger-kernel 0.8.5 (``liger_kernel/ops``).

Counted as its Triton kernels load and store; a row that a program reads twice from memory counts twice. Its backward
of norms, gates and rotation writes over its inputs, which moves the same bytes.

Legend: T tokens, H hidden, I width of a gate, V vocabulary, R rows of a mix, E experts, K experts a token,
b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.add_rms_norm.cost import cost as add_norm_cost
from shardwright.kernels.linear_cross_entropy.cost import cost as loss_cost
from shardwright.kernels.moe_layer.cost import cost as layer_cost
from shardwright.kernels.rms_norm.cost import cost as norm_cost
from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Step, by_kernels, described, moved
from shardwright.search_spaces.provider_mixing import activation, attention_residual, swiglu
from shardwright.search_spaces.provider_rope import rotation

NAME = "liger"
STATISTIC = 4
"""Bytes of an fp32 number that a norm keeps for a row."""


def rms_norm(dtype: str, T: int, H: int) -> OpCost:
    """One kernel each way; with a frozen weight no gradient of it is made."""
    ours, b = norm_cost(T, H, dtype), BYTES[dtype]
    n, w, kept = T * H * b, H * b, T * STATISTIC
    return described(ours, NAME, [(n + w, n + kept)], [(2 * n + w + kept, n)], kept)


def add_rms_norm(dtype: str, T: int, H: int) -> OpCost:
    """One kernel each way; the sum is written once and read again in backward."""
    ours, b = add_norm_cost(T, H, dtype), BYTES[dtype]
    n, w, kept = T * H * b, H * b, T * STATISTIC
    return described(ours, NAME, [(2 * n + w, 2 * n + kept)], [(3 * n + w + kept, n)], kept)


def gated(dtype: str, T: int, I: int) -> OpCost:
    """SwiGLU and GeGLU: one kernel each way, nothing kept but the inputs."""
    ours, n = swiglu("compile", dtype, T, I), T * I * BYTES[dtype]
    return described(ours, NAME, [(2 * n, n)], [(3 * n, 2 * n)], 0)


def relu_squared(dtype: str, T: int, I: int, A: int, S: int, wide: int = 0) -> OpCost:
    """One kernel each way."""
    return activation("compile", dtype, T, I, A, S, wide).model_copy(update={"provider": NAME})


def rope(dtype: str, T: int, Q: int, K: int, D: int, W: int, pairing: int = 0) -> OpCost:
    """q and k in place by one kernel each way, half of each table read; dimensions beyond W are not touched."""
    b = BYTES[dtype]
    n, tables = T * (Q + K) * W * b, T * W * b
    shape = {"T": T, "Q": Q, "K": K, "D": D, "W": W, "pairing": pairing}
    return rotation(NAME, dtype, shape, [(n + tables, n)], [(n + tables, n)])


def linear_cross_entropy(dtype: str, T: int, H: int, V: int) -> OpCost:
    """Chunks of rows whose logits are no more numbers than the input: both products and dx in the forward.

    For each chunk: logits, the loss with its gradient in place (logits read twice, written once), a copy of the
    losses, dx. Once: zeros for dx and losses, count of labels, sum. Backward scales dx only where the loss is scaled;
    it compares the scale.
    """
    ours, b = loss_cost(T, H, V, dtype), BYTES[dtype]
    assert ours.backward is not None
    share = -(-V // H)
    rows = min(1 << max(0, -(-T // share) - 1).bit_length(), T)
    chunks = -(-T // rows)
    head, x, n = V * H * b, T * H * b, T * V * b
    forward = ours.forward.model_copy(
        update={
            "bytes_read": 2 * chunks * head + x + 3 * n,
            "bytes_written": 2 * n + 2 * x,
            "launches": 4 * chunks + 6,
            "workspace_bytes": rows * V * b,
        }
    )
    backward = ours.backward.model_copy(update={"flops": 0, "bytes_read": 8, "bytes_written": 1, "launches": 2})
    update = {"provider": NAME, "forward": forward, "backward": backward, "saved_bytes": x}
    return ours.model_copy(update=update)


def moe_layer(dtype: str, T: int, K: int, E: int, H: int, I: int) -> OpCost:
    """Three kernels of routing tables and a sum, gather with the gated product, the second product, the weighted sum.

    Backward always makes the gradients of both stacks, which a frozen base has no use for: twice the forward's flops
    and both stacks written (zeros, then gradients).
    """
    ours, b = layer_cost(T, K, E, H, I, dtype), BYTES[dtype]
    assert ours.backward is not None
    R, used = T * K, min(E, T * K)
    first, second = used * 2 * I * H * b, used * I * H * b
    rows, inner, out = R * H * b, R * I * b, T * H * b
    lists, flops = 4 * R, 6 * R * H * I
    forward = [
        *moved([(lists, 4 * E), (4 * E, 4 * E), (4 * E, 8 * E), (lists, 3 * lists)]),
        Step(rows + first, 3 * inner, flops * 2 // 3),
        Step(inner + second, rows, flops // 3),
        Step(rows + 2 * lists, out),
    ]
    whole = E * I * H * b
    backward = [
        Step(0, lists),
        Step(rows + second + 2 * inner, 3 * inner, flops // 3),
        Step(0, whole),
        Step(inner + rows, whole, flops // 3),
        Step(2 * inner + first, rows, flops * 2 // 3),
        Step(0, out),
        Step(rows, out),
        Step(0, 2 * whole),
        Step(rows + 2 * inner, 2 * whole, flops * 2 // 3),
    ]
    return by_kernels(
        "moe_layer",
        NAME,
        dtype,
        {"T": T, "K": K, "E": E, "H": H, "I": I},
        (forward, backward),
        floor_bytes=(ours.forward.floor_bytes, ours.backward.floor_bytes),
        floor_flops=(ours.forward.floor_flops, ours.backward.floor_flops),
        saved=2 * inner,
    )


def attention_residuals(dtype: str, T: int, R: int, H: int) -> OpCost:
    """One kernel each way that reads all rows twice, and zeros for two learned vectors; rows come stacked."""
    known, b = attention_residual("compile", dtype, T, R, H), BYTES[dtype]
    n, small, y = T * R * H * b, 4 * T * R, T * H * b
    forward, backward = [(2 * n, y + 2 * small)], [(0, 4 * H), (0, 4 * H), (2 * n + y + 2 * small, n)]
    return described(known, NAME, forward, backward, 2 * small)
