"""What KDA is timed beside: flash-linear-attention's chunked kernels, where that package is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from torch import Tensor

from shardwright.kernels.cases import Function


def flash_linear_attention(
    gate: str, bounds: Callable[[Tensor, Tensor], tuple[Tensor, Sequence[int]] | None], safe: bool
) -> Function:
    """``chunk_kda`` with everything inside the kernel that ours has inside."""
    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor
    ) -> tuple[Tensor, ...]:
        packed = bounds(q, state)
        found = chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            A_log=A_log,
            dt_bias=dt_bias.flatten(),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=safe,
            lower_bound=-5.0 if gate == "bounded" else None,
            cu_seqlens=None if packed is None else packed[0],
        )
        return (found[0], found[1])

    return run


def rivals(
    gate: str, bounds: Callable[[Tensor, Tensor], tuple[Tensor, Sequence[int]] | None]
) -> Mapping[str, Callable[[], Function]]:
    """Its paths that compute the same function; none where the package is missing."""
    if not find_spec("fla"):
        return {}
    return {"fla": lambda: flash_linear_attention(gate, bounds, gate == "bounded")}
