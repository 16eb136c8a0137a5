"""An adapter on a router's matrix, whose module chooses experts too and so cannot be exchanged for a linear.

The module's own forward runs. While it does, its ``weight`` is a tensor that answers ``F.linear`` with
``x Wᵀ + b + s (x Aᵀ) Bᵀ``: no merged matrix is made, and nothing is rounded to the format of W. Whatever else a family
would do with the matrix is refused, so that an adapter cannot be passed by.
Legend: A [r, H], B [E, r], s scaling, W [E, H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.lora.linear import LoraProduct
from shardwright.schemas.errors import LegalityError

CASTS = (Tensor.float, Tensor.double, Tensor.bfloat16, Tensor.half, Tensor.type, Tensor.to)


class AdaptedWeight(Tensor):
    """W with its adapter, for the time of one forward."""

    plain: Tensor
    lora_a: Tensor
    lora_b: Tensor
    scaling: float
    router: str

    @classmethod
    def of(cls, plain: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, router: str) -> AdaptedWeight:
        """A view of ``plain``; the adapters keep their own format."""
        made: AdaptedWeight = Tensor._make_subclass(cls, plain.detach())
        made.plain, made.lora_a, made.lora_b, made.scaling, made.router = plain, lora_a, lora_b, scaling, router
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is F.linear and not isinstance(args[0], AdaptedWeight):
            x, weight = args[0], args[1] if len(args) > 1 else named["weight"]
            bias = args[2] if len(args) > 2 else named.get("bias")
            return LoraProduct.apply(x, weight.plain, bias, weight.lora_a, weight.lora_b, weight.scaling)
        if func in CASTS and isinstance(args[0], AdaptedWeight):
            held = args[0]
            return cls.of(func(held.plain, *args[1:], **named), held.lora_a, held.lora_b, held.scaling, held.router)
        if getattr(func, "__name__", "") == "__get__" and not isinstance(fact := func(args[0].plain), Tensor):
            return fact
        name = next((one.router for one in args if isinstance(one, AdaptedWeight)), "router")
        raise _unknown(name, f"its forward uses the matrix in {getattr(func, '__name__', func)}, not in F.linear")


def adapt_router(module: nn.Module, name: str, rank: int, scaling: float, dtype: torch.dtype) -> None:
    """Put ``lora_a`` and ``lora_b`` beside the router's ``weight`` and let its forward see them.

    Raises:
        LegalityError: ``router-adapter``, here or in a forward, where the matrix is not used in ``F.linear`` alone.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        raise _unknown(name, f"{type(module).__name__} has no matrix named weight")
    experts, width = weight.shape
    module.register_parameter("lora_a", nn.Parameter(torch.empty((rank, width), dtype=dtype, device=weight.device)))
    module.register_parameter("lora_b", nn.Parameter(torch.empty((experts, rank), dtype=dtype, device=weight.device)))
    module.lora_scaling = scaling  # type: ignore[assignment]
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        held, a, b = (module._parameters[one] for one in ("weight", "lora_a", "lora_b"))
        assert held is not None and a is not None and b is not None
        module._parameters["weight"] = AdaptedWeight.of(held, a, b, scaling, name)  # type: ignore[assignment]
        try:
            return original(*args, **kwargs)
        finally:
            module._parameters["weight"] = held

    module.forward = forward


def _unknown(name: str, why: str) -> LegalityError:
    return LegalityError(
        "router-adapter",
        f"no adapter fits the router {name}: {why}",
        where="decision.lora_targets",
        next_action="leave router out of recipe.lora.targets for this family",
    )
