"""What a written kernel may contain, read from its syntax before anything of it runs.

A candidate is Triton kernels and two functions that launch them. It may import torch and triton only, use of torch
only what makes empty memory and names formats, keep nothing between calls, and reach nothing by a built name.
"""

from __future__ import annotations

import ast

IMPORTS = {"torch": "torch", "triton": "triton", "triton.language": "tl"}
"""Module → the one name under which it may be imported."""

TORCH = frozenset(
    {
        *("empty", "empty_like", "Tensor", "float32", "float16", "bfloat16", "float64", "int64", "int32", "bool"),
        *("uint8",),
    }
)
TRITON = frozenset({"jit", "cdiv", "next_power_of_2", "language"})
BUILTINS = frozenset({"len", "max", "min", "tuple", "int", "float", "bool", "range", "zip", "enumerate", "sum"})
METHODS = frozenset(
    {
        *("shape", "dtype", "device", "numel", "stride", "size", "dim", "ndim", "contiguous", "reshape", "view"),
        *("element_size", "is_contiguous", "new_empty", "append", "to", "cdiv", "T"),
    }
)
"""Attributes of tensors that a launcher may read; none of them computes."""

FUNCTIONS = ("forward", "backward")
SOURCE_BYTES = 40_000
STATEMENTS = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.For, ast.If, ast.Pass, ast.Assert),
    *(ast.FunctionDef, ast.Import, ast.ImportFrom),
)
"""Everything else (class, try, with, while, del, global, nonlocal, lambda, async) has no use in a launcher."""


def screen(source: str) -> tuple[str, ...]:
    """Everything that is wrong with a candidate's text; empty where it may run in the sandbox."""
    if len(source.encode()) > SOURCE_BYTES:
        return (f"longer than {SOURCE_BYTES} bytes",)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return (f"no Python: {type(error).__name__}",)
    checker = _Checker()
    checker.visit_module(tree)
    return tuple(dict.fromkeys(checker.wrong))


class _Checker:
    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.names: set[str] = set()

    def say(self, node: ast.AST, words: str) -> None:
        self.wrong.append(f"line {getattr(node, 'lineno', 0)}: {words}")

    def visit_module(self, tree: ast.Module) -> None:
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.names = {node.name for node in functions}
        for wanted in FUNCTIONS:
            if wanted not in self.names:
                self.wrong.append(f"no function {wanted}")
        jitted = [node for node in functions if _is_jit(node)]
        if not jitted:
            self.wrong.append("no kernel: nothing is decorated with triton.jit")
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(node)
            elif isinstance(node, ast.FunctionDef):
                self._function(node)
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                self.say(node, "a module holds imports and functions only: nothing is kept between calls")

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom):
            self.say(node, f"from {node.module} import: only {', '.join(IMPORTS)} are imported, whole")
            return
        for alias in node.names:
            if IMPORTS.get(alias.name) != (alias.asname or alias.name):
                self.say(node, f"import {alias.name}: only torch, triton, and triton.language as tl")

    def _function(self, node: ast.FunctionDef) -> None:
        decorators = node.decorator_list
        if decorators and not _is_jit(node):
            self.say(node, "the only decorator is triton.jit")
        if node.args.defaults or node.args.kw_defaults or node.args.vararg or node.args.kwarg:
            self.say(node, "no default, *args or **kwargs: a default can be kept between calls")
        local = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        local |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        for inner in ast.walk(node):
            if inner is not node and not _is_annotation_of(node, inner):
                self._node(inner, local, kernel=bool(decorators))

    def _node(self, node: ast.AST, local: set[str], *, kernel: bool) -> None:
        if isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS):
            self.say(node, f"{type(node).__name__} has no place in a kernel file")
        elif isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom)):
            self.say(node, f"{type(node).__name__} inside a function")
        elif isinstance(node, (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.JoinedStr)):
            self.say(node, f"{type(node).__name__} has no place in a kernel file")
        elif isinstance(node, ast.Attribute):
            self._attribute(node, kernel=kernel)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id not in local | self.names | BUILTINS | {"torch", "triton", "tl", "True", "False", "None"}:
                self.say(node, f"the name {node.id} is not known here")
        elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and len(node.value) > 200:
            self.say(node, "a long text constant")

    def _attribute(self, node: ast.Attribute, *, kernel: bool) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.say(node, f"assigns to .{node.attr}")
        if node.attr.startswith("_"):
            self.say(node, f"reaches .{node.attr}")
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            if node.attr not in TORCH:
                self.say(node, f"torch.{node.attr}: launchers compute nothing with torch")
        elif isinstance(node.value, ast.Name) and node.value.id == "triton":
            if node.attr not in TRITON:
                self.say(node, f"triton.{node.attr}")
        elif not kernel and not _under_tl(node) and node.attr not in METHODS:
            self.say(node, f".{node.attr}: launchers read sizes and make memory, nothing else")


def _is_jit(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one) == "triton.jit" for one in node.decorator_list)


def _under_tl(node: ast.Attribute) -> bool:
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id == "tl"


def _is_annotation_of(function: ast.FunctionDef, node: ast.AST) -> bool:
    """Whether a node is one of the decorators; they were read already."""
    return any(node is one or node in ast.walk(one) for one in function.decorator_list)
