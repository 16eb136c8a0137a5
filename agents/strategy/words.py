"""Numbers and terms of the cost model in plain words."""

from __future__ import annotations

GIB = 2**30

TERMS = {
    "frozen_base": "the frozen base",
    "gather_buffers": "gathered layers",
    "kept_layers": "gathered layers that are kept",
    "node_shards": "layers kept over the ranks of a node",
    "unpacked_layer": "one layer's unpacked weights",
    "gathered_tokens": "tokens gathered for tensor parallelism",
    "host_overflow": "what host memory cannot hold",
    "gather_staging": "the all-gather buffer",
    "first_gather": "embedding and head, gathered beside the first layer",
    "gathered_root": "the gathered embedding and head",
    "activations": "activations",
    "recomputed_layer": "the recomputed layer",
    "loss": "logits and loss",
    "dispatch_buffers": "expert dispatch buffers",
    "adapter_parameters": "adapters",
    "adapter_gradients": "adapter gradients",
    "adapter_gradients_hidden": "reducing adapter gradients behind computation",
    "optimizer_state": "optimizer state",
    "runtime_reserve": "the process itself",
    "library_workspaces": "workspaces of the matrix library",
    "allocator_holes": "holes between tensors that the allocator holds",
    "experts": "the experts' products",
    "expert_rows": "sorting and combining routed rows",
    "dense_linears": "attention and other dense products",
    "attention": "attention scores",
    "norms": "norms",
    "residual_and_rotary": "residual adds and rotary embedding",
    "residual_mixes": "mixes of residual rows",
    "adapters": "adapter products",
    "head_and_loss": "head and loss",
    "recompute": "recomputation",
    "weight_gathers": "gathering weights",
    "weight_gathers_hidden": "gathering weights behind computation",
    "expert_all_to_all": "exchanging routed rows",
    "gather_copies": "copying gathered weights",
    "expert_all_to_all_hidden": "exchanging rows behind computation",
    "tensor_parallel": "tensor-parallel collectives",
    "context_ring": "keys and values around the ring",
    "context_gathers": "compressed keys and values, or states, of whole sequences",
    "context_buffers": "what the ranks of a sequence share",
    "host_copies": "copies from and to host memory",
    "pipeline_bubble": "waiting for the pipeline",
    "pipeline_sends": "messages between pipeline stages",
    "dequantise": "unpacking weights",
    "optimizer": "the optimizer",
    "launch": "launching operators",
}

MOMENTS = {
    "load": "while weights are loaded",
    "forward_peak": "in forward",
    "loss": "at the loss",
    "backward_peak": "in backward",
    "optimizer_step": "in the optimizer's step",
}


def moment(name: str) -> str:
    """When memory is fullest, in words."""
    return MOMENTS[name]


def term(name: str) -> str:
    """A component's name in words."""
    return TERMS.get(name, name.replace("_", " "))


def gib(size: float) -> str:
    """Bytes as GiB, or MiB below 0.1 GiB."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def milliseconds(value: float) -> str:
    """Milliseconds, or seconds from 1 s up."""
    return f"{value / 1e3:.2f} s" if value >= 1e3 else f"{value:.3g} ms"


def rate(value: float) -> str:
    """A rate without an exponent: whole from 100 up, with thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
