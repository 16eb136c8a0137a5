"""Run a traced region on real fp64 tensors of small sizes.

The traced nodes run, not the canonical ones, so the result does not depend on the canonical form being right. Floating
casts become fp64: what is compared is the function, not its rounding (rounding is the matter of dtype and re-trace).

Sizes above ``LARGE`` are replaced by small ones, the same everywhere, a doubled size by the doubled small one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from shardwright.agents.structure.opaque_indexers import run_choice
from shardwright.agents.structure.opaque_loops import run_pieces, run_rows
from shardwright.agents.structure.opaque_rules import run_rule
from shardwright.agents.structure.region import Region

LARGE = 256
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHAPE_OPS = frozenset(
    {
        "view",
        "reshape",
        "_unsafe_view",
        "expand",
        "slice",
        "narrow",
        "split",
        "split_with_sizes",
        "unflatten",
        "clamp",
        "new_empty",
        "conv1d",
    }
)


@dataclass(frozen=True)
class Sizes:
    """Captured size → size in the test."""

    small: dict[int, int]

    def of(self, size: int) -> int:
        return self.small.get(size, size)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.of(s) for s in shape)


def choose_sizes(region: Region) -> Sizes:
    """Small sizes for the large dimensions of a region's values; a size keeps its relation to its half.

    Where the half is a dimension of its own and stays as it is (it is not large), the size stays too: a cut in the
    middle must fall in the middle.
    """
    found: set[int] = set()
    for node in (*region.border, *region.nodes):
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                found |= {int(s) for s in tensor.shape}
    small: dict[int, int] = {}
    for position, size in enumerate(sorted(s for s in found if s > LARGE)):
        half = size // 2
        halved = size % 2 == 0 and half in found
        small[size] = 2 * small.get(half, half) if halved else 16 * (position + 2) + 8
    return Sizes(small)


class Fp64Region(torch.nn.Module):
    """The region as a function of fp64 (or integer) tensors by role."""

    widen = True
    """Whether floating casts become fp64."""

    def __init__(self, region: Region, sizes: Sizes) -> None:
        super().__init__()
        self.region, self.sizes = region, sizes

    def forward(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        env: dict[fx.Node, Any] = {node: values[role] for node, role in self.region.border.items()}
        for node in self.region.nodes:
            env[node] = self._run(node, env)
        return {role: env[node] for role, node in self.region.result.items()}

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if node.target is operator.getitem:
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        if not isinstance(node.target, torch._ops.OpOverload):
            raise TypeError(f"{node.target} has no fp64 meaning")
        name = node.target._schema.name.split("::")[-1]
        rescale = name in _SHAPE_OPS

        def plain(value: Any, is_size: bool) -> Any:
            if isinstance(value, fx.Node):
                return env[value]
            if isinstance(value, torch.dtype):
                return torch.float64 if self.widen and value in _FLOATS else value
            if isinstance(value, torch.device):
                return next((t.device for t in env.values() if isinstance(t, torch.Tensor)), torch.device("cpu"))
            if isinstance(value, int) and not isinstance(value, bool) and is_size:
                return self.sizes.of(value + 1) - 1 if name == "clamp" else self.sizes.of(value)
            if isinstance(value, (list, tuple)):
                return [plain(v, is_size) for v in value]
            return value

        args = [plain(a, rescale) for a in node.args]
        kwargs = {k: plain(v, rescale) for k, v in node.kwargs.items()}
        if name == "delta_rule":
            *values, rule, unit = args
            with KeepFp64():
                return run_rule(rule, tuple(values), unit=unit)
        if name == "pooled_choice":
            hidden, q_latent, valid, parameters, rule, heads, top_k, pool, tail = args
            with KeepFp64():
                given = (hidden, q_latent, valid, *parameters)
                return run_choice(rule, given, heads=heads, top_k=top_k, pool=pool, tail=tail)
        if name == "rows_of":
            return run_rows(*args)
        if name == "pieces":
            return run_pieces(*args)
        if name == "_grouped_mm":
            return grouped_product(*args, **kwargs)
        return node.target(*args, **kwargs)


def grouped_product(rows: torch.Tensor, stack: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``[R, in]`` times ``[E, in, out]`` group by group, for formats that the library's own product does not take.

    Args:
        offs: where each group ends; rows after the last end give zeros.
    """
    ends = [int(end) for end in offs]
    pieces = [rows[start:end] @ stack[e] for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    rest = rows[ends[-1] :] @ torch.zeros_like(stack[0])
    return torch.cat([*pieces, rest])


class KeepFp64(TorchFunctionMode):
    """While open, a class's own widening to fp32 leaves fp64 as it is: compared is the function, not its rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func is torch.Tensor.to and args[0].dtype == torch.float64:
            wanted = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)]
            if wanted and wanted[0].is_floating_point:
                return args[0]
        if kwargs.get("dtype") in (torch.float32, torch.bfloat16):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
