"""What providers cost for the operators that fusions replace, by shape: the table, the experts and the loss.

Each provider is described as the kernels it launches: bytes read and written, flops, launches. No
device and no milliseconds here. Weights are frozen: backward means the gradient of the input only.

Legend: T tokens, H hidden, I expert width, R routed rows, E experts, V vocabulary, b bytes per value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardwright.schemas.errors import KernelError
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.provider_chain import BYTES, Chain
from shardwright.search_spaces.provider_connections import hyper_connection
from shardwright.search_spaces.provider_delta import delta_rule, delta_rule_layer, short_conv
from shardwright.search_spaces.provider_dsa import dsa
from shardwright.search_spaces.provider_experts import experts_embedding, experts_loop
from shardwright.search_spaces.provider_gated import OURS, mla_gated
from shardwright.search_spaces.provider_libraries import LIBRARY_KERNELS
from shardwright.search_spaces.provider_mixing import (
    activation,
    attention_residual,
    mla,
    residual_rows,
    situ,
    swiglu,
)
from shardwright.search_spaces.provider_norms import add_rms_norm, gated_rms_norm, latent_norm, qk_norm_rope, rms_norm
from shardwright.search_spaces.provider_products import (
    gate_up_merge,
    latent_moe,
    lora_linear,
    qkv_merge,
    shared_expert,
)
from shardwright.search_spaces.provider_rope import rope
from shardwright.search_spaces.provider_router import router

ROW_PASSES = {"eager": (24, 12), "compile": (8, 8)}
"""Reads and writes of an R × H tensor around the grouped products of a MoE layer, (forward, backward):
sort, gather, activation, weighting, index_add. Eager: measured on one H200 with torch 2.11 at four
shapes (E 128–896, H 2048–7168): 23.3–25.5 forward, 10–12 backward. Compile: assumed."""

EXPERT_LAUNCHES = {"eager": (35, 50), "compile": (18, 26)}
"""Kernels of one MoE layer, (forward, backward). Eager forward counted on one H200; the rest assumed."""


def experts(provider: str, dtype: str, R: int, H: int, I: int, E: int) -> OpCost:
    """Two grouped products over ``R`` routed rows, with what stands around them.

    Bytes: weights of the touched experts once, rows in and out of both products, and the row passes.
    """
    b, flops = BYTES[dtype], 6 * R * H * I
    weights = min(E, R) * 3 * H * I * b
    rows = R * b * (2 * H + 3 * I)
    passes = tuple(count * R * H * b for count in ROW_PASSES[provider])
    launches = EXPERT_LAUNCHES[provider]

    def one(index: int) -> PassCost:
        return PassCost(
            flops=flops,
            bytes_read=weights + rows // 2 + passes[index] // 2,
            bytes_written=rows - rows // 2 + passes[index] - passes[index] // 2,
            launches=launches[index],
            workspace_bytes=R * H * b,
            floor_flops=flops,
            floor_bytes=weights + 2 * R * H * b,
        )

    return OpCost(
        op="experts",
        provider=provider,
        dtype=dtype,
        shape={"R": R, "H": H, "I": I, "E": E},
        forward=one(0),
        backward=one(1),
        saved_bytes=R * b * (3 * I + H),
    )


def linear_cross_entropy(provider: str, dtype: str, T: int, H: int, V: int) -> OpCost:
    """Head and loss: logits ``[T, V]``, log-softmax in fp32, gradient of the input.

    Rows of a vocabulary are longer than what a multiprocessor holds: eager log-softmax reads them for their maximum,
    their sum and the result, its backward the gradient twice and the result once.
    """
    b, n, flops = BYTES[dtype], T * V, 2 * T * H * V
    product_read, product_written = T * H * b + V * H * b, n * b
    cast_in, cast_out = ([(n * b, n * 4)], [(n * 4, n * b)]) if b != 4 else ([], [])
    if provider == "eager":
        forward = [(product_read, product_written), *cast_in, (3 * n * 4, n * 4), (T * 8, T * 4)]
        backward = [(T * 4, n * 4), (3 * n * 4, n * 4), *cast_out, (n * b + V * H * b, T * H * b)]
    else:
        forward = [(product_read, product_written), (2 * n * b, T * 8)]
        backward = [(n * b + T * 8, n * b), (n * b + V * H * b, T * H * b)]
    floor = T * H * b + V * H * b
    workspace = int(loss_bytes(provider, dtype, T, H, V))
    return OpCost(
        op="linear_cross_entropy",
        provider=provider,
        dtype=dtype,
        shape={"T": T, "H": H, "V": V},
        forward=Chain(tuple(forward), flops).as_pass(floor, flops),
        backward=Chain(tuple(backward), flops).as_pass(floor + T * H * b, flops, workspace),
        saved_bytes=n * b,
    )


LOSS_CHUNK_TOKENS = 1024
"""Rows of logits that a fused head and loss keeps at once."""


def loss_bytes(provider: str, dtype: str, T: Any, H: int, V: int) -> Any:
    """Peak memory of head and loss beyond the hidden states.

    Eager: 12·T·V (measured on one H200: 15.00 GiB at T 8192, V 163,840). Fused: one chunk of fp32
    logits and the input gradient.
    """
    if provider == "eager":
        return 12 * T * V
    if provider == "compile":
        return (4 + 2 * BYTES[dtype]) * T * V
    return 4 * np.minimum(T, LOSS_CHUNK_TOKENS) * V + 2 * T * H


PROVIDER_COSTS: dict[str, Callable[..., OpCost]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "swiglu": swiglu,
    "experts": experts,
    "experts_loop": experts_loop,
    "experts_embedding": experts_embedding,
    "linear_cross_entropy": linear_cross_entropy,
    "router": router,
    "gated_rms_norm": gated_rms_norm,
    "latent_norm": latent_norm,
    "qk_norm_rope": qk_norm_rope,
    "rope": rope,
    "dsa": dsa,
    "dsa_pooled": dsa,
    "mla_gated": mla_gated,
    "delta_rule": delta_rule,
    "delta_rule_layer": delta_rule_layer,
    "short_conv": short_conv,
    "mla": mla,
    "qkv_merge": qkv_merge,
    "gate_up_merge": gate_up_merge,
    "shared_expert": shared_expert,
    "latent_moe": latent_moe,
    "attention_residual": attention_residual,
    "residual_rows": residual_rows,
    "hyper_connection": hyper_connection,
    "situ": situ,
    "activation": activation,
    "lora_linear": lora_linear,
}
"""Operator → its cost function."""

PROVIDERS = ("eager", "compile")
"""Providers that run every operator."""

REWRITTEN: dict[str, tuple[str, ...]] = {
    "qkv_merge": ("merged",),
    "gate_up_merge": ("merged",),
    "mla": ("absorbed",),
    "mla_gated": (OURS,),
}
"""Operator → other ways to write it with torch's own products, or with an operator of ours that has no cost for it."""


def provider_cost(op: str, provider: str, shape: dict[str, int], dtype: str) -> OpCost:
    """The counted work of one operator run by eager torch, torch.compile, another way to write it, or a library.

    Args:
        shape: the operator's named sizes, for example ``{"T": 4096, "H": 2048}``.

    Raises:
        KernelError: ``unknown-operator``, ``unknown-provider`` or ``unknown-dtype``.
    """
    libraries = {kernel.library.provider: kernel.cost for kernel in LIBRARY_KERNELS.get(op, ())}
    own = (*PROVIDERS, *REWRITTEN.get(op, ())) if op in PROVIDER_COSTS else ()
    for kind, value, known in (
        ("operator", op, tuple(dict.fromkeys((*PROVIDER_COSTS, *LIBRARY_KERNELS)))),
        ("provider", provider, (*own, *libraries)),
        ("dtype", dtype, tuple(BYTES)),
    ):
        if value not in known:
            raise KernelError(
                f"unknown-{kind}",
                f"no cost is known for {kind} {value!r}",
                where=f"{op} by {provider}",
                next_action=f"use one of {', '.join(known)}",
            )
    if provider in libraries:
        return libraries[provider](dtype, **shape)
    return PROVIDER_COSTS[op](provider, dtype, **shape)
