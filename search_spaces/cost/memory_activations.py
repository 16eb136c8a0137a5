"""Memory of a step's own values: activations, temporaries, rows between ranks, the loss.

Legend: w bytes per frozen weight as stored, N parameters, U bytes of one layer gathered, P prefetch depth,
e = EP degree, z = shards of an EP rank's experts, t = TP degree, p pipeline stages, T tokens of a
micro-batch on a rank, R routed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.ops import EvidenceOrigin
from shardwright.search_spaces.cost import activations, context, workspaces
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.memory_terms import HOST_SHARE, KEPT, PASSES, Stage, Terms, rows_of
from shardwright.search_spaces.cost.memory_weights import adapter_shard
from shardwright.search_spaces.cost.mixes import last_mix, mixes_of, snapshot_gradients
from shardwright.search_spaces.cost.plans import Array, Plans, per_value
from shardwright.search_spaces.cost.residuals import has_snapshots
from shardwright.search_spaces.cost.routing import MEMORY_QUANTILE
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.providers import PROVIDERS, loss_bytes


def kept_bytes(
    work: Workload, layer: LayerWork, plans: Plans, fused: FusedProviders, tokens: Array, *, summed: bool = False
) -> Array:
    """What one layer of this kind keeps without checkpointing; ``summed``: its share of what all layers keep."""
    rows = rows_of(work, plans, tokens, MEMORY_QUANTILE, summed=summed)
    copies = activations.adapter_copies_bytes(work, layer, plans)
    mixed = tokens * mixes_of(work, layer, fused, mean=summed).kept
    return np.asarray(activations.layer_bytes(work, layer, tokens, rows, fused, plans.expert_tp) + copies + mixed)


def saved_activation_bytes(work: Workload, plans: Plans, fused: FusedProviders) -> Array:
    """Kept by all layers of the model for one micro-batch: whole, or inputs where recomputed.

    Layers before the first adapter keep nothing, nor does the attention before it in its own layer.
    """
    tokens = plans.tokens(work.recipe.batch.sequence_tokens)
    total = np.zeros(len(plans))
    for layer, recomputed in zip(work.layers, plans.recomputed, strict=True):
        live = (layer.count - layer.silent) / layer.count
        whole = live * (layer.count - recomputed)
        total = total + whole * kept_bytes(work, layer, plans, fused, tokens, summed=True)
        total = total + live * recomputed * activations.checkpoint_bytes(work, layer, fused, tokens)
        if layer.headless:
            total = total - np.where(recomputed < layer.count, _unreached(work, layer, plans, fused, tokens), 0.0)
    return total


def _unreached(work: Workload, layer: LayerWork, plans: Plans, fused: FusedProviders, tokens: Array) -> Array:
    """What the layer of the model's first adapter does not keep where that stands behind attention.

    No gradient reaches attention, the norms, the router and the weighting of rows, nor shared experts without adapters.
    """
    per_token = activations.attention_bytes(work, layer, fused) + activations.residual_bytes(work, fused)
    per_token += activations.router_bytes(work, layer, fused)
    if not (layer.adapters.mlp_in or layer.adapters.mlp_out):
        per_token += activations.mlp_bytes(work, layer, fused)
    weighted = fused.provider("experts") == "eager" and layer.routed
    rows = rows_of(work, plans, tokens, MEMORY_QUANTILE) * work.base_bytes * work.row_width if weighted else 0.0
    return np.asarray(tokens * per_token + rows)


def add_activations(
    terms: Terms,
    work: Workload,
    cluster: ClusterSpec,
    plans: Plans,
    stage: Stage,
    fused: FusedProviders,
    free: Array | float = 0.0,
) -> None:
    """What is kept for backward, the recomputed layer, and temporaries of both passes.

    Args:
        free: bytes of gathered weights that are let go before the temporaries of backward are there.
    """
    tokens = plans.tokens(work.recipe.batch.sequence_tokens)
    rows = rows_of(work, plans, tokens, MEMORY_QUANTILE)
    saved = saved_activation_bytes(work, plans, fused) * stage.layers * stage.in_flight
    recomputed, largest = np.zeros(len(plans)), np.zeros(len(plans))
    for layer, again in zip(work.layers, plans.recomputed, strict=True):
        kept = kept_bytes(work, layer, plans, fused, tokens)
        inputs = activations.checkpoint_bytes(work, layer, fused, tokens)
        recomputed = np.maximum(recomputed, np.where(again > 0, kept - _kept_input(work, fused, tokens), 0.0))
        largest = np.maximum(largest, np.where(again < layer.count, kept, inputs))
    away = plans.offloads("activations")
    room = HOST_SHARE * cluster.host.memory_bytes / cluster.devices_per_node
    hosted = np.minimum(np.maximum(saved - 2 * largest, 0.0), room)
    root = 2 * tokens * work.base_bytes * work.hidden
    formula = "sum over layers of what adapters' backward needs, or b·H·T where a layer is recomputed"
    terms.add("activations", np.where(away, saved - hosted, saved) + root, KEPT, formula, always=True)
    _gradients_in_backward(terms, work, plans, stage, np.where(away, saved - hosted, saved))
    terms.add("recomputed_layer", recomputed, ("backward_peak",), "everything one layer keeps, once")

    def most(sizes: Iterable[Array | float]) -> Array:
        found = np.zeros(len(plans))
        for size in sizes:
            found = np.maximum(found, size)
        return found

    forward, together = np.zeros(len(plans)), np.zeros(len(plans))
    for layer, again in zip(work.layers, plans.recomputed, strict=True):
        kept = kept_bytes(work, layer, plans, fused, tokens)
        held = np.where((again == 0) & (layer.silent == 0), kept, 0.0)
        passing = workspaces.forward_workspace_bytes(work, layer, tokens, rows, fused, plans.expert_tp, held)
        forward, kept = np.maximum(forward, passing), kept - np.where(again > 0, _kept_input(work, fused, tokens), 0.0)
        own = workspaces.backward_workspace_bytes(work, layer, tokens, rows, fused, kept, plans.expert_tp, again > 0)
        repeated = workspaces.recomputing_workspace_bytes(work, layer, fused, tokens, kept)
        together = np.maximum(together, np.where(again > 0, kept + np.maximum(own, repeated), own))
    mix = last_mix(work, fused)
    together = np.maximum(together, tokens * (mix.first + mix.first_backward))
    terms.add(
        "last_mix",
        tokens * mix.first,
        ("loss",),
        "4·R·H a token, the rows of the last mix in fp32; 4·(2·R + 1) by a kernel",
    )
    formula = "b·H a token of each snapshot, gathered from all layers that read it"
    terms.add("snapshot_gradients", tokens * snapshot_gradients(work), ("backward_peak",), formula)
    backward = np.maximum(together - recomputed - free - root, 0.0)
    terms.add("forward_workspace", forward, ("forward_peak",), "T·b·(H + I_dense) + 2·R·b·H, or attention's own")
    formula = (
        "T·b·(2·H + 3·I_dense) + R·b·(2·I + 2·H), less where kernels overwrite, or attention's own; beyond flat "
        "weights and the last hidden states, which are free by then"
    )
    terms.add("backward_workspace", backward, ("backward_peak",), formula)
    gathered = np.where(plans.tp > 1, 2 * tokens * plans.tp * work.base_bytes * work.hidden, 0.0)
    terms.add("gathered_tokens", gathered, PASSES, "2·b·H·T·t: a block's input and output over the TP group")
    shared = most(context.held_bytes(work, layer, plans, fused, tokens) for layer in work.layers)
    terms.add("context_buffers", shared, PASSES, "keys and values of two neighbours, what is gathered, or states")


def _kept_input(work: Workload, fused: FusedProviders, tokens: Array) -> Array:
    """A layer's input where its first norm keeps just that: a recomputed layer has it in any case."""
    one_row = work.profile.shape.residual_streams == 1 and not has_snapshots(work)
    own = fused.norms(work.profile.shape.num_layers)["eager"] < 1 and one_row
    return np.asarray(tokens * work.base_bytes * work.hidden if own else np.zeros_like(tokens))


