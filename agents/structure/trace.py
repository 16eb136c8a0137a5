"""Tracing one call on meta tensors: ``torch.export`` first, ``make_fx`` with fake tensors where that fails.

Both give a flat graph with the same leaves; parameters and buffers are named as in the called module. A graph in which
a size depends on data is no graph here: nothing could be proved of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from shardwright.agents.structure.flatten import flatten

TRACE_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
    NotImplementedError,
    torch._dynamo.exc.TorchDynamoException,
)
"""What tracing raises for code that cannot be traced."""

Leaves = dict[str, tuple[Literal["parameter", "buffer"], str]]


@dataclass(frozen=True)
class Traced:
    """A flat graph; placeholders that are no leaf are the call's tensors, in order."""

    graph: fx.Graph
    leaves: Leaves
    inputs: tuple[str, ...]
    method: Literal["export", "make_fx"]


def trace_call(call: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Traced:
    """Trace ``call(*tensors)``.

    Raises:
        Exception: one of :data:`TRACE_ERRORS`, that of the export, when neither way succeeds.
    """
    try:
        return _exported(call, tensors)
    except TRACE_ERRORS as first:
        try:
            return _made(call, tensors)
        except TRACE_ERRORS:
            raise first from None


def of_program(program: torch.export.ExportedProgram) -> Traced:
    """A program's flat graph and leaves."""
    signature = program.graph_signature
    leaves: Leaves = {}
    for placeholder, name in signature.inputs_to_parameters.items():
        leaves[placeholder] = ("parameter", name)
    for placeholder, name in {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}.items():
        leaves[placeholder] = ("buffer", name)
    inputs = tuple(name for name in signature.user_inputs if isinstance(name, str))
    graph = flatten(program.graph_module)
    require_plain_sizes(graph)
    return Traced(graph, leaves, inputs, "export")


def require_plain_sizes(graph: fx.Graph) -> None:
    """Refuse a graph with sizes that depend on data.

    Raises:
        RuntimeError: naming the first such node.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        for one in value if isinstance(value, (list, tuple)) else (value,):
            symbolic = isinstance(one, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
                isinstance(one, torch.Tensor) and any(not isinstance(size, int) for size in one.shape)
            )
            if symbolic:
                raise RuntimeError(f"a size depends on data: {node.name} ({node.target})")


def _exported(call: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Traced:
    return of_program(torch.export.export(call, tensors, strict=False))


def _made(call: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Traced:
    """The same by ``make_fx``: parameters and buffers are passed in, so that they are leaves."""
    parameters = dict(call.named_parameters())
    buffers = dict(call.named_buffers())
    state = {**parameters, **buffers}
    names = tuple(state)

    def flat(values: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
        return torch.func.functional_call(call, dict(zip(names, values, strict=True)), tuple(given))

    with fx_traceback.preserve_node_meta(), _module_stack(call):
        module = make_fx(flat, tracing_mode="fake", pre_dispatch=True, record_stack_traces=True)(
            list(state.values()), list(tensors)
        )
    graph = module.graph
    graph.eliminate_dead_code()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    leaves: Leaves = {}
    for node, name in zip(placeholders, names, strict=False):
        leaves[node.name] = ("parameter" if name in parameters else "buffer", name)
    inputs = tuple(node.name for node in placeholders[len(names) :])
    flattened = flatten(module)
    require_plain_sizes(flattened)
    return Traced(flattened, leaves, inputs, "make_fx")


@contextmanager
def _module_stack(call: nn.Module) -> Iterator[None]:
    """While open, each traced node gets the path and class of the module that runs."""
    stack: list[tuple[str, str]] = []
    handles = []

    def enter(path: str, kind: str) -> Any:
        def hook(*_: Any) -> None:
            stack.append((path, kind))
            _publish(stack)

        return hook

    def leave(*_: Any) -> None:
        stack.pop()
        _publish(stack)

    try:
        for path, module in call.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path, type(module).__qualname__)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        fx_traceback.current_meta.pop("nn_module_stack", None)


def _publish(stack: list[tuple[str, str]]) -> None:
    fx_traceback.current_meta["nn_module_stack"] = {path or "root": (path, kind) for path, kind in stack}
