"""Chunked linear attention: a library's kernel or the family's own chain of torch operators, and what it keeps.

Legend: T tokens, C tokens of a chunk, n heads, d head dim, W = n·d, b bytes per value. All sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.workload import Workload

LINEAR_ATTENTION_PEAK = 60
"""Bytes per token and value of n·d that a library's chunked linear attention holds at its peak, forward and backward
together: measured on one H200, 1.884 GiB at T 8192 and 7.535 GiB at T 32768 (n 32, d 128)."""

DELTA_RULES = ("kda", "gated_delta")
"""Kernels of linear attention: with a decay for each channel, or for each head."""

CHUNK = 64
"""Tokens of a chunk of unfused linear attention."""

CHUNK_SQUARES = 3
"""fp32 tensors [T, C, n·d] that unfused chunked linear attention keeps: k·k before the decay, the decay, q·k."""

CHUNK_ROWS = 23.5
"""fp32 tensors [T, n·d] that it keeps besides: casts of q and k (2), scaled q, k, v (3), three exponentials of the gate
(3), β·k·e^g and its solution, v_new, q·e^g, k·e^g (5), states of the chunks (2), the scores of a chunk (½), the forget
gate (2), input and output of the convolution in bf16 (3), the gated norm (3)."""

CHUNK_GRADIENTS = 2
"""fp32 tensors [T, C, n·d] alive beside the kept ones in its backward: a sum of slices' gradients, and the next one in
zeros of the whole. Autograd adds in place; only under a dispatch mode, as traces run, the new sum is a third."""


@dataclass(frozen=True)
class UnfusedChunks:
    """One unfused linear attention: tokens of a chunk; fp32 tensors [T, n·d] kept, and alive besides in each pass."""

    tokens: int
    kept: float
    forward: float
    backward: float
    slice_passes: float
    """Reads and writes of fp32 [T, C, n·d] in backward for each chunk: its slice's gradient in zeros of the whole."""


LIBRARY_CHUNKS = UnfusedChunks(CHUNK, CHUNK_SQUARES * CHUNK + CHUNK_ROWS, 2 * CHUNK, CHUNK_GRADIENTS * CHUNK + 6, 4)
"""As transformers' classes write it; a slice's gradient is written whole and added: four passes."""

FAMILY_CHUNKS = {"kimi_k3": UnfusedChunks(16, 76.9, 22.3, 37.1, 0)}
"""Where a family's class has a chain of its own. Kimi K3 (``checkpoints/models/kimi_k3``, chunks of 16): traced over
512 and 1024 tokens, the same at both; its chunks are unbound once, so none fills the whole again."""


def chunks_of(work: Workload) -> UnfusedChunks:
    """The chain that the model's own class runs."""
    return FAMILY_CHUNKS.get(work.profile.model_type, LIBRARY_CHUNKS)


def unfused_chunks(work: Workload, fused: FusedProviders) -> bool:
    """Whether linear attention runs as the family's own chain of torch operators.

    Families without a class in transformers are planned, not run: they are priced with a chunked kernel.
    """
    eager = all(fused.provider(op) == "eager" for op in DELTA_RULES)
    return eager and work.profile.transformers_class


def linear_attention_bytes(work: Workload, fused: FusedProviders) -> float:
    """Kept by chunked linear attention with its convolution, gates and gated norm, per token.

    Unfused: ``4·W·(3·C + 23.5)``, and for the rows that solve each chunk's triangle ``4·n·(Σ i² + i)/C`` for i < C;
    or as traced, ``FAMILY_CHUNKS``.
    Fused: q, k, v, gate and out, ``b·5·W``, beta, ``b·n``, and the convolution's input and output, ``6·b·W``.
    """
    shape, b, W = work.profile.shape, work.base_bytes, work.linear_width
    heads = shape.linear_num_heads or shape.num_attention_heads
    if unfused_chunks(work, fused):
        if work.profile.model_type in FAMILY_CHUNKS:
            return 4.0 * W * chunks_of(work).kept
        solve = sum(i * i + i for i in range(1, CHUNK)) / CHUNK
        return 4.0 * W * LIBRARY_CHUNKS.kept + 4.0 * heads * solve
    return b * (11 * W + heads) + 4.0 * heads