def _gradients_in_backward(terms: Terms, work: Workload, plans: Plans, stage: Stage, saved: Array) -> None:
    """Gradients grow while activations are freed: what counts is the fuller end, and one layer's at the first.

    From the second micro-batch of a step on all gradients are there from the start.
    """
    whole = work.adapter_bytes * adapter_shard(work, plans, stage.layers)
    one = whole / np.maximum(1.0, work.profile.shape.num_layers * stage.layers)
    first = np.maximum(whole - saved, 0.0) + np.minimum(one, whole)
    formula = "gradients beyond the activations that are free by then, and one layer's; all of them when accumulating"
    size = np.where((plans.accumulation > 1) | (plans.pp > 1), whole, np.minimum(first, whole))
    terms.add("gradients_in_backward", size, ("backward_peak",), formula)


def add_dispatch(terms: Terms, work: Workload, plans: Plans, fused: FusedProviders) -> None:
    """Rows on their way between EP ranks, where they exceed the experts' own temporaries: the two never meet.

    Experts start when what was sent is let go, and what travels leaves when their temporaries are gone.
    """
    routed = [(layer, again) for layer, again in zip(work.layers, plans.recomputed, strict=True) if layer.routed]
    if not routed:
        return
    tokens = plans.tokens(work.recipe.batch.sequence_tokens)
    received = rows_of(work, plans, tokens, MEMORY_QUANTILE, padded=False)
    rows = rows_of(work, plans, tokens, MEMORY_QUANTILE)
    sent = tokens * work.profile.shape.experts_per_token
    size = (sent + received + rows / plans.chunks) * work.row_width * work.base_bytes
    formula = (
        "b·H·(T·K sent + N received + R/c_k of one chunk grouped by expert, R with padding) beyond the experts' own"
    )
    forward = np.min([workspaces.routed_forward_bytes(work, one, rows, fused, plans.expert_tp) for one, _ in routed], 0)
    own = [
        workspaces.routed_backward_bytes(work, one, rows, fused, plans.expert_tp, again > 0) for one, again in routed
    ]
    backward = np.min(own, 0)
    apart = plans.ep > 1
    terms.add("dispatch_buffers", apart * np.maximum(0.0, size - forward), ("forward_peak",), formula)
    terms.add("gradient_buffers", apart * np.maximum(0.0, size - backward), ("backward_peak",), formula)


def add_loss(terms: Terms, work: Workload, plans: Plans, stage: Stage, fused: FusedProviders) -> None:
    """Logits and what the loss keeps of them."""
    provider = fused.provider("linear_cross_entropy")
    tokens = plans.tokens(work.recipe.batch.sequence_tokens)
    if provider in PROVIDERS:
        size = loss_bytes(provider, work.dtype, tokens, work.hidden, work.vocabulary) * stage.head
    else:

        def held(count: int) -> tuple[float]:
            shape = {"T": count, "H": work.hidden, "V": work.vocabulary}
            cost = fused.cost("linear_cross_entropy", shape, work.dtype)
            return (float(cost.forward.workspace_bytes + cost.saved_bytes),)

        size = per_value(tokens, held)[0] * stage.head
    formula = "12·T·V: logits, fp32 copy or log-softmax, gradient" if provider == "eager" else f"{provider}: in chunks"
    origin: EvidenceOrigin = "measured" if provider == "eager" else "modelled"
    terms.add("loss", size, ("loss",), formula, origin, always=True)
