"""Memory of weights: what a rank keeps of base and adapters, and what is gathered of other ranks'.

Legend: w bytes per frozen weight as stored, N parameters, U bytes of one layer gathered, P prefetch depth,
e = EP degree, z = shards of an EP rank's experts, t = TP degree, p pipeline stages, T tokens of a
micro-batch on a rank, R routed rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from shardwright.schemas.cluster import ClusterSpec
from shardwright.search_spaces.cost.communication import dense_group, shard_group
from shardwright.search_spaces.cost.formats import dequantised_bytes, expert_bytes, gathered_adapter_bytes
from shardwright.search_spaces.cost.gathers import gather_peaks, largest_unit, layer_order
from shardwright.search_spaces.cost.memory_terms import ALL, HOST_SHARE, KEPT, PASSES, STEP, Stage, Terms, rows_of
from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.sharding import padding_factors

WIDE_BYTES = 4
"""A side tensor that stays fp32 beside a bf16 base; FSDP leaves it whole on every rank."""


def gathered_layer_bytes(work: Workload, layer: LayerWork, plans: Plans) -> tuple[Array, Array]:
    """Bytes of one layer that are gathered: (non-expert over shard × ep × cp, experts over z).

    Base as stored, adapters in the compute dtype but beside packed experts. A group of one rank gathers nothing.
    """
    b, lora = work.base_bytes, layer.adapters
    dense = b * (layer.dense_parameters + lora.dense_parameters) / plans.tp
    share = plans.ep * plans.expert_tp
    adapters = gathered_adapter_bytes(work, plans) * lora.expert_parameters
    experts = (expert_bytes(work, plans) * layer.expert_parameters + adapters) / share
    return np.where(plans.dense_shards > 1, dense, 0.0), np.where(plans.expert_shards > 1, experts, 0.0)


def gathered_root_bytes(work: Workload, plans: Plans, root: Array | float | None = None) -> Array:
    """Embedding, head and final norm, which stay gathered from the first use to the end of backward."""
    parameters = work.root_parameters if root is None else root
    size = work.base_bytes * (parameters + work.root_adapters.dense_parameters) / plans.tp
    return np.where(plans.dense_shards > 1, size, 0.0)


def adapter_shard(work: Workload, plans: Plans, layers: Array | float = 1.0) -> Array:
    """Adapter parameters of one rank."""
    experts = work.adapter_expert_parameters * padding_factors(work.profile.shape, plans)
    spread = plans.ep * plans.expert_tp * plans.expert_shards
    return layers * (work.adapter_dense_parameters / (plans.tp * plans.dense_shards) + experts / spread)


def expert_base_bytes(work: Workload, plans: Plans, layers: Array | float = 1.0) -> Array:
    """Stored routed experts of one rank, with padding and redundant copies."""
    spread = plans.ep * plans.expert_tp * plans.expert_shards
    padded = work.expert_total * padding_factors(work.profile.shape, plans) / spread
    copies = plans.redundant * work.expert_total / max(work.profile.shape.num_experts, 1)
    return layers * expert_bytes(work, plans) * (padded + copies / (plans.expert_tp * plans.expert_shards))


LIBRARY_WORKSPACES = 2 * 32 * 2**20
"""What torch allocates for cuBLAS, by thread and stream: on one H200 as much stands, to the byte, before the first step
of a second point on a built model and not before that of the first."""


def add_static(terms: Terms, work: Workload, cluster: ClusterSpec, plans: Plans, stage: Stage) -> None:
    """Frozen base, adapters, their gradients and optimizer state."""
    a = work.adapter_bytes
    dense_layers = work.dense_total - work.root_parameters
    kept = work.profile.parameters.kept_float32 if work.base_bytes < WIDE_BYTES else 0
    narrow = dense_layers * stage.layers + stage.root_parameters(work) - kept * stage.layers
    dense = work.base_bytes * narrow
    experts = expert_base_bytes(work, plans, stage.layers)
    hosted = plans.offloads("frozen_experts")
    base = dense / (plans.tp * plans.dense_shards) + np.where(hosted, 0.0, experts) + WIDE_BYTES * kept * stage.layers
    formula = "w·(N_dense/(t·shard·e·cp) + N_experts·pad/(e·t_x·z)); no gradient, no optimizer state"
    formula += "; side tensors in fp32 whole" if kept else ""
    terms.add("frozen_base", base, ALL, formula, always=True)
    room = HOST_SHARE * cluster.host.memory_bytes / cluster.devices_per_node
    terms.add(
        "host_overflow",
        np.where(hosted, np.maximum(0.0, experts - room), 0.0),
        ALL,
        "offloaded experts beyond 80 % of the rank's share of host memory",
    )
    terms.add("buffers", 4.0 * work.profile.parameters.buffers, ALL, "4·values, a copy on every rank")
    local = adapter_shard(work, plans, stage.layers)
    terms.add("adapter_parameters", a * local, ALL, f"{a}·(A_dense/(t·shard·e·cp) + A_experts/(e·t_x·z))", always=True)
    formula = f"{a}·local adapter parameters"
    terms.add("adapter_gradients", a * local, ("optimizer_step",), formula, always=True)
    away = plans.offloads("adapter_optimizer")
    state = np.where(away, 0.0, 2 * a * local)
    terms.add("optimizer_state", state, STEP, f"Adam m and v in the adapter dtype: 2·{a}·local adapters")
    copies = np.where(away, 3.0, 1.0 if cluster.device.type == "cpu" else 0.0)
    formula = "copies of local adapters: one by a foreach update, none by a fused one, three with the state on the host"
    terms.add("optimizer_temporaries", a * local * copies, ("optimizer_step",), formula, always=True)
    products = float(LIBRARY_WORKSPACES) if cluster.device.type == "cuda" else 0.0
    terms.add(
        "library_workspaces", products, STEP, "cuBLAS's, one for forward's thread and one for backward's", "measured"
    )


def add_gathers(terms: Terms, work: Workload, cluster: ClusterSpec, plans: Plans, stage: Stage) -> Array:
    """What FSDP2 gathers, in its flat and whole forms, and what is unpacked.

    Returns:
        Bytes of ``gather_buffers`` that are free again while a layer's gradients are made.
    """
    hosted = plans.offloads("frozen_experts")
    dense_in, shard_in = dense_group(plans, cluster).inner, shard_group(plans, cluster).inner
    everything, inside = np.zeros(len(plans)), np.zeros(len(plans))
    units: list[Array] = []
    own: list[Array] = []
    lora, unpacked = np.zeros(len(plans)), np.zeros(len(plans))
    rows = rows_of(work, plans, plans.tokens(work.recipe.batch.sequence_tokens))
    for layer in work.layers:
        dense, experts = gathered_layer_bytes(work, layer, plans)
        fetched = expert_bytes(work, plans) * layer.expert_parameters / (plans.ep * plans.expert_tp)
        experts = np.where(hosted & (plans.expert_shards == 1), fetched, experts)
        units.append(dense + experts)
        own.append(np.where(hosted, dense + experts, dense))
        everything = everything + (dense + experts) * layer.count * stage.layers
        inside = inside + (dense / dense_in + experts / shard_in) * layer.count * stage.layers
        adapters = np.where(plans.dense_shards > 1, layer.adapters.dense_parameters / plans.tp, 0.0)
        share = layer.adapters.expert_parameters / (plans.ep * plans.expert_tp)
        lora = np.maximum(lora, adapters + np.where(plans.expert_shards > 1, share, 0.0))
        unpacked = np.maximum(unpacked, dequantised_bytes(work, layer, plans, rows))
    root = gathered_root_bytes(work, plans, stage.root_parameters(work))
    terms.add("gathered_root", root, KEPT, "w·(embedding + head + final norm)/t: gathered once per pass")
    peaks = gather_peaks(units, layer_order(work), plans, own)
    buffers = np.where(plans.reshard, peaks.backward, 0.0)
    terms.add("gather_buffers", buffers, PASSES, "U whole, and its flat form or the P units gathered behind it")
    whole = np.where(plans.reshard, 0.0, everything)
    terms.add("kept_layers", whole, KEPT, "sum of U over all layers: kept until their backward")
    node = np.where(plans.reshard & plans.node_scope, inside, 0.0)
    terms.add("node_shards", node, KEPT, "sum of U over all layers, spread over the ranks of a node")
    staging = np.where(plans.reshard, np.maximum(peaks.forward - buffers, 0.0), largest_unit(units, plans))
    formula = "flat all-gather results of forward: U and the one before it or the P ahead, beyond gather_buffers"
    terms.add("gather_staging", staging, ("forward_peak",), formula)
    formula = "b·N of one layer's packed weights, where rows are many enough for a decoded copy"
    terms.add("unpacked_layer", unpacked, PASSES, formula)
    width = work.base_bytes + (4 if work.recipe.precision.reduce == "float32" else 2)
    formula = "two layers in flight: whole gradient in compute dtype and reduce dtype"
    terms.add("adapter_reduction", 2 * width * lora, ("backward_peak",), formula)
    return np.where(plans.reshard, np.maximum(peaks.backward - peaks.working, 0.0), 0.0)


def add_first_gather(terms: Terms, work: Workload, plans: Plans, stage: Stage) -> None:
    """The first layer of forward, where the root stands flat beside its whole form, and nothing is kept yet.

    A moment of its own: only what it takes beyond the rest of forward is added.
    """
    units = [dense + experts for dense, experts in (gathered_layer_bytes(work, one, plans) for one in work.layers)]
    root = gathered_root_bytes(work, plans, stage.root_parameters(work))
    held = sum((t.bytes for t in terms.found if t.moments in (ALL, STEP)), start=np.zeros(len(plans)))
    here = held + 2 * root + gather_peaks(units, layer_order(work), plans).first
    beyond = np.maximum(here - terms.by_moment()[ALL.index("forward_peak")], 0.0)
    formula = "root and first layer, flat and whole, beyond the rest of forward"
    terms.add("first_gather", np.where(root > 0, beyond, 0.0), ("forward_peak",), formula)
