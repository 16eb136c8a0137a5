"""The fused operators: one explicit table. Torch and triton are imported only when an operator is used."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.schemas.errors import KernelError
from shardwright.schemas.ops import OpCost

if TYPE_CHECKING:
    from shardwright.kernels.cases import OpSuite

ROOM = Path(__file__).parent
SHARED_SOURCES = ("device.py", "dispatch.py", "guards.py", "launch.py")
"""Sources that every operator runs through."""


@dataclass(frozen=True)
class OperatorEntry:
    """One operator: where its parts are and what it is good for.

    Paths are ``module:name`` below ``shardwright.kernels``.
    """

    name: str
    folder: str
    op_path: str
    cost_path: str
    suite_path: str
    dimensions: tuple[str, ...]
    """Names of the sizes that its cost function takes."""
    borrowed: tuple[str, ...] = ()
    """Sources of other operators that it runs, relative to the room."""

    def load_op(self) -> Callable[..., Any]:
        """The public function; imports torch and triton."""
        return _load(self.op_path)

    def load_cost(self) -> Callable[..., OpCost]:
        """The cost function; imports no torch."""
        return _load(self.cost_path)

    def load_suite(self) -> OpSuite:
        """Verification and timing cases; imports torch and triton."""
        suite: OpSuite = _load(self.suite_path)
        return suite


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"shardwright.kernels.{module}"), name)


OPERATORS: dict[str, OperatorEntry] = {
    "rms_norm": OperatorEntry(
        name="rms_norm",
        folder="rms_norm",
        op_path="rms_norm.op:rms_norm",
        cost_path="rms_norm.cost:cost",
        suite_path="rms_norm.cases:SUITE",
        dimensions=("T", "H"),
    ),
    "add_rms_norm": OperatorEntry(
        name="add_rms_norm",
        folder="add_rms_norm",
        op_path="add_rms_norm.op:add_rms_norm",
        cost_path="add_rms_norm.cost:cost",
        suite_path="add_rms_norm.cases:SUITE",
        dimensions=("T", "H"),
        borrowed=("rms_norm/op.py", "rms_norm/triton.py", "rms_norm/configs.py", "rms_norm/contract.py"),
    ),
}


def operator(name: str) -> OperatorEntry:
    """The entry of one operator.

    Raises:
        KernelError: ``unknown-operator``.
    """
    if name not in OPERATORS:
        raise KernelError(
            "unknown-operator",
            f"no operator is called {name!r}",
            where="kernels.registry",
            next_action=f"use one of {', '.join(OPERATORS)}",
        )
    return OPERATORS[name]


RUN_PARTS = ("__init__.py", "configs.py", "contract.py", "op.py", "reference.py", "triton.py")
"""Files of an operator's folder that decide what a worker computes. Cost and test cases do not."""


def sources(name: str) -> tuple[Path, ...]:
    """Every source file that decides what the operator computes, in a fixed order.

    Raises:
        KernelError: ``unknown-operator``.
    """
    entry = operator(name)
    own = (f"{entry.folder}/{part}" for part in RUN_PARTS)
    return tuple(ROOM / relative for relative in sorted({*own, *entry.borrowed, *SHARED_SOURCES}))


def source_sha256(name: str) -> str:
    """The hash of an operator's sources: relative names and bytes. A plan and evidence are bound to it.

    Raises:
        KernelError: ``unknown-operator``.
    """
    digest = hashlib.sha256()
    for path in sources(name):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOM).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
