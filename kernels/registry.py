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
    "gated_rms_norm": OperatorEntry(
        name="gated_rms_norm",
        folder="gated_rms_norm",
        op_path="gated_rms_norm.op:gated_rms_norm",
        cost_path="gated_rms_norm.cost:cost",
        suite_path="gated_rms_norm.cases:SUITE",
        dimensions=("T", "H", "D"),
        borrowed=("rms_norm",),
    ),
    "latent_norm": OperatorEntry(
        name="latent_norm",
        folder="latent_norm",
        op_path="latent_norm.op:latent_norm",
        cost_path="latent_norm.cost:cost",
        suite_path="latent_norm.cases:SUITE",
        dimensions=("T", "W", "H"),
        borrowed=("gated_rms_norm", "rms_norm"),
    ),
    "qk_norm_rope": OperatorEntry(
        name="qk_norm_rope",
        folder="qk_norm_rope",
        op_path="qk_norm_rope.op:qk_norm_rope",
        cost_path="qk_norm_rope.cost:cost",
        suite_path="qk_norm_rope.cases:SUITE",
        more_suites=("qk_norm_rope.cases:PAIRS_SUITE", "qk_norm_rope.cases:MLA_SUITE"),
        dimensions=("T", "Q", "K", "D", "W"),
        borrowed=(
            "gated_rms_norm/contract.py",
            "gated_rms_norm/rows.py",
            "rms_norm",
        ),
    ),
    "router": OperatorEntry(
        name="router",
        folder="router",
        op_path="router.op:router",
        cost_path="router.cost:cost",
        suite_path="router.cases:SUITE",
        dimensions=("T", "E", "k"),
        borrowed=("tuned.py",),
    ),
    "permute": OperatorEntry(
        name="permute",
        folder="permute",
        op_path="permute.op:combine",
        cost_path="permute.cost:cost",
        suite_path="permute.cases:SUITE",
        dimensions=("T", "K", "E", "H"),
        borrowed=("tuned.py",),
    ),
    "grouped_lora_mlp": OperatorEntry(
        name="grouped_lora_mlp",
        folder="grouped_lora_mlp",
        op_path="grouped_lora_mlp.op:grouped_lora_mlp",
        cost_path="grouped_lora_mlp.cost:cost",
        suite_path="grouped_lora_mlp.cases:SUITE",
        more_suites=("grouped_lora_mlp.cases:LORA_SUITE",),
        dimensions=("R", "E", "H", "I"),
        borrowed=("permute", "tuned.py"),
    ),
    "moe_layer": OperatorEntry(
        name="moe_layer",
        folder="moe_layer",
        op_path="moe_layer.op:moe_layer",
        cost_path="moe_layer.cost:cost",
        suite_path="moe_layer.cases:SUITE",
        more_suites=("moe_layer.cases:LORA_SUITE", "moe_layer.cases:BASE_SUITE"),
        dimensions=("T", "K", "E", "H", "I"),
        borrowed=("grouped_lora_mlp", "permute", "tuned.py"),
    ),
    "linear_cross_entropy": OperatorEntry(
        name="linear_cross_entropy",
        folder="linear_cross_entropy",
        op_path="linear_cross_entropy.op:linear_cross_entropy",
        cost_path="linear_cross_entropy.cost:cost",
        suite_path="linear_cross_entropy.cases:SUITE",
        more_suites=("linear_cross_entropy.cases:LORA_SUITE",),
        dimensions=("T", "H", "V"),
        borrowed=("tuned.py",),
    ),
    "packed_experts": OperatorEntry(
        name="packed_experts",
        folder="packed_experts",
        op_path="packed_experts.op:packed_experts",
        cost_path="packed_experts.cost:cost",
        suite_path="packed_experts.cases:SUITE",
        more_suites=("packed_experts.cases:LORA_SUITE", "packed_experts.biased_cases:SUITE"),
        dimensions=("R", "E", "H", "I"),
        borrowed=("grouped_lora_mlp", "permute", "tuned.py"),
    ),
    "dsa_attention": OperatorEntry(
        name="dsa_attention",
        folder="dsa/attention",
        op_path="dsa.attention.op:dsa_attention",
        cost_path="dsa.attention.cost:cost",
        suite_path="dsa.attention.cases:SUITE",
        more_suites=(
            "dsa.attention.cases:BACKWARD_SUITE",
            "dsa.attention.cases:GATED_SUITE",
            "dsa.attention.cases:GROUPED_SUITE",
        ),
        dimensions=("T", "H", "S", "K", "V"),
    ),
    "dsa_indexer": OperatorEntry(
        name="dsa_indexer",
        folder="dsa/indexer",
        op_path="dsa.indexer.op:dsa_indexer",
        cost_path="dsa.indexer.cost:cost",
        suite_path="dsa.indexer.cases:SUITE",
        more_suites=("dsa.indexer.cases:SCORES_SUITE",),
        dimensions=("T", "N", "D", "K"),
    ),
    "dsa": OperatorEntry(
        name="dsa",
        folder="dsa",
        op_path="dsa.op:latent_attention",
        cost_path="dsa.cost:cost",
        suite_path="dsa.cases:SUITE",
        more_suites=("dsa.cases:DOOR_SUITE", "dsa.cases:DENSE_SUITE"),
        dimensions=("T", "H"),
        borrowed=("dsa/attention", "dsa/indexer", "dsa/kl"),
    ),
    "dsa_kl": OperatorEntry(
        name="dsa_kl",
        folder="dsa/kl",
        op_path="dsa.kl.op:dsa_kl",
        cost_path="dsa.kl.cost:cost",
        suite_path="dsa.kl.cases:SUITE",
        more_suites=("dsa.kl.cases:DENSE_SUITE",),
        dimensions=("T", "N", "D", "K", "H", "M"),
        borrowed=("dsa/indexer",),
    ),
    "kda": OperatorEntry(
        name="kda",
        folder="kda",
        op_path="kda.op:kda",
        cost_path="kda.cost:cost",
        suite_path="kda.cases:SUITE",
        more_suites=("kda.cases:SOFTPLUS_SUITE",),
        dimensions=("T", "H", "K", "V"),
        borrowed=(
            "gated_delta/launches.py",
            "gated_delta/triton.py",
            "machine_code.py",
            "rms_norm/contract.py",
            "sound.py",
        ),
    ),
    "gated_delta": OperatorEntry(
        name="gated_delta",
        folder="gated_delta",
        op_path="gated_delta.op:gated_delta",
        cost_path="gated_delta.cost:cost",
        suite_path="gated_delta.cases:SUITE",
        dimensions=("T", "H", "K", "V"),
        borrowed=("kda", "machine_code.py", "rms_norm/contract.py", "sound.py"),
    ),
    "short_conv": OperatorEntry(
        name="short_conv",
        folder="short_conv",
        op_path="short_conv.op:short_conv",
        cost_path="short_conv.cost:cost",
        suite_path="short_conv.cases:SUITE",
        dimensions=("T", "C", "J"),
        borrowed=("kda/configs.py", "kda/contract.py", "kda/documents.py", "rms_norm/contract.py"),
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
