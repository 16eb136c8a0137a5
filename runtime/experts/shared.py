"""The shared expert of a layer, computed while its routed rows travel, or before them where none travels.

A block calls its routed experts and then its shared ones, on the same tokens. Here the experts, as soon as their rows
are under way, compute the shared expert of the tokens that the block was given; when the block calls it, the value is
there. Both passes of a recomputed layer do the same: a value lives inside one call of the block, however that ends.
Legend: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from shardwright.runtime.experts.module import LoraExperts
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

SHARED = ("shared_experts", "shared_expert", "shared_mlp")
"""Names of shared experts beside the routed ones."""
SHARED_COMPUTE = "experts:shared"
"""Name in a profile of the shared expert's computation."""


class SharedUnderDispatch:
    """One block's shared expert, under its experts' dispatch from the making on.

    Args:
        block: calls ``experts``, then ``shared``.
        experts: its routed experts.
        shared: its shared ones: a function of each token by itself.
        name: of the block.
    """

    def __init__(self, block: nn.Module, experts: LoraExperts, shared: nn.Module, name: str) -> None:
        self.name, self.block_forward, self.shared_forward = name, block.forward, shared.forward
        self.tokens: Tensor | None = None
        self.value: Tensor | None = None
        block.forward, shared.forward = self.whole, self.take
        experts.meanwhile = self.compute

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, its tokens, which come first, known to the experts inside."""
        self.tokens = args[0] if args else next(iter(kwargs.values()))
        try:
            return self.block_forward(*args, **kwargs)
        finally:
            self.tokens = self.value = None

    def compute(self) -> None:
        """The shared expert of the block's tokens; the experts call it once their rows are under way."""
        if self.tokens is not None:
            with record_function(SHARED_COMPUTE):
                self.value = self.shared_forward(self.tokens)

    def take(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The value that is there, in the shape of what the block gives: its tokens.

        Raises:
            LegalityError: ``overlap-shared`` where the block calls it first, or on other tokens or with more.
        """
        if not self._is_made(x) or args or kwargs:
            raise _refused("the block does not call its shared expert on its own tokens, after its experts", self.name)
        value, self.value = self.value, None
        assert value is not None
        return value.view_as(x)

    def _is_made(self, x: Tensor) -> bool:
        """Whether the value is there and is that of these tokens."""
        tokens = self.tokens
        same = tokens is not None and x.data_ptr() == tokens.data_ptr() and x.numel() == tokens.numel()
        return self.value is not None and same


class SharedBeforeExperts(SharedUnderDispatch):
    """One block's shared expert, before its fused experts, so that a recomputed layer ends with these.

    What they keep is then the last that a checkpoint waits for, and their last product is not made again. Where the
    experts run unfused, or the block calls its shared expert otherwise, it is computed where it stands.
    """

    def take(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The value, if it is there; else it is made now, and not once more by experts that come later."""
        if args or kwargs or not self._is_made(x):
            self.tokens = None
            found: Tensor = self.shared_forward(x, *args, **kwargs)
            return found
        return super().take(x)


def put_shared_under_dispatch(model: nn.Module) -> int:
    """Do so in every block that has both kinds of experts on more than one rank.

    Returns:
        The number of such blocks.

    Raises:
        LegalityError: ``overlap-shared`` where there is none.
    """
    blocks = 0
    for name, block, experts, shared in _blocks(model):
        if experts.group is not None:
            SharedUnderDispatch(block, experts, shared, name)
            blocks += 1
    if not blocks:
        raise _refused("no block has shared experts beside routed ones on more than one rank", "the model")
    return blocks


def put_shared_before_experts(model: nn.Module, fusions: tuple[FusionDecision, ...]) -> int:
    """Do so in every block whose experts are one operator (``moe_layer``); for layers that are recomputed.

    Returns:
        The number of such blocks.
    """
    whole = {name for one in fusions if one.op == "moe_layer" and not one.rejected for name in one.modules}
    blocks = 0
    for name, block, experts, shared in _blocks(model):
        if experts.name in whole and experts.meanwhile is None:
            SharedBeforeExperts(block, experts, shared, name)
            blocks += 1
    return blocks


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module, LoraExperts, nn.Module]]:
    """Name, block, routed experts and shared ones of every block that has both."""
    found = []
    for name, experts in model.named_modules():
        if isinstance(experts, LoraExperts):
            parent = name.rpartition(".")[0]
            block = model.get_submodule(parent)
            shared = next((one for key in SHARED if isinstance(one := getattr(block, key, None), nn.Module)), None)
            if shared is not None:
                found.append((parent, block, experts, shared))
    return found


def _refused(what: str, where: str) -> LegalityError:
    return LegalityError("overlap-shared", what, where=where, next_action="choose overlap none or chunked")
