"""What every pattern shares: how a match is described, and the helpers that walk a canonical graph.

A matcher returns ``None`` on any doubt. What it returns is only a claim: the certificate re-traces and tests it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes, choose_sizes
from shardwright.agents.structure.region import Region, extract
from shardwright.schemas.cluster import DeviceSpec
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode
from shardwright.schemas.recipe import LoraSpec, Recipe

Tensors = dict[str, torch.Tensor]
PART_OF_MODULE = "workers compile whole modules, and the region is a part of one"


@dataclass(frozen=True)
class Match:
    """One place where a pattern claims to fit."""

    pattern: Pattern
    captured: CapturedGraph
    region: Region
    constants: dict[str, Any]
    anchor: str
    """Module path of the module that a worker changes, in the captured instance."""
    roles: dict[str, str]
    """Role → name relative to the anchor."""
    parameters: dict[str, str]
    """Role → fully qualified parameter name in the captured instance."""
    seam: str = ""
    """Set where the region spans two instances: in words, what it spans."""

    def modules(self) -> tuple[str, ...]:
        """The anchor in every instance that is built alike."""
        inner = self.anchor.removeprefix(self.captured.module_path)
        return tuple(place + inner if place else inner.removeprefix(".") for place in self.captured.occurrences)

    def all_parameters(self, roles: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """The region's parameters in every instance; those of some roles where roles are given."""
        own = self.captured.module_path
        return tuple(
            place + name.removeprefix(own) if place else name
            for place in self.captured.occurrences
            for role, name in self.parameters.items()
            if roles is None or role in roles
        )

    @property
    def label(self) -> str:
        """Where in the layer, for example ``post_attention_layernorm``."""
        inner = self.anchor.removeprefix(self.captured.module_path).removeprefix(".")
        return inner or self.roles.get("norm") or self.anchor.rpartition(".")[2] or "whole"


@dataclass(frozen=True)
class VariantSpec:
    """One way to run a region, before the target is known."""

    name: str
    provider: str
    op: str
    predicate: VariantPredicate
    forms: tuple[str, ...] = ()
    """Values of the ``form`` constant that this variant implements; empty means any."""
    not_installable: str = ""
    """Why workers cannot install it, where that does not depend on the cluster."""
    packed: tuple[str, ...] = ()
    """Roles whose parameters it reads packed: all of them must be stored so."""

    def computes(self, constants: dict[str, Any]) -> bool:
        """Whether it implements the form of a match with these constants."""
        return not self.forms or constants.get("form") in self.forms


