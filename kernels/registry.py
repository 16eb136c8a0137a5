"""The fused operators: one explicit table. Torch and triton are imported only when an operator is used."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.schemas.errors import KernelError
from shardwright.schemas.ops import OpCost

if TYPE_CHECKING:
    from shardwright.kernels.cases import OpSuite

ROOM = Path(__file__).parent
SHARED_SOURCES = ("admitted.py", "bound.py", "device.py", "dispatch.py", "guards.py", "launch.py")
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
    """Other sources that it runs, relative to the room: a file, or a folder for all its run parts."""
    more_suites: tuple[str, ...] = ()
    """Further suites of the same operator, as when it is timed with and without LoRA."""

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

    def load_suites(self) -> tuple[OpSuite, ...]:
        """All suites, the main one first; imports torch and triton."""
        return tuple(_load(path) for path in (self.suite_path, *self.more_suites))


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"shardwright.kernels.{module}"), name)


def _entry(
    name: str,
    dimensions: tuple[str, ...],
    *,
    folder: str = "",
    function: str = "",
    more_suites: tuple[str, ...] = (),
    borrowed: tuple[str, ...] = (),
) -> OperatorEntry:
    """An operator whose files are called as all are: ``op.py``, ``cost.py``, ``cases.py``.

    Args:
        folder: where it is, if not in the folder of its name.
        function: the public function in ``op.py``, if it is not called as the operator.
        more_suites: ``module:name`` below its folder.
    """
    package = (folder or name).replace("/", ".")
    return OperatorEntry(
        name=name,
        folder=folder or name,
        op_path=f"{package}.op:{function or name}",
        cost_path=f"{package}.cost:cost",
        suite_path=f"{package}.cases:SUITE",
        dimensions=dimensions,
        borrowed=borrowed,
        more_suites=tuple(f"{package}.{path}" for path in more_suites),
    )


OPERATORS: dict[str, OperatorEntry] = {
    entry.name: entry
    for entry in (
        _entry("rms_norm", ("T", "H")),
        _entry(
            "add_rms_norm",
            ("T", "H"),
            borrowed=("rms_norm/op.py", "rms_norm/triton.py", "rms_norm/configs.py", "rms_norm/contract.py"),
        ),
        _entry("gated_rms_norm", ("T", "H", "D"), borrowed=("rms_norm",)),
        _entry(
            "attention_residual",
            ("T", "R", "H"),
            more_suites=("cases:ROWS_1", "cases:ROWS_3", "cases:ROWS_5", "cases:ROWS_9"),
            borrowed=("rms_norm/contract.py",),
        ),
        _entry("latent_norm", ("T", "W", "H"), borrowed=("gated_rms_norm", "rms_norm")),
        _entry(
            "qk_norm_rope",
            ("T", "Q", "K", "D", "W"),
            more_suites=("cases:PAIRS_SUITE", "cases:MLA_SUITE"),
            borrowed=("gated_rms_norm/contract.py", "gated_rms_norm/rows.py", "rms_norm"),
        ),
        _entry("router", ("T", "E", "k"), borrowed=("tuned.py",)),
        _entry("permute", ("T", "K", "E", "H"), function="combine", borrowed=("tuned.py",)),
        _entry(
            "grouped_lora_mlp",
            ("R", "E", "H", "I"),
            more_suites=("cases:LORA_SUITE",),
            borrowed=("permute", "tuned.py"),
        ),
        _entry(
            "moe_layer",
            ("T", "K", "E", "H", "I"),
            more_suites=("cases:LORA_SUITE", "cases:BASE_SUITE"),
            borrowed=("grouped_lora_mlp", "permute", "tuned.py"),
        ),
        _entry("linear_cross_entropy", ("T", "H", "V"), more_suites=("cases:LORA_SUITE",), borrowed=("tuned.py",)),
        _entry(
            "packed_experts",
            ("R", "E", "H", "I"),
            more_suites=("cases:LORA_SUITE", "biased_cases:SUITE"),
            borrowed=("grouped_lora_mlp", "permute", "tuned.py"),
        ),
        _entry(
            "dsa_attention",
            ("T", "H", "S", "K", "V"),
            folder="dsa/attention",
            more_suites=("cases:BACKWARD_SUITE", "cases:GATED_SUITE", "cases:GROUPED_SUITE"),
        ),
        _entry("dsa_indexer", ("T", "N", "D", "K"), folder="dsa/indexer", more_suites=("cases:SCORES_SUITE",)),
        _entry(
            "dsa",
            ("T", "H"),
            function="latent_attention",
            more_suites=("cases:DOOR_SUITE", "cases:DENSE_SUITE"),
            borrowed=("dsa/attention", "dsa/indexer", "dsa/kl"),
        ),
        _entry(
            "dsa_kl",
            ("T", "N", "D", "K", "H", "M"),
            folder="dsa/kl",
            more_suites=("cases:DENSE_SUITE",),
            borrowed=("dsa/indexer",),
        ),
        _entry(
            "kda",
            ("T", "H", "K", "V"),
            more_suites=("cases:SOFTPLUS_SUITE",),
            borrowed=(
                "gated_delta/launches.py",
                "gated_delta/triton.py",
                "machine_code.py",
                "rms_norm/contract.py",
                "sound.py",
            ),
        ),
        _entry(
            "gated_delta",
            ("T", "H", "K", "V"),
            borrowed=("kda", "machine_code.py", "rms_norm/contract.py", "sound.py"),
        ),
        _entry(
            "short_conv",
            ("T", "C", "J"),
            borrowed=("kda/configs.py", "kda/contract.py", "kda/documents.py", "rms_norm/contract.py"),
        ),
    )
}
"""Every operator by name."""


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


NOT_RUN = frozenset({"cases.py", "cost.py", "inputs.py", "rivals.py", "tuning.py"})
"""Files of an operator's folder that decide nothing a worker computes: test cases, costs, what it is timed beside."""


