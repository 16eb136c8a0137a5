"""One flat FX graph: the blocks that torch.export nests (gradient mode, autocast) are inlined.

Later stages then see every operation, its users and its order in one list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

GRAD_MODE = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"


def flatten(module: fx.GraphModule) -> fx.Graph:
    """A copy of the module's graph in which harmless nested blocks are inlined.

    Blocks under an *enabled* autocast change dtypes silently, so they stay as they are: nothing matches inside.
    """
    graph = fx.Graph()
    mapped: dict[fx.Node, Any] = {}
    _copy(module.graph, module, graph, mapped, top=True)
    return graph


def _copy(source: fx.Graph, owner: Any, graph: fx.Graph, mapped: dict[fx.Node, Any], *, top: bool) -> Any:
    """Copy nodes in order; returns what the source graph's output node returns, in the new graph's terms."""
    result: Any = None
    for node in source.nodes:
        if node.op == "output":
            result = fx.node.map_arg(node.args[0], lambda n: mapped[n])
            if top:
                graph.output(result)
            continue
        if node.op == "placeholder" and not top:
            continue  # stands for an operand of the block, which ``mapped`` holds
        nested = _nested(node, owner)
        if nested is not None:
            submodule, operands = nested
            inner = dict(
                zip(
                    [n for n in submodule.graph.nodes if n.op == "placeholder"], _look_up(operands, mapped), strict=True
                )
            )
            mapped[node] = _copy(submodule.graph, submodule, graph, inner, top=False)
        elif node.op == "get_attr" and isinstance(_attribute(owner, str(node.target)), fx.GraphModule):
            mapped[node] = None
        elif _picks_from_inlined(node, mapped):
            mapped[node] = mapped[node.args[0]][node.args[1]]
        else:
            mapped[node] = graph.node_copy(node, lambda n: mapped[n])
    return result


def _look_up(operands: tuple[Any, ...], mapped: dict[fx.Node, Any]) -> list[Any]:
    return [mapped[o] if isinstance(o, fx.Node) else o for o in operands]


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def _nested(node: fx.Node, owner: Any) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """The body and operands of a block that may be inlined."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    name = node.target.name()
    if name == GRAD_MODE:
        body, operands = node.args[1], node.args[2:]
    elif name == AUTOCAST and not node.args[2]:
        body, operands = node.args[4], node.args[5:]
    else:
        return None
    assert isinstance(body, fx.Node)
    return _attribute(owner, str(body.target)), operands


def _picks_from_inlined(node: fx.Node, mapped: dict[fx.Node, Any]) -> bool:
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(node.args[0], fx.Node)
        and isinstance(mapped[node.args[0]], (tuple, list))
    )
