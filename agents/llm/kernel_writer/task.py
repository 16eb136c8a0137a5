"""What a written kernel must compute: the region in fp64 (the truth) and as the model runs it (the yardstick).

Legend: T tokens of the capture, replaced by other numbers here so that no kernel can be made for one shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwright.agents.structure.interpret import Fp64Region, Sizes
from shardwright.agents.structure.patterns.base import Match
from shardwright.agents.structure.region import Region, standalone
from shardwright.agents.structure.skeleton import BATCH, SEQUENCE

Tensors = dict[str, torch.Tensor]
INTEGERS = ("int64", "int32", "bool", "uint8")


def sizes_of(tokens: int) -> Sizes:
    """The capture's sequence, alone, flattened over the batch, and with one column more (a sink), for ``tokens``."""
    return Sizes({SEQUENCE: tokens, BATCH * SEQUENCE: BATCH * tokens, SEQUENCE + 1: tokens + 1})


@dataclass(frozen=True)
class Task:
    """One region as a function of tensors, in the order x0, x1, … to y0, y1, …"""

    region: Region

    @classmethod
    def of(cls, match: Match) -> Task:
        return cls(match.region)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.region.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(sorted(self.region.outputs))

    @property
    def trained(self) -> tuple[str, ...]:
        """Inputs that get a gradient."""
        return tuple(role for role in self.inputs if self.region.spec(role).dtype not in INTEGERS)

    @property
    def follows_tokens(self) -> bool:
        """Whether another number of tokens gives other shapes; else a kernel could be made for one shape alone."""
        one, other = sizes_of(SEQUENCE + 1), sizes_of(SEQUENCE + 2)
        specs = [self.region.spec(role).shape for role in (*self.inputs, *self.outputs)]
        return any(tuple(one.shape(shape)) != tuple(other.shape(shape)) for shape in specs)

    def draw(self, tokens: int, seed: int, spread: float = 1.0) -> Tensors:
        """Random inputs for so many tokens, in the formats of the capture."""
        generator, sizes = torch.Generator().manual_seed(seed), sizes_of(tokens)
        drawn = {}
        for role in self.inputs:
            spec = self.region.spec(role)
            shape, dtype = sizes.shape(spec.shape), getattr(torch, spec.dtype)
            if spec.dtype in INTEGERS:
                drawn[role] = torch.randint(0, 2, shape, generator=generator).to(dtype)
            else:
                drawn[role] = (spread * torch.randn(shape, generator=generator)).to(dtype)
        return drawn

    def truth(self, values: Tensors, cotangents: Tensors, tokens: int) -> tuple[Tensors, Tensors]:
        """Outputs and gradients in fp64."""
        wide = {r: v.double() if v.is_floating_point() else v for r, v in values.items()}
        function = Fp64Region(self.region, sizes_of(tokens))
        return self.both(function, wide, {r: v.double() for r, v in cotangents.items()})

    def eager(self, values: Tensors, cotangents: Tensors, tokens: int) -> tuple[Tensors, Tensors]:
        """Outputs and gradients as the model computes them."""
        return self.both(SizedRegion(self.region, sizes_of(tokens)), values, cotangents)

    def both(self, function: Any, values: Tensors, cotangents: Tensors) -> tuple[Tensors, Tensors]:
        """Outputs, and gradients of the trained inputs, of any function of tensors by role."""
        leaves = {r: v.clone().requires_grad_(r in self.trained) for r, v in values.items()}
        results = function(leaves)
        wanted = [results[r] for r in self.outputs if results[r].requires_grad]
        given = [cotangents[r] for r in self.outputs if results[r].requires_grad]
        gradients = torch.autograd.grad(wanted, [leaves[r] for r in self.trained], given, allow_unused=True)
        found = {
            r: torch.zeros_like(leaves[r]) if g is None else g for r, g in zip(self.trained, gradients, strict=True)
        }
        return {r: v.detach() for r, v in results.items()}, found

    def cotangents(self, tokens: int, seed: int) -> Tensors:
        """Random gradients of the outputs."""
        generator, sizes = torch.Generator().manual_seed(seed), sizes_of(tokens)
        specs = {role: self.region.spec(role) for role in self.outputs}
        return {
            role: torch.randn(sizes.shape(spec.shape), generator=generator).to(getattr(torch, spec.dtype))
            for role, spec in specs.items()
        }

    def text(self) -> str:
        """The traced operations in torch's own words, for a prompt: operators, shapes, constants."""
        lines = []
        names: dict[Any, str] = {}
        graph = standalone(self.region)
        for at, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                names[node] = node.name.removeprefix("role_")
                continue
            if node.op == "output":
                lines.append("return " + ", ".join(names[one] for one in node.args[0]))
                continue
            names[node] = f"v{at}"
            operands = ", ".join(_plain(argument, names) for argument in node.args)
            value = node.meta.get("val")
            shape = list(value.shape) if isinstance(value, torch.Tensor) else []
            lines.append(f"v{at} = {getattr(node.target, '__name__', 'getitem')}({operands})  # {shape}")
        return "\n".join(lines)


class SizedRegion(Fp64Region):
    """The traced nodes on other sizes, in the formats that they have."""

    widen = False


def _plain(argument: Any, names: dict[Any, str]) -> str:
    if argument in names if isinstance(argument, torch.fx.Node) else False:
        return names[argument]
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_plain(one, names) for one in argument) + "]"
    return str(argument) if isinstance(argument, (int, float, bool, torch.dtype)) or argument is None else "other"