def _run_parts(relative: str) -> tuple[str, ...]:
    """A file as it is; of a folder every source that workers run."""
    if relative.endswith(".py"):
        return (relative,)
    return tuple(f"{relative}/{path.name}" for path in (ROOM / relative).glob("*.py") if path.name not in NOT_RUN)


def sources(name: str) -> tuple[Path, ...]:
    """Every source file that decides what the operator computes, in a fixed order.

    Raises:
        KernelError: ``unknown-operator``.
    """
    entry = operator(name)
    found = {part for relative in (entry.folder, *entry.borrowed, *SHARED_SOURCES) for part in _run_parts(relative)}
    return tuple(ROOM / relative for relative in sorted(found))


def code_sha256(name: str) -> str:
    """The hash of an operator's sources alone: relative names and bytes.

    Raises:
        KernelError: ``unknown-operator``.
    """
    digest = hashlib.sha256()
    for path in sources(name):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOM).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def launch_choices(name: str) -> tuple[str, ...]:
    """The tuned choices that the operator or what it runs may take, on any device: canonical lines, sorted.

    Raises:
        KernelError: ``unknown-operator``.
    """
    entry = operator(name)
    taken = {entry.folder, *(relative for relative in entry.borrowed if not relative.endswith(".py"))}
    lines = []
    for path in sorted((ROOM / "tuned").glob("*.json")):
        for found in json.loads(path.read_bytes())["entries"]:
            if found["op"] in taken:
                parts = (path.stem, found["op"], found["kernel"], found["bucket"], found["choice"])
                lines.append(json.dumps(parts, sort_keys=True))
    return tuple(sorted(lines))


def source_sha256(name: str) -> str:
    """What a plan and evidence are bound to: the hash of the sources and, where there are any, of tuned choices.

    A plan so pins its launch choices with its code: workers refuse other ones.

    Raises:
        KernelError: ``unknown-operator``.
    """
    code, choices = code_sha256(name), launch_choices(name)
    if not choices:
        return code
    return hashlib.sha256("\n".join((code, *choices)).encode()).hexdigest()
