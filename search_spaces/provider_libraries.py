"""Kernels of other libraries beside which regions are ranked: what each computes, and where its counts come from.

Workers do not install them. A library stands here only for an operator that it has one autograd function for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.schemas.ops import OpCost
from shardwright.search_spaces import provider_fla, provider_liger


@dataclass(frozen=True)
class Library:
    """One library at the version whose source was read."""

    provider: str
    title: str
    distribution: str
    version: str

    @property
    def source(self) -> str:
        """Where its counts come from."""
        return f"launches and bytes as read in {self.distribution} {self.version}"

    @property
    def not_installable(self) -> str:
        """Why no plan can choose it."""
        return (
            f"not installable: workers run this package's kernels, torch.compile and eager torch; {self.title} is a "
            "rival, ranked to compare"
        )


LIGER = Library(provider_liger.NAME, "Liger", "liger-kernel", "0.8.5")
FLA = Library(provider_fla.NAME, "flash-linear-attention", "fla-core", "0.6.0")


@dataclass(frozen=True)
class LibraryKernel:
    """A library's function for one operator."""

    library: Library
    cost: Callable[..., OpCost]
    """(dtype, named sizes of the operator) → counted work."""
    computes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Constant of a region → values that the function computes; a constant that is not named may be anything."""

    def fits(self, constants: Mapping[str, object]) -> bool:
        """Whether the function computes a region with these constants."""
        return all(constants.get(name) in values for name, values in self.computes.items())


_ROUNDED_LAST = ("scale-then-cast", "native")
_SCORED = {"form": ("scored",)}
LIBRARY_KERNELS: dict[str, tuple[LibraryKernel, ...]] = {
    "rms_norm": (
        LibraryKernel(LIGER, provider_liger.rms_norm, {"form": ("cast-then-scale", "unit-offset", *_ROUNDED_LAST)}),
    ),
    "add_rms_norm": (
        LibraryKernel(LIGER, provider_liger.add_rms_norm, {"form": ("cast-then-scale", "unit-offset", *_ROUNDED_LAST)}),
    ),
    "gated_rms_norm": (LibraryKernel(FLA, provider_fla.gated_rms_norm, {"form": ("wide",)}),),
    "swiglu": (LibraryKernel(LIGER, provider_liger.gated, {"gate": ("silu", "gelu-tanh")}),),
    "activation": (LibraryKernel(LIGER, provider_liger.relu_squared, {"gate": ("relu2",)}),),
    "rope": (LibraryKernel(LIGER, provider_liger.rope, {"form": ("pair",)}),),
    "linear_cross_entropy": (LibraryKernel(LIGER, provider_liger.linear_cross_entropy),),
    "moe_layer": (
        LibraryKernel(
            LIGER,
            provider_liger.moe_layer,
            {"gate": ("silu",), "biased": (False,), "transposed": (False,), "split": ("halves",)},
        ),
    ),
    "attention_residual": (
        LibraryKernel(LIGER, provider_liger.attention_residuals, _SCORED),
        LibraryKernel(FLA, provider_fla.attention_residuals, _SCORED),
    ),
    "kda": (LibraryKernel(FLA, provider_fla.kda),),
    "gated_delta": (LibraryKernel(FLA, provider_fla.gated_delta),),
    "short_conv": (LibraryKernel(FLA, provider_fla.short_conv),),
}
"""Operator → functions of libraries that compute it."""


def libraries(ops: Sequence[str], constants: Mapping[str, object]) -> tuple[Library, ...]:
    """Libraries that have a function for every one of the operators, in the order of the first one's table.

    A region of one operator must also have constants that the function computes; of several, the region's constants
    are none of their own.
    """
    found = [
        {
            kernel.library.provider: kernel
            for kernel in LIBRARY_KERNELS.get(op, ())
            if len(ops) > 1 or kernel.fits(constants)
        }
        for op in ops
    ]
    return tuple(kernel.library for name, kernel in found[0].items() if all(name in one for one in found))
