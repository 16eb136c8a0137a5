"""What a step computes: layers, recomputation, head and loss, the optimizer; and launches that computing leaves open.

Legend: m micro-batches per step, T tokens of one on a rank, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardwright.search_spaces.cost.host import waits
from shardwright.search_spaces.cost.memory_weights import adapter_shard
from shardwright.search_spaces.cost.plans import Array, per_value
from shardwright.search_spaces.cost.residuals import last_mix_moves

if TYPE_CHECKING:
    from shardwright.schemas.ops import PassCost
    from shardwright.search_spaces.cost.layer_time import LayerTime
    from shardwright.search_spaces.cost.step import Step

FORMULAS = {
    "dense_linears": "m·L·4·T·N_dense flops (forward and input gradient), or weights and activations moved",
    "attention": "m·L·2·S·T·n·d flops causal, backward 3× (CPU 2.5×); latent, linear and sparse by their own",
    "norms": "bytes of two norms per layer by the chosen provider",
    "residual_and_rotary": "bytes of residual adds, rotary and the dense gate",
    "residual_mixes": "bytes of a layer's two mixes of residual rows or streams, and of its sums",
    "adapters": "2·r·(in + out) per token or row, backward 2×; larger of flops and bytes",
    "experts": "12·R·H·I flops plus weights and rows moved, R of the fullest rank",
    "expert_rows": "sort, gather, activation, weighting, combine: 24 + 12 passes over R·H when eager",
    "dequantise": "one layer's packed weights unpacked in each pass: b·N written",
}

CURVES = {"experts": "grouped_gemm_flops", "dense_linears": "gemm_flops", "attention": "attention_flops"}

OPTIMIZER_LAUNCHES = 40
"""Kernels of one foreach update and of clipping beside ``NORM_LAUNCHES``; assumed."""

NORM_LAUNCHES = 2
"""Kernels of the gradients' norm for one LoRA target, one for each of its two tensors: 96 in a trace of 48 targets."""

SAVED_LAUNCHES = 19
"""What saving a layer's tensors through checkpointing's hooks costs the host in one of the layer's two forwards, in
kernels: in a trace of eight layers 461 tensors take 15 ms of 93, while 1,047 kernels without checkpointing take 53."""

PCIE_BYTES_PER_S = 25e9
"""Host to device copies per rank; assumed."""

HOST_BYTES_PER_S = 20e9
"""One rank's share of host memory bandwidth in an update made there; assumed."""


def layers_compute(step: Step, layers: list[LayerTime]) -> None:
    """Every kind of layer, forward, backward and again where it is recomputed.

    Nothing flows back through layers before the model's first adapter; the layer that holds it, where it stands behind
    the attention, has the backward of its experts only.
    """
    recompute = np.zeros(len(step.plans))
    sums: dict[str, Array] = {}
    for position, (layer, one) in enumerate(zip(step.work.layers, layers, strict=True)):
        host, cut = waits(step, one, layer.routed), one.behind_attention
        first_pass = one.launches[0] + SAVED_LAUNCHES
        whole, bare = (
            waits(step, replace(one, launches=(first_pass + more, one.launches[1])), layer.routed).forward
            for more in (one.saved_launches, 0.0)
        )
        cut_host = waits(step, cut, layer.routed)
        first = 1 / layer.count if layer.headless else 0.0
        live = 1 - layer.silent / layer.count
        for count, again in step.counts(position, layer):
            for name, (forward, backward) in one.terms.items():
                back = live - (first if name not in cut.terms else 0.0)
                sums[name] = sums.get(name, 0.0) + count * (forward + back * backward)
            recompute = recompute + (count * live * one.recomputed if again else 0.0)
            backward = (live - first) * host.backward + first * cut_host.backward
            forward = 2 * (live - first) * whole + (1 - live + 2 * first) * bare if again else host.forward
            step.launching_s = step.launching_s + count * (forward + backward)
    for name, seconds in sums.items():
        step.add(name, seconds, "compute", FORMULAS[name], step.rates.origin(CURVES.get(name, "copy_bytes_per_s")))
    formula = "the forward of recomputed layers again, up to the last tensor that a backward reads"
    step.add("recompute", recompute, "compute", formula)


def head_and_loss(step: Step) -> None:
    """The output projection with the loss; where residuals are mixed, the mix before them."""
    work = step.work

    def counted(tokens: int) -> tuple[float, ...]:
        cost = step.fused.cost(
            "linear_cross_entropy", {"T": tokens, "H": work.hidden, "V": work.vocabulary}, work.dtype
        )
        found: list[float] = []
        for one in (cost.forward, cost.backward):
            if one is None:
                found += [0.0] * 4
                continue
            products = head_product_bytes(one, cost.forward.workspace_bytes, work.base_bytes, **cost.shape)
            beside = max(0.0, one.bytes_read + one.bytes_written - products)
            found += [one.flops, products, beside, one.launches]
        return tuple(found)

    numbers = per_value(step.tokens, counted)
    mix = last_mix_moves(work, step.fused)
    seconds = np.zeros(len(step.plans))
    for at, (flops, products, beside, launches) in enumerate((numbers[:4], numbers[4:])):
        spent = step.rates.gemm_s(flops, products, step.tokens) + step.rates.traffic_s(beside)
        spent = spent + step.rates.chain_s(mix.chains[at] * step.tokens)
        spent = spent + step.rates.traffic_s(mix.operator[at] * step.tokens)
        launches = launches + mix.kernels[at]
        step.launching_s = step.launching_s + step.m * step.wait_s(spent, launches)
        seconds = seconds + spent
    formula = "4·T·H·V flops, and the logits' passes through memory beside the products' own"
    step.add("head_and_loss", step.m * seconds, "compute", formula)


def head_product_bytes(one: PassCost, chunk_bytes: int, b: int, T: int, H: int, V: int, **_: int) -> float:
    """Of a pass of head and loss, what its products move themselves, while they compute.

    x and logits once for each product, the head once for each of its chunks.

    Args:
        chunk_bytes: logits that are there at once; 0 for all.
        b: bytes per value.
    """
    products, rows = one.flops // (2 * T * H * V), chunk_bytes // (V * b) or T
    return float(products * b * (T * (H + V) + -(-T // rows) * V * H))


def optimizer(step: Step) -> None:
    """Clipping and the update of local adapters, on the device or the host."""
    local = adapter_shard(step.work, step.plans, step.stage)
    passes = 10 * step.work.adapter_bytes * local
    away = step.plans.offloads("adapter_optimizer")
    hosted = passes / HOST_BYTES_PER_S + 3 * step.work.adapter_bytes * local / PCIE_BYTES_PER_S
    seconds = np.where(away, hosted, step.rates.traffic_s(passes))
    targets = sum(layer.adapters.targets * layer.count for layer in step.work.layers)
    step.launching_s = step.launching_s + step.wait_s(seconds, OPTIMIZER_LAUNCHES + NORM_LAUNCHES * targets)
    step.add("optimizer", seconds, "optimizer", "10 passes over local adapters: clip, moments, update")