class Pattern(ABC):
    """One fusible computation.

    Subclasses say where it is (``find``), what it computes in the model's own spelling (``reference``), and what it
    computes by an independent formula (``oracle``).
    """

    name: ClassVar[str]
    version: ClassVar[int]
    title: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32", "float16")
    """Formats of activations and weights that the pattern was proved for."""
    spans_modules: ClassVar[bool] = False
    """Whether the region lies in more than one module, so that a worker must change the layer around them."""
    relayout: ClassVar[str] = ""
    """How parameters change their layout, in words; empty where they do not."""
    contiguous: ClassVar[tuple[str, ...]] = ()
    """Roles whose innermost dimension must be dense."""
    reads_views: ClassVar[bool] = False
    """Whether inputs may be pieces of one tensor: nothing in the region or its operators writes to them."""
    maybe_empty: ClassVar[tuple[str, ...]] = ()
    """Roles that may have no values, so that nothing depends on them."""
    strided: ClassVar[tuple[str, ...]] = ()
    """Roles that the differential test also passes non-contiguous."""
    trainable: ClassVar[tuple[str, ...]] = ()
    """Roles whose gradients are compared."""
    lora: ClassVar[str] = ""
    """Why an adapter on a parameter of the region is harmless; empty where it is not."""
    cut: ClassVar[str] = ""
    """Where expert parallelism cuts the region, in words; empty where it never does."""
    costed: ClassVar[bool] = True
    """Whether the providers of this computation are described, so that variants can be compared by time."""
    tolerance: ClassVar[str] = "0.02"
    """Largest relative error between fused and unfused in bf16 on the live model."""

    @abstractmethod
    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        """All matches in one graph, in canonical order."""

    @abstractmethod
    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """The computation spelled as the model spells it."""

    @abstractmethod
    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """The computation by an independent formula, fp64."""

    @abstractmethod
    def variants(self) -> tuple[VariantSpec, ...]:
        """The ways to run it, in no order."""

    @abstractmethod
    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        """Named sizes for the cost of one occurrence on one rank."""

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Adversarial inputs by role."""
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in match.region.inputs}
        return float_cases(shapes, seed=7, strided=self.strided)

    def sizes(self, match: Match) -> Sizes:
        """Sizes of the differential test; the captured size where a small one would be another computation."""
        return choose_sizes(match.region)

    def comparable(self, results: Tensors, match: Match) -> Tensors:
        """The region's results in the form that the oracle gives: without what is free, such as the order of a set."""
        return results

    def gradients(self, match: Match) -> tuple[str, ...]:
        """Roles whose gradients are compared for one match."""
        return self.trainable

    def inverse(self, match: Match) -> str:
        """Undo the change of layout on real tensors; what was compared, empty where nothing was tested.

        Raises:
            ArithmeticError: the way back does not give the parameters as they were.
        """
        return ""

    def second_opinion(self, match: Match) -> str:
        """A further differential test of a pattern's own; returns what was compared, empty where there is none."""
        return ""

    def kernel_cost(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[str, dict[str, int]]:
        """Operator and named sizes under which a variant of ours, and libraries beside it, are counted and measured."""
        return self.name, self.cost_shape(match, tokens)

    def kernel_parts(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[tuple[str, dict[str, int]], ...]:
        """Operators, each with its sizes, that make up a variant of ours; more than one where it calls several."""
        return (self.kernel_cost(match, spec, tokens),)

    def unranked(self, match: Match, spec: VariantSpec) -> str:
        """Why a variant's work is not counted for one match; empty where it is."""
        return ""

    def way(self, match: Match, spec: VariantSpec, recipe: Recipe, device: DeviceSpec) -> str:
        """What a variant with several ways does for the recipe's rows, and why; empty where it has one."""
        return ""

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        """The plain reference of a kernel that takes more than tensors and ε; ``None`` where the table serves."""
        return None

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        """Let a kernel's own contract look at the sizes; False where the general check serves.

        Raises:
            KernelError: what the contract refuses.
        """
        return False

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """Why a variant cannot stand in for one match although the match is legal; empty where it can."""
        return ""

    def must_verify(self, match: Match, spec: VariantSpec) -> tuple[str, ...]:
        """Operators of a variant that a device must have verified at their present sources before a plan may run it."""
        return ()

    def refuses_adapter(self, spec: VariantSpec, lora: LoraSpec) -> str:
        """Why a variant cannot hold the recipe's adapters inside its region; empty where it can."""
        return "a LoRA target lies inside the region" if spec.predicate.lora_inside is False else ""

    def bind(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        inputs: dict[str, str],
        outputs: dict[str, str],
        constants: dict[str, Any],
        anchor: str,
        roles: dict[str, str],
    ) -> Match | None:
        """A match from role bindings; ``None`` where the roles do not enclose a region."""
        if len(set(inputs.values())) != len(inputs):
            return None
        region = extract(graph, inputs, outputs)
        if region is None:
            return None
        parameters = {role: graph.by_id[i].target for role, i in inputs.items() if graph.by_id[i].kind == "parameter"}
        return Match(self, captured, region, constants, anchor, roles, parameters)


class View:
    """Questions that matchers ask of a canonical graph."""

    def __init__(self, graph: CanonicalGraph) -> None:
        self.graph = graph

    def ops(self, target: str) -> Iterator[OpNode]:
        return (node for node in self.graph.nodes if node.kind == "op" and node.target == target)

    def operand(self, node: OpNode, position: int = 0) -> OpNode:
        return self.graph.by_id[node.inputs[position]]

    def is_op(self, node: OpNode | None, target: str, operands: int | None = None) -> bool:
        if node is None or node.kind != "op" or node.target != target:
            return False
        return operands is None or len(node.inputs) == operands

    def both_orders(self, node: OpNode) -> Iterator[tuple[OpNode, OpNode]]:
        """The two operands of a commutative operation, in both orders."""
        if len(node.inputs) == 2:
            one, other = (self.graph.by_id[i] for i in node.inputs)
            yield one, other
            yield other, one

    def through(self, node: OpNode, *targets: str) -> OpNode:
        """The value under any chain of the named one-operand operations."""
        while node.kind == "op" and node.target in targets and len(node.inputs) == 1:
            node = self.operand(node)
        return node


def below(path: str, anchor: str) -> str | None:
    """A name relative to a module; ``None`` where it is not inside."""
    if not anchor:
        return path
    return path.removeprefix(anchor + ".") if path.startswith(anchor + ".") else None


def holder(*names: str) -> str:
    """The innermost module that holds all of the named parameters."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) != 1:
            break
        common.append(parts[0])
    return ".".join(common)
